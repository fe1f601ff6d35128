"""Starts: what can be seen of one that goes on, and how one that fails ends."""

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from servekit import ENV, ROOT, Server, descendants

from runtime.names import DEFAULT_SOURCE
from runtime.sources import resolve

SCHEDULER = "replica0/scheduler0"


@pytest.fixture(scope="session")
def folder() -> Path:
    return Path(resolve(DEFAULT_SOURCE).folder)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The model's folder, to be spoilt: links, save for what a test replaces."""
    made = tmp_path / "model"
    made.mkdir()
    for file in folder.iterdir():
        (made / file.name).symlink_to(file)
    return made


def own(folder: Path, name: str) -> Path:
    """Replace a link by a copy of its file."""
    path = folder / name
    source = path.resolve()
    path.unlink()
    shutil.copy(source, path)
    return path


def rewrite_header(path: Path, change: object) -> None:
    """Change the header of a safetensors file; what it describes stays where it is."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)  # type: ignore[operator]
    text = json.dumps(header).encode()
    text += b" " * (length - len(text))
    assert len(text) == length, "the header must not grow"
    path.write_bytes(data[:8] + text + data[8 + length :])


def failed(tmp_path: Path, *arguments: str, settings: tuple[str, ...] = ()) -> str:
    """The log of a server that must not start; it has ended by itself and left nothing behind."""
    with Server(tmp_path, *arguments, settings=settings) as server:
        family: set[int] = set()
        while server.process.poll() is None:
            family |= descendants(server.process.pid)
            time.sleep(0.02)
        assert server.process.returncode == 1
        server.wait_gone(family, 2)
        return server.log


def test_a_busy_port_is_an_error_at_once(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        command = [sys.executable, "-m", "runtime", "serve", "--port", str(other.getsockname()[1])]
        run = subprocess.run(command, env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert run.returncode == 1
    assert "in use" in run.stderr and "--port" in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_a_missing_folder(tmp_path: Path) -> None:
    log = failed(tmp_path, settings=("model.source=/no/such/folder",))
    assert "/no/such/folder" in log and "model.source" in log and "model" in log


def test_a_truncated_file(copy: Path, tmp_path: Path) -> None:
    path = own(copy, "model.safetensors")
    os.truncate(path, path.stat().st_size // 2)
    log = failed(tmp_path, str(copy))
    assert "model.safetensors is cut off" in log


def test_a_corrupt_header(copy: Path, tmp_path: Path) -> None:
    path = own(copy, "model.safetensors")
    with path.open("r+b") as file:
        file.write(b"\xff" * 64)
    assert "model.safetensors is not a safetensors file" in failed(tmp_path, str(copy))


def test_a_missing_tensor(copy: Path, tmp_path: Path) -> None:
    name = "model.layers.7.mlp.up_proj.weight"

    def drop(header: dict[str, object]) -> None:
        header[name.replace("up_proj", "xx_proj")] = header.pop(name)

    rewrite_header(own(copy, "model.safetensors"), drop)
    log = failed(tmp_path, str(copy))
    assert name in log and SCHEDULER in log


def test_no_tokenizer(copy: Path, tmp_path: Path) -> None:
    (copy / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in failed(tmp_path, str(copy))


def test_an_unsupported_architecture(copy: Path, tmp_path: Path) -> None:
    path = own(copy, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["T5Model"], "model_type": "t5"}))
    log = failed(tmp_path, str(copy))
    assert "T5Model" in log and SCHEDULER in log


def test_not_enough_memory(tmp_path: Path) -> None:
    log = failed(tmp_path, settings=("engine.kv_tokens=2000000000",))
    assert "memory" in log and SCHEDULER in log


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_child_that_is_killed_while_it_starts(tmp_path: Path, number: int) -> None:
    with Server(tmp_path) as server:
        actor = server.wait_phase(SCHEDULER, lambda actor: actor["pid"] and actor["phase"])
        os.kill(actor["pid"], number)
        assert server.wait_exit() == 1
        assert f"killed by {signal.Signals(number).name}" in server.log
        assert SCHEDULER in server.log


def test_a_child_that_hangs_while_it_starts(tmp_path: Path) -> None:
    with Server(tmp_path, settings=("supervision.start_timeout_s=3",)) as server:
        actor = server.wait_phase(SCHEDULER, lambda actor: actor["pid"] and actor["phase"])
        os.kill(actor["pid"], signal.SIGSTOP)
        assert server.wait_exit() == 1
        assert "did not start within 3" in server.log


def test_while_it_starts_the_front_says_how_far_it_is(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        first = next(iter(server.answers()))
        assert first.status == 503
        assert first.json["state"] == "starting"
        assert any(actor["state"] != "running" for actor in first.json["actors"])
        refused = server.post("/v1/completions", {"prompt": "x"})
        assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
        assert server.get("/health").status == 200
        server.wait_ready()
    assert f"http://127.0.0.1:{server.port}" in server.log


def test_a_root_that_is_killed_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        server.wait_phase(SCHEDULER, lambda actor: actor["pid"] and actor["phase"])
        family = descendants(server.process.pid)
        server.process.kill()
        server.wait_exit()
        server.wait_gone(family, 2)
