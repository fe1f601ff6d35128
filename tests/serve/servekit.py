"""A real server to test against: ``runtime serve`` as a process, its clients as sockets."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
# One thread and few pages: the tests share two cores. float32: answers are compared token by token.
SMALL = ("engine.threads=1", "engine.kv_tokens=16384", "model.dtype=float32", "supervision.drain_timeout_s=10")
MODEL = "SmolLM2-135M-Instruct"
PATIENCE_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def processes() -> dict[int, tuple[int, str]]:
    """pid -> (parent, state) of every process."""
    found: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                found[int(entry.name)] = int(fields[1]), fields[0]
    return found


def descendants(root: int) -> set[int]:
    table = processes()
    members: set[int] = set()
    grew = {root}
    while grew:
        grew = {pid for pid, (parent, _) in table.items() if parent in grew}
        members |= grew
    return members


def alive(pid: int) -> bool:
    return processes().get(pid, (0, "Z"))[1] != "Z"


def left_behind(pids: set[int]) -> set[str]:
    """Shared memory, temporary files of ours, and listening data sockets."""
    files = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    files |= {str(path) for path in Path("/tmp").iterdir() if "runtime" in path.name or "actor" in path.name}
    inodes: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            inodes |= {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    sockets = Path("/proc/net/unix").read_text().splitlines()
    return files | {line for line in sockets if "@runtime-" in line and f"socket:[{line.split()[6]}]" in inodes}


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class StreamReply:
    """A streamed answer, read by a thread of its own. ``events`` grow while it runs."""

    status: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False  # [DONE] was seen
    whole: bool = False  # the body ended as HTTP says it must
    failure: str = ""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _ended: bool = False
    _connection: http.client.HTTPConnection | None = None

    @property
    def text(self) -> str:
        choices = [event["choices"][0] for event in self.events if event.get("choices")]
        return "".join(c.get("text") or (c.get("delta") or {}).get("content") or "" for c in choices)

    @property
    def finish(self) -> str | None:
        reasons = [event["choices"][0].get("finish_reason") for event in self.events if event.get("choices")]
        return next((reason for reason in reasons if reason), None)

    @property
    def error(self) -> dict[str, Any] | None:
        return next((event["error"] for event in self.events if "error" in event), None)

    def wait_events(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.events) >= count or self._ended, PATIENCE_S)

    def wait_end(self, patience_s: float = PATIENCE_S) -> Self:
        with self._changed:
            assert self._changed.wait_for(lambda: self._ended, patience_s), (
                f"still open after {len(self.events)} events"
            )
        return self

    def hang_up(self) -> None:
        assert self._connection is not None
        with contextlib.suppress(OSError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)

    def run(self, connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> None:
        self._connection = connection
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            self.status = response.status
            if response.status != 200:
                self.events.append(json.loads(response.read()))
            else:
                for line in response:
                    self._take(line.strip())
            # An early end of the connection ends the iteration too, but within a chunk or before the last one.
            self.whole = getattr(response, "chunk_left", None) is None
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _take(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        payload = line[5:].strip()
        with self._changed:
            if payload == b"[DONE]":
                self.done = True
            else:
                self.events.append(json.loads(payload))
            self._changed.notify_all()


class Server:
    """``runtime serve`` with its standard error in a file. Leaving the block ends it, and whatever it left."""

    def __init__(self, folder: Path, *arguments: str, settings: tuple[str, ...] = (), small: bool = True) -> None:
        self.port = free_port()
        self.log_path = folder / f"server-{self.port}.log"
        values = (*(SMALL if small else ()), *settings)
        command = [sys.executable, "-m", "runtime", "serve", *arguments, "--port", str(self.port)]
        command += [part for value in values for part in ("--set", value)]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, start_new_session=True, env=ENV
            )
        self.started_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(f"the server's log:\n{self.log[-4000:]}")
        family = {self.process.pid, *descendants(self.process.pid)}
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.wait_gone(family, 5)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    # --- requests

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = PATIENCE_S,
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Reply:
        return self.request("GET", path)

    def post(self, path: str, body: Any) -> Reply:
        return self.request("POST", path, body)

    def complete(self, prompt: Any, **fields: Any) -> Any:
        reply = self.post("/v1/completions", {"model": MODEL, "prompt": prompt, "temperature": 0, **fields})
        assert reply.status == 200, reply.body
        return reply.json

    def stream(self, prompt: Any, path: str = "/v1/completions", **fields: Any) -> StreamReply:
        """Start a streamed request; it is read in the background."""
        body = {"model": MODEL, "temperature": 0, "stream": True, **fields}
        if prompt is not None:
            body["prompt"] = prompt
        reply = StreamReply()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        threading.Thread(target=reply.run, args=(connection, path, body), daemon=True).start()
        return reply

    # --- states

    def answers(self) -> Iterator[Reply]:
        """Answers of /ready, as often as the server gives them; ends when it has exited."""
        while self.process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                yield self.request("GET", "/ready", timeout_s=5)

    def wait_ready(self) -> Self:
        deadline = time.monotonic() + PATIENCE_S
        for reply in self.answers():
            if reply.status == 200:
                return self
            assert time.monotonic() < deadline, f"not ready: {reply.body!r}"
        raise AssertionError(f"the server exited with {self.process.returncode}:\n{self.log}")

    def actors(self) -> dict[str, dict[str, Any]]:
        """What /ready says of each actor, by path."""
        return {actor["path"]: actor for actor in self.get("/ready").json["actors"]}

    def wait_phase(self, path: str, wanted: Any) -> dict[str, Any]:
        """Until ``wanted(actor)`` holds of the actor at ``path`` as /ready tells it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if (actor := self.actors().get(path)) is not None and wanted(actor):
                    return actor
            assert self.process.poll() is None, self.log
        raise AssertionError(f"{path} did not get there: {self.actors()}")

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        total = 0.0
        for line in self.get("/metrics").body.decode().splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == name and all(f'{k}="{v}"' in sample for k, v in labels.items()):
                total += float(value)
        return total

    def wait_metric(self, name: str, wanted: float, **labels: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (value := self.metric(name, **labels)) != wanted:
            assert time.monotonic() < deadline, f"{name} is {value}, not {wanted}"

    def wait_log(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.log:
            assert time.monotonic() < deadline, f"{words!r} is not in the log:\n{self.log}"
            time.sleep(0.01)

    # --- ends

    def wait_exit(self, patience_s: float = PATIENCE_S) -> int:
        return self.process.wait(patience_s)

    @staticmethod
    def wait_gone(pids: set[int], patience_s: float) -> None:
        """Until none of ``pids`` runs; they are ended by force after that, and the test fails."""
        deadline = time.monotonic() + patience_s
        left = {pid for pid in pids if alive(pid)}
        while left and time.monotonic() < deadline:
            time.sleep(0.01)
            left = {pid for pid in left if alive(pid)}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"processes {left} outlived their root by {patience_s} s"


_PATHS = (str(ROOT), str(ROOT / "http"), *filter(None, [os.environ.get("PYTHONPATH")]))
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(_PATHS), "OMP_NUM_THREADS": "1"}
