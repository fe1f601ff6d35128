"""For tests of programs that use actors: process actors without processes, and a check for leaks."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from ._child_async import ProcessMain
from ._child_common import convert_args, exit_code, reason_of
from ._exit import Progress
from ._launcher import ExitStatus
from ._spec import ChildSpec
from ._target import import_target
from ._wire import Boot, Bye, FrameReader, Launch, Phase, encode_frame, load

SIGKILL = 9


class FakeLauncher:
    """Runs each "process" as tasks on the caller's loop, over a real socketpair and with the real protocol.

    `kill(path)` ends one from outside with any signal. What it can't do:
    main-thread actors, ending a target that shields itself from cancellation, and crashes of the interpreter.
    Got from `open_fake_launcher()`.
    """

    def __init__(self, tasks: TaskGroup) -> None:
        self.processes: dict[str, FakeProcess] = {}
        self._tasks = tasks
        self._pids = 0

    def launch(self, spec: ChildSpec, path: str, grace_s: float) -> FakeProcess:
        if spec.backend == "main-thread":
            raise OSError("the fake launcher has no main threads to give away")
        self._pids += 1
        process = FakeProcess(self, self._pids)
        self.processes[path] = process
        self._tasks.start_soon(process.live)
        return process

    def show(self, data: bytes) -> None:
        pass

    def kill(self, path: str, number: int = SIGKILL) -> None:
        """End the process at `path` as a signal would."""
        self.processes[path].end(ExitStatus(signal=number))

    def exit(self, path: str, code: int) -> None:
        """End the process at `path` as os._exit would."""
        self.processes[path].end(ExitStatus(code=code))


class FakeProcess:
    """A process that is a task; it is dead once its status is known, whatever its task still does."""

    def __init__(self, launcher: FakeLauncher, pid: int) -> None:
        self.pid = pid
        self.stderr: int | None = None
        self.control, self._theirs = socket.socketpair()
        self._launcher = launcher
        self._scope = anyio.CancelScope()
        self._status: ExitStatus | None = None
        self._dead = anyio.Event()

    async def live(self) -> None:
        try:
            with self._scope:
                self.end(ExitStatus(code=await self._main()))
        except (OSError, EOFError, anyio.ClosedResourceError):
            if self._status is None:
                self.end(ExitStatus(code=0))  # its parent is gone
        finally:
            self.end(ExitStatus(signal=SIGKILL))  # if it has no other status yet
            self._dead.set()

    async def _main(self) -> int:
        sock = self._theirs
        sock.setblocking(False)
        sock.send(encode_frame(Boot(self.pid, 1)))
        reader = FrameReader()
        while True:
            await anyio.wait_readable(sock)
            data = sock.recv(1 << 18)
            if not data:
                raise EOFError
            if frames := reader.feed(data):
                break
        launch = frames[0]
        assert isinstance(launch, Launch)
        sock.send(encode_frame(Phase(Progress("import", text=launch.target))))
        try:
            target = import_target(launch.target)
            args = convert_args(target, [load(arg) for arg in launch.args])
        except Exception as exc:
            reason = reason_of(exc)
            sock.send(encode_frame(Bye(reason)))
            return exit_code(reason)
        sock.send(encode_frame(Phase(Progress("start"))))
        reason = await ProcessMain(sock, launch, target, args, self._launcher).run(reader, frames[1:])
        return exit_code(reason)

    def end(self, status: ExitStatus) -> None:
        if self._status is None:
            self._status = status
            anyio.notify_closing(self._theirs)
            self._theirs.close()  # the dead say nothing more
            self._scope.cancel("killed")

    async def wait(self) -> ExitStatus:
        await self._dead.wait()
        assert self._status is not None
        return self._status

    def kill(self) -> None:
        self.end(ExitStatus(signal=SIGKILL))

    def reap(self) -> None:
        pass

    def describe(self) -> str:
        return f"fake process {self.pid}"

    async def dump_stacks(self, limit_s: float) -> str:
        await anyio.lowlevel.checkpoint()
        return f"stacks of fake process {self.pid}"

    def close(self) -> None:
        self.control.close()


@asynccontextmanager
async def open_fake_launcher() -> AsyncIterator[FakeLauncher]:
    """A launcher for `open_supervisor(launcher=...)`; leave it after the supervisor."""
    error: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield FakeLauncher(tasks)
        except Exception as exc:
            error = exc  # raised below, without the task group's wrapping
        tasks.cancel_scope.cancel()
    if error is not None:
        raise error


def child_processes() -> set[int]:
    """The children of this process, zombies included."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(int(pid) for pid in (task / "children").read_text().split())
        except OSError:
            continue
    return found


def open_fds() -> dict[int, str]:
    """What every fd of this process is."""
    fds: dict[int, str] = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            fds[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
    return fds


@contextmanager
def no_leaks(ignore_threads: str = "trio|AnyIO|asyncio") -> Iterator[None]:
    """Raise AssertionError if the block leaves a child process, a thread or an fd behind.

    To be used around whole event loops; idle pool threads of the loops (by their names) are no leak.
    """
    children, threads, fds = child_processes(), set(threading.enumerate()), open_fds()
    yield
    new_threads = set(threading.enumerate()) - threads
    left = {thread for thread in new_threads if not re.search(ignore_threads, thread.name, re.I)}
    assert not left, f"threads left: {left}"
    assert not (more := child_processes() - children), f"processes left: {more}"
    new_fds = {fd: what for fd, what in open_fds().items() if fds.get(fd) != what}
    assert not new_fds, f"fds left: {new_fds}"


__all__ = ["FakeLauncher", "FakeProcess", "child_processes", "no_leaks", "open_fake_launcher", "open_fds"]
