"""Where processes come from: the seam between a process actor and the machine that it runs on.

A launcher for another host would start its agent there, hand back a connected socket, and answer `wait` from that
agent's words; supervisors and actors would not notice.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import anyio

from ._child import end_session
from ._exit import Exited, ExitReason, Lost, Signalled
from ._spec import ChildSpec

_CHILD = str(Path(__file__).with_name("_child.py"))


class Process(Protocol):
    """A process that was launched. Only `wait` and `dump_stacks` wait."""

    pid: int
    control: socket.socket
    stderr: int  # fd to read its stderr from

    async def wait(self) -> ExitReason:
        """Its end, as its host's kernel knows it: Exited, Signalled, or Lost if someone else took its exit status. May
        be cancelled and called again."""

    def kill(self) -> None:
        """SIGKILL for it and everything in its OS session."""

    def reap(self) -> None:
        """After `wait`: end what is left of its session, and forget it."""

    def describe(self) -> str:
        """For reports on a process that doesn't end: what the kernel says it does."""

    async def dump_stacks(self, limit_s: float) -> str:
        """The Python stacks of all its threads, taken without its cooperation; "" if none came within the limit, or
        none can come: a stopped process (SIGSTOP) isn't waited for."""

    def close(self) -> None:
        """Let go of every fd."""


class Launcher(Protocol):
    def launch(self, spec: ChildSpec, path: str, grace_s: float) -> Process:
        """Start it and return at once; raises OSError. `grace_s` is what it has when it finds its parent gone."""

    def show(self, data: bytes) -> None:
        """Pass on what a child wrote to its stderr."""


class LocalLauncher:
    """`python _child.py FD` on this machine, in an OS session of its own, with an inherited socketpair.

    What children write to stderr goes on to the fd `stderr`, unless that is None.
    """

    def __init__(self, stderr: int | None = 2) -> None:
        self._stderr = stderr

    def show(self, data: bytes) -> None:
        if self._stderr is not None:
            with contextlib.suppress(OSError):
                os.write(self._stderr, data)

    def launch(self, spec: ChildSpec, path: str, grace_s: float) -> Process:
        with contextlib.ExitStack() as on_error:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            on_error.callback(ours.close)
            stderr_read, stderr_write = os.pipe()
            on_error.callback(os.close, stderr_read)
            stacks = os.memfd_create("actor-stacks", os.MFD_CLOEXEC)
            on_error.callback(os.close, stacks)
            setup = {
                "path": [entry or os.getcwd() for entry in sys.path],
                "grace_s": grace_s,
                "stacks": stacks,
                "cpus": spec.cpus,
                "nice": spec.nice,
                "title": spec.title or f"actor {path}",
                "backend": spec.backend,
            }
            data = json.dumps(setup).encode()
            try:
                # On the loop's thread on purpose: a child must not depend on the life of a pool thread.
                popen = subprocess.Popen(
                    [sys.executable, "-P", _CHILD, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stderr=stderr_write,
                    pass_fds=(theirs.fileno(), stacks, *spec.pass_fds),
                    env={**os.environ, **spec.env},
                    start_new_session=True,
                )
            finally:
                theirs.close()
                os.close(stderr_write)
            on_error.callback(popen.wait)
            on_error.callback(popen.kill)
            pidfd = os.pidfd_open(popen.pid)
            ours.sendall(struct.pack(">I", len(data)) + data)
            on_error.pop_all()
        os.set_blocking(stderr_read, False)
        return LocalProcess(popen, pidfd, ours, stderr_read, stacks)


class LocalProcess:
    def __init__(
        self, popen: subprocess.Popen[bytes], pidfd: int, control: socket.socket, stderr: int, stacks: int
    ) -> None:
        self.pid = popen.pid
        self.control = control
        self.stderr = stderr
        self._popen = popen
        self._pidfd = pidfd
        self._stacks = stacks

    async def wait(self) -> ExitReason:
        await anyio.wait_readable(self._pidfd)
        try:
            info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)  # noqa: ASYNC222  it has ended
        except ChildProcessError:
            info = None
        if info is None:
            return Lost("someone else has taken its exit status")
        if info.si_code == os.CLD_EXITED:
            return Exited(info.si_status)
        return Signalled(info.si_status, info.si_code == os.CLD_DUMPED)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._kill_session()

    def _kill_session(self) -> None:
        """The leader is ours and not reaped, so that no other session can have its number."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        end_session(self.pid)

    def reap(self) -> None:
        self._kill_session()
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        self._popen.returncode = 0  # Popen must neither wait for that number nor warn about it

    def describe(self) -> str:
        try:
            state = self._state()
            place = Path(f"/proc/{self.pid}/wchan").read_text()
        except OSError:
            return f"pid {self.pid}"
        return f"pid {self.pid}, state {state}" + (f", waiting in {place}" if place not in ("", "0") else "")

    def _state(self) -> str:
        """One letter (see proc_pid_stat(5)); raises OSError."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    async def dump_stacks(self, limit_s: float) -> str:
        before = os.fstat(self._stacks).st_size
        with contextlib.suppress(OSError):
            if self._state() in "Tt":
                return ""
        try:
            signal.pidfd_send_signal(self._pidfd, STACKS_SIGNAL)
        except ProcessLookupError:
            return ""
        size = before
        with anyio.move_on_after(limit_s):
            while True:  # complete when it has stopped growing
                await anyio.sleep(0.02)
                now = os.fstat(self._stacks).st_size
                if now == size and now > before:
                    break
                size = now
        size = os.fstat(self._stacks).st_size
        return os.pread(self._stacks, size - before, before).decode(errors="replace")

    def close(self) -> None:
        self.control.close()
        for fd in (self.stderr, self._pidfd, self._stacks):
            os.close(fd)


STACKS_SIGNAL = signal.SIGRTMIN + 1  # see _child.py
