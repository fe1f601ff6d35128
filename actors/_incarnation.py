"""One life of one child, as its supervisor sees it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol

import anyio
from msgspec import Struct

from ._exit import ExitReason, Progress, StartTimeout
from ._hub import Hub
from ._launcher import Launcher
from ._notices import Event, EventKind, OnEvent
from ._snapshot import Snapshot
from ._spec import ChildSpec


class State(StrEnum):
    """`booted`: the interpreter answered; `running`: it said `started()`; `backoff`: between lives."""

    NEW = "new"
    SPAWNING = "spawning"
    BOOTED = "booted"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    ENDED = "ended"


def _raise(exc: BaseException) -> None:
    raise exc


class Environment(Struct):
    """What all supervisors and actors of one process share."""

    hub: Hub
    launcher: Launcher
    on_event: OnEvent | None = None
    draw: Callable[[], float] = random.random  # for the backoff's jitter
    interrupt: Callable[[BaseException], None] = _raise
    """Ctrl-C inside an actor, or a broken `on_event`: for the tree's owner, after an orderly stop."""

    def tell(self, event: Event) -> None:
        if self.on_event is not None:
            try:
                self.on_event(event)
            except Exception as exc:
                self.interrupt(exc)


class Observer(Protocol):
    """Who supervises an incarnation or, inside a process actor, passes on what it says."""

    environment: Environment

    def observe(self, actor: Incarnation, event: Event) -> None: ...

    def beat(self, actor: Incarnation) -> None: ...


class Incarnation:
    """A task actor, a process actor or a nested supervisor."""

    kind = "task"

    def __init__(self, path: str, generation: int, environment: Environment, observer: Observer | None) -> None:
        self.path = path
        self.generation = generation
        self.environment = environment
        self.hub = environment.hub
        self.pid: int | None = None
        self.state = State.NEW
        self.phase = ""
        self.progress = Progress()
        self.value: Any = None
        self.started_at: float | None = None
        self.exception: BaseException | None = None  # the original one, where it is in this process
        self.stop_deadline = math.inf  # when a stop must be over; anyio.current_time clock
        self._observer = observer
        self.stopped_by: str | None = None

    @property
    def stderr_tail(self) -> tuple[str, ...]:
        return ()

    async def run(self) -> ExitReason:
        """Live; the end of the actor is the end of this. Runs shielded: only `stop` ends it."""
        raise NotImplementedError

    def stop(self, deadline: float, by: str) -> None:
        """Ask it to end by `deadline` (anyio.current_time clock, may be inf); asked again, the earlier one holds."""
        raise NotImplementedError

    def inner(self) -> tuple[Snapshot, ...]:
        """What it supervises itself."""
        return ()

    def mailbox_counts(self) -> tuple[int, int]:
        """Casts that wait, and casts that were dropped."""
        return 0, 0

    def snapshot(self) -> Snapshot:
        """Its state now, without what its supervisor knows about it."""
        waiting, dropped = self.mailbox_counts()
        return Snapshot(
            path=self.path,
            kind=self.kind,
            state=self.state,
            phase=self.phase,
            progress=self.progress,
            generation=self.generation,
            pid=self.pid,
            uptime_s=None if self.started_at is None else anyio.current_time() - self.started_at,
            mailbox=waiting,
            dropped=dropped,
            children=self.inner(),
        )

    def event(self, kind: EventKind, **facts: Any) -> Event:
        return Event(kind, self.path, self.generation, self.pid, **facts)

    def _tell(self, kind: EventKind, **facts: Any) -> None:
        if self._observer is not None:
            self._observer.observe(self, self.event(kind, **facts))


class Actor(Incarnation):
    """What tasks and processes have in common: the clock of their start."""

    def __init__(self, spec: ChildSpec, path: str, generation: int, observer: Observer) -> None:
        super().__init__(path, generation, observer.environment, observer)
        self._spec = spec
        self._begun_at = 0.0
        self._start_deadline = math.inf
        self._stop_at = math.inf  # when the first stop came
        self._clock_wake = anyio.Event()

    def _begin(self, state: State) -> None:
        self.state = state
        self._begun_at = anyio.current_time()
        self._extend_start()

    def _extend_start(self) -> None:
        now = anyio.current_time()
        self._start_deadline = min(now + self._spec.start_timeout, self._begun_at + self._spec.start_timeout_max)

    def _start_failed(self) -> StartTimeout:
        """It is too late; what remains is still to be cleared away."""
        verdict = StartTimeout(self.phase, self.progress, round(self._start_deadline - self._begun_at, 3))
        self._tell("failed_start", reason=verdict)
        return verdict

    def on_progress(self, progress: Progress) -> None:
        self.progress = progress
        self.phase = progress.phase
        if self.started_at is None:
            self._extend_start()
        self._tell("progress", progress=progress)

    def on_started(self, value: Any) -> None:
        self.value = value
        self.started_at = anyio.current_time()
        self.phase = ""
        if self.state in (State.SPAWNING, State.BOOTED, State.STARTING):
            self.state = State.RUNNING
        self._clock_wake.set()

    def _heed(self, deadline: float, by: str) -> bool:
        """Take note of a stop; False if it says nothing new."""
        if self.stopped_by is None:
            self._stop_at = anyio.current_time()
            self.stopped_by = by
        elif deadline >= self.stop_deadline:
            return False
        self.stop_deadline = deadline
        self._clock_wake.set()
        return True

    async def _reach(self, when: Callable[[], float]) -> None:
        """Wait until that time; `_clock_wake` is set when it has changed."""
        while anyio.current_time() < (until := when()):
            self._clock_wake = anyio.Event()
            with anyio.move_on_at(until):
                await self._clock_wake.wait()
