"""An actor that is a process, seen from its parent: handshake, clock, stop ladder, and one verdict on its end."""

from __future__ import annotations

import math
import os

import anyio

from . import _wire as wire
from ._exit import ExitReason, Lost, Raised, Returned, Stopped, Unresponsive, capture
from ._incarnation import Actor, Observer, State
from ._launcher import Process
from ._link import Link
from ._snapshot import Snapshot
from ._spec import ChildSpec

FAILED_START_GRACE_S = 0.3  # for a process whose start has failed to be gone
EXIT_GRACE_S = 5.0  # for a process whose target has ended to be gone
ORPHAN_GRACE_S = 1.0  # for a process that finds its parent gone: nobody is left whom its work would help
LOST_GRACE_S = 0.5  # for a process that closed its control channel to be gone; less than it gives itself as an orphan
REAP_TIMEOUT_S = 10.0  # for a killed process to be gone
STACKS_TIMEOUT_S = 1.0
TAIL_BYTES = 64 * 1024
TAIL_LINES = 50


class ProcessActor(Actor):
    """Liveness is two facts joined: the kernel's word on the process, and its own words on the control channel."""

    kind = "process"

    def __init__(self, spec: ChildSpec, path: str, generation: int, observer: Observer) -> None:
        super().__init__(spec, path, generation, observer)
        self.inside: Snapshot | None = None  # as it told when last asked
        self._process: Process
        self._link: Link
        self._tail = b""  # of its stderr
        self._waiting = anyio.CancelScope()
        self._beat_at = 0.0
        self._kill_at = math.inf  # the earliest of all reasons to kill it
        self._killed_at: float | None = None
        self._bye: ExitReason | None = None
        self._bye_first = False  # it ended by itself, before anyone stopped it
        self._decided: ExitReason | None = None  # by us: it started too late, or hangs
        self._lost = ""
        self.reached_target = False

    @property
    def stderr_tail(self) -> tuple[str, ...]:
        return tuple(self._tail.decode(errors="replace").splitlines()[-TAIL_LINES:])

    def mailbox_counts(self) -> tuple[int, int]:
        return (0, 0) if self.inside is None else (self.inside.mailbox, self.inside.dropped)

    def inner(self) -> tuple[Snapshot, ...]:
        return () if self.inside is None else self.inside.children

    # -- life ---
    async def run(self) -> ExitReason:
        if self.stopped_by is not None:
            return Stopped(self.stopped_by)
        self._begin(State.SPAWNING)
        grace = ORPHAN_GRACE_S if self._spec.stop_timeout is None else min(self._spec.stop_timeout, ORPHAN_GRACE_S)
        try:
            self._process = process = self.environment.launcher.launch(self._spec, self.path, grace)
        except (OSError, ValueError) as exc:
            self.exception = exc
            return Raised(capture(exc))
        self.pid = process.pid
        reason: ExitReason = Lost("its supervisor was torn down")
        self._link = Link(process.control, self.hub, self._on_control, self.path, self.generation)
        try:
            self._link.send(self._launch_frame(grace))
            self.hub.add_below(self.path, self._link)
            status = await self._live(process)
            reason = self._verdict(status)
            if status is not None:
                process.reap()
        except BaseException:  # no stop, but a crash of the supervisor itself: leave no process
            process.kill()
            with anyio.move_on_after(REAP_TIMEOUT_S, shield=True):
                await process.wait()
                process.reap()
            raise
        finally:
            self.state = State.ENDED
            self._link.died(self.generation, reason)
            self.hub.remove(self.path, self.generation, reason)
            self._link.close()
            process.close()
        return reason

    async def _live(self, process: Process) -> ExitReason | None:
        """Until it is dead (the kernel's word on it) or can't be killed (None)."""
        status = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read)
            tasks.start_soon(self._link.write)
            tasks.start_soon(self._read_stderr)
            tasks.start_soon(self._run_clock)
            with self._waiting:
                status = await process.wait()
                self._link.read_rest()
                self._read_stderr_now()
            tasks.cancel_scope.cancel()
        return status

    def _launch_frame(self, grace_s: float) -> wire.Launch:
        spec = self._spec
        assert isinstance(spec.target, str)
        return wire.Launch(
            self.path,
            self.generation,
            spec.target,
            [wire.dump(arg) for arg in spec.args],
            spec.mailbox,
            spec.overflow,
            spec.drain,
            grace_s,
            self.hub.generations_below(self.path),
        )

    def _verdict(self, status: ExitReason | None) -> ExitReason:
        if self._decided is not None:
            return self._decided
        if self.stopped_by is not None and not self._bye_first:
            return self._stop_verdict(status, self.stopped_by)
        if self._bye is not None:
            return self._bye
        if status is None:
            return Lost(f"it can't be killed: {self._process.describe()}")
        if self._lost and self._killed_at is not None:
            return Lost(self._lost)
        return status

    def _stop_verdict(self, status: ExitReason | None, by: str) -> ExitReason:
        if status is None:
            return Stopped(by, "stuck", "it can't be killed")
        if self._killed_at is not None and self._bye is None:
            late = self._killed_at - self._stop_at
            return Stopped(by, "killed", f"after {late:.1f} s" if self.reached_target else "before its target ran")
        match self._bye:
            case Stopped(_, how, detail):
                return Stopped(by, how, detail)
            case None:
                return Stopped(by, "exited", str(status))
            case Returned():
                return Stopped(by, "returned")
            case other:
                return Stopped(by, "raised", str(other))

    # -- its words ---
    async def _read(self) -> None:
        try:
            await self._link.read()
        except wire.ProtocolError as exc:
            self._lost = f"it broke the protocol: {exc}"
            self._kill_by(0.0)
            return
        if self._bye is None:
            self._lost = "it closed its control channel and stayed alive"
            self._kill_by(LOST_GRACE_S)

    def _on_control(self, frame: wire.AnyFrame) -> None:
        match frame:
            case wire.Boot():
                if self.state is State.SPAWNING:
                    self.state = State.BOOTED
                self._tell("progress", progress=self.progress)
            case wire.Phase(progress):
                if progress.phase != "import" and self.state is State.BOOTED:
                    self.state = State.STARTING
                    self.reached_target = True
                self.on_progress(progress)
            case wire.Started(value):
                self._beat_at = anyio.current_time()
                self.on_started(wire.load(value))
                if self.stopped_by is None:
                    self._tell("started")
            case wire.Beat(phase):
                self._beat_at = anyio.current_time()
                if phase != self.phase:  # another limit holds, maybe an earlier one
                    self.phase = phase
                    self._clock_wake.set()
            case wire.Bye(reason):
                self._bye = reason
                self._bye_first = self.stopped_by is None
                if self.started_at is None and self._bye_first:
                    self._tell("failed_start", reason=reason)
                self._kill_by(FAILED_START_GRACE_S if self.started_at is None else EXIT_GRACE_S)
            case wire.Reported(event):
                if event.kind == "starting":  # for the next incarnation of this process
                    self.hub.generations[event.path] = event.generation
                self.environment.tell(event)
            case _:
                raise wire.ProtocolError(f"unexpected {type(frame).__name__}")

    async def _read_stderr(self) -> None:
        while self._read_stderr_now():
            await anyio.wait_readable(self._process.stderr)

    def _read_stderr_now(self) -> bool:
        """Take what is there; False at its end."""
        while True:
            try:
                data = os.read(self._process.stderr, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.environment.launcher.show(data)
            self._tail = (self._tail + data)[-TAIL_BYTES:]

    # -- its time ---
    def _kill_by(self, delay_s: float) -> None:
        self._kill_at = min(self._kill_at, anyio.current_time() + delay_s)
        self._clock_wake.set()

    def _patience_ends(self) -> float:
        """When its silence is too long: before it has started, and after."""
        if self.stopped_by is not None or self._bye is not None:
            return math.inf
        if self.started_at is None:
            return self._start_deadline
        limit = self._spec.hang_timeouts.get(self.phase, self._spec.hang_timeout)
        return math.inf if limit is None else self._beat_at + limit

    async def _run_clock(self) -> None:
        await self._reach(lambda: min(self._kill_at, self._patience_ends()))
        if anyio.current_time() < self._kill_at:
            if self.started_at is None:
                self._decided = self._start_failed()
                await self.thread_stacks()
            else:
                silent, phase = round(anyio.current_time() - self._beat_at, 3), self.phase
                self._decided = Unresponsive(silent, phase, await self.thread_stacks())
            self._kill_by(0.0)
        await self._reach(lambda: self._kill_at)
        self._killed_at = killed_at = anyio.current_time()
        self.state = State.STOPPING
        self._process.kill()
        await self._reach(lambda: killed_at + REAP_TIMEOUT_S)
        text = f"SIGKILL was sent {REAP_TIMEOUT_S:g} s ago and it still exists: {self._process.describe()}"
        self._tell("stuck", text=text)
        self._waiting.cancel()

    async def thread_stacks(self) -> str:
        """The stacks of all its threads, taken by a signal, so also when stuck. They go to the stderr tail too."""
        stacks = await self._process.dump_stacks(STACKS_TIMEOUT_S)
        if not stacks:
            stacks = f"no stacks: the process didn't answer ({self._process.describe()})"
        self._tail += b"\n" + stacks.encode()
        return stacks

    def stop(self, deadline: float, by: str) -> None:
        if not self._heed(deadline, by) or self.state is State.NEW:
            return
        if self.state in (State.SPAWNING, State.BOOTED):  # its target hasn't begun: there is nothing to unwind
            self.state = State.STOPPING
            self._kill_by(0.0)
            return
        drains = self._spec.drain and self.started_at is not None
        self.state = State.DRAINING if drains else State.STOPPING
        budget = max(deadline - anyio.current_time(), 0.0)
        # A little less for the child: what is below it must be gone before it is killed itself.
        budget_s = None if math.isinf(budget) else budget - min(0.5, budget / 10)
        self._link.send(wire.Stop(by, budget_s, drains))
        self._kill_at = min(self._kill_at, deadline)
        if self.started_at is None:  # a start is not worth waiting for, and often can't hear: it imports, or loads
            self._kill_by(FAILED_START_GRACE_S)
