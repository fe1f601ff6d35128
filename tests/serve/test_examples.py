"""Every example runs as it stands."""

import contextlib
import http.client
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from servekit import ENV, MODEL, ROOT, Server, descendants, free_port

SETTINGS = ("engine.threads=1", "engine.kv_tokens=8192", "model.dtype=float32")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("offline.py", ["Once upon a time", "Paris", "length"]),
        ("embed_trio.py", [MODEL, "Paris:", "Oslo:"]),
        ("embed_asyncio.py", ["embedded: Paris", "over HTTP: Paris"]),
    ],
)
def test_example(script: str, words: list[str]) -> None:
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / script), *SETTINGS]
    run = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    for word in words:
        assert word in run.stdout, run.stdout


def test_the_endpoints_in_someones_own_quart_app(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, str(ROOT / "examples" / "quart_app.py"), f"127.0.0.1:{port}", *SETTINGS]
    log = tmp_path / "log"
    with log.open("wb") as file:
        app = subprocess.Popen(command, env=ENV, stdout=file, stderr=file)
    try:
        answer = b""
        while not answer:
            assert app.poll() is None, log.read_text()
            with contextlib.suppress(OSError, http.client.HTTPException):
                answer = get(port, "/")
        assert MODEL in answer.decode()
        assert json.loads(get(port, "/llm/v1/models"))["data"][0]["id"] == MODEL
        family = descendants(app.pid)
        assert family
    finally:
        app.send_signal(signal.SIGINT)
        app.wait(30)
    Server.wait_gone(family, 2)


def get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()
