"""How long ``runtime serve`` takes: from the start of its process to an open port, to ready, to the first token."""

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from ..config import Config, to_toml
from ..listen import bind
from .report import BenchError, Figure

_HOST = "127.0.0.1"
_POLL_S = 0.005
_STOP_S = 30.0


def start_server(config: Config) -> list[Figure]:
    """Starts a server of this configuration on a port of its own, asks it for a token and stops it.

    Raises BenchError, with its last words, where it doesn't become ready.
    """
    with bind(_HOST, 0) as probe:
        port = probe.getsockname()[1]
    config = msgspec.structs.replace(config, http=msgspec.structs.replace(config.http, host=_HOST, port=port))
    limit_s = config.supervision.start_timeout_max_s
    with tempfile.TemporaryDirectory() as folder:
        path, said = Path(folder) / "model.toml", Path(folder) / "stderr"
        path.write_text(to_toml(config))
        with said.open("wb") as stderr:
            began = time.perf_counter()
            command = [sys.executable, "-m", "runtime", "serve", str(path)]
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr)
        try:
            times = dict[str, float]()
            while "ready" not in times:
                status = _ask(config, "GET", "/ready")
                now = time.perf_counter() - began
                if server.poll() is not None or now > limit_s:
                    words = said.read_text(errors="replace")[-2000:]
                    raise BenchError(f"runtime serve did not become ready within {now:.1f} s. Its last words:\n{words}")
                if status:
                    times.setdefault("port open", now)
                if status == 200:
                    times["ready"] = now
                time.sleep(_POLL_S)
            body = {"model": config.model.name, "prompt": [5], "max_tokens": 1}
            if (status := _ask(config, "POST", "/v1/completions", body)) != 200:
                raise BenchError(f"runtime serve answered its first request with status {status}")
            times["first token"] = time.perf_counter() - began
        finally:
            _stop(server)
    return [Figure(f"runtime serve: {name}", seconds, "s") for name, seconds in times.items()]


def _ask(config: Config, method: str, path: str, body: object = None) -> int:
    """The status of the answer; 0 where nobody answers."""
    headers = {"Content-Type": "application/json"}
    if config.http.api_keys:
        headers["Authorization"] = f"Bearer {config.http.api_keys[0]}"
    connection = http.client.HTTPConnection(_HOST, config.http.port, timeout=60)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except OSError:
        return 0
    finally:
        connection.close()


def _stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.kill(server.pid, signal.SIGKILL)
            server.wait()
