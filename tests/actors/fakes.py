"""Process actors without processes: a launcher that passes the same contract tests as the real one."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from actors import ChildSpec, Exited, ExitReason, Progress, Signalled
from actors._child_async import ProcessMain
from actors._child_common import exit_code, resolve
from actors._exit import verdict_on
from actors._wire import Boot, Bye, Launch, Phase, decode_frame, encode_frame

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
        self.processes[path].end(Signalled(number))

    def exit(self, path: str, code: int) -> None:
        """End the process at `path` as os._exit would."""
        self.processes[path].end(Exited(code))


class FakeProcess:
    """A process that is a task; it is dead once its status is known, whatever its task still does."""

    def __init__(self, launcher: FakeLauncher, pid: int) -> None:
        self.pid = pid
        self.stderr, theirs = os.pipe()
        os.close(theirs)  # it has nothing to say there
        self.control, self._theirs = socket.socketpair()
        self._launcher = launcher
        self._scope = anyio.CancelScope()
        self._status: ExitReason | None = None
        self._dead = anyio.Event()

    async def live(self) -> None:
        try:
            with self._scope:
                self.end(Exited(await self._main()))
        except (OSError, EOFError, anyio.ClosedResourceError):
            if self._status is None:
                self.end(Exited(0))  # its parent is gone
        finally:
            self.end(Signalled(SIGKILL))  # if it has no other status yet
            self._dead.set()

    async def _main(self) -> int:
        sock = self._theirs
        sock.setblocking(False)
        sock.send(encode_frame(Boot(self.pid, 1)))
        launch = decode_frame(await self._receive(int.from_bytes(await self._receive(4), "big")))
        assert isinstance(launch, Launch)
        sock.send(encode_frame(Phase(Progress("import", text=launch.target))))
        try:
            body = resolve(launch)
        except Exception as exc:
            reason = verdict_on(exc, None, started=True)
            sock.send(encode_frame(Bye(reason)))
            return exit_code(reason)
        sock.send(encode_frame(Phase(Progress("start"))))
        return exit_code(await ProcessMain(sock, launch, body, self._launcher).run())

    async def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            await anyio.wait_readable(self._theirs)
            more = self._theirs.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def end(self, status: ExitReason) -> None:
        if self._status is None:
            self._status = status
            anyio.notify_closing(self._theirs)
            self._theirs.close()  # the dead say nothing more
            self._scope.cancel("killed")

    async def wait(self) -> ExitReason:
        await self._dead.wait()
        assert self._status is not None
        return self._status

    def kill(self) -> None:
        self.end(Signalled(SIGKILL))

    def reap(self) -> None:
        pass

    def describe(self) -> str:
        return f"fake process {self.pid}"

    async def dump_stacks(self, limit_s: float) -> str:
        await anyio.lowlevel.checkpoint()
        return f"stacks of fake process {self.pid}"

    def close(self) -> None:
        self.control.close()
        os.close(self.stderr)


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
