"""Servers as processes of their own, for benches: started, waited for, stopped."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

STOP_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def status_of(port: int, path: str) -> int:
    """The status of a GET; 0 where nobody answers."""
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            head = connection.recv(64)
    except OSError:
        return 0
    return int(head.split(b" ")[1]) if head.startswith(b"HTTP") else 0


@contextlib.contextmanager
def running(command: Sequence[str], port: int, ready_path: str, patience_s: float = 300.0) -> Iterator[str]:
    """The URL of the server that ``command`` starts on ``port``, once it is ready; stopped when the block is left."""
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=subprocess.STDOUT) as server,
    ):
        assert server.stdin is not None
        try:
            ended = time.monotonic() + patience_s
            while status_of(port, ready_path) != 200:
                if server.poll() is not None or time.monotonic() > ended:
                    said.seek(0)
                    words = said.read()[-2000:].decode(errors="replace")
                    raise SystemExit(f"{' '.join(command)} did not become ready (exit {server.poll()}):\n{words}")
                time.sleep(0.02)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.stdin.close()
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()


@contextlib.contextmanager
def ours(model: str | None, settings: Sequence[str]) -> Iterator[str]:
    """``runtime serve``."""
    port = free_port()
    command = [sys.executable, "-m", "runtime", "serve", *([model] if model else []), "--port", str(port)]
    with running([*command, *(part for value in settings for part in ("--set", value))], port, "/ready") as url:
        yield url


@contextlib.contextmanager
def llama_cpp(python: str, gguf: Path, *, threads: int, streams: int, context: int) -> Iterator[str]:
    """llama.cpp's server, run by the interpreter ``python``, which has xllamacpp."""
    port = free_port()
    script = str(Path(__file__).with_name("llama_server.py"))
    options = {"--port": port, "--threads": threads, "--streams": streams, "--context": context}
    command = [python, script, str(gguf), *(word for name, value in options.items() for word in (name, str(value)))]
    with running(command, port, "/health") as url:
        yield url
