"""One life of one child, as its supervisor sees it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Protocol

from ._events import Event
from ._exit import ExitReason, Progress


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


class Incarnation(Protocol):
    """A task actor, a process actor or a nested supervisor; `run` is its whole life."""

    path: str
    generation: int
    pid: int | None
    state: State
    phase: str
    progress: Progress
    value: Any
    started_at: float | None
    exception: BaseException | None  # the original one, where it is in this process

    @property
    def stderr_tail(self) -> tuple[str, ...]: ...

    async def run(self) -> ExitReason:
        """Live; the end of the actor is the end of this. Runs shielded: only `stop` ends it."""

    def stop(self, deadline: float, by: str) -> None:
        """Ask it to end by `deadline` (anyio.current_time clock, may be inf); asked again, the earlier one holds."""

    def mailbox_counts(self) -> tuple[int, int]:
        """Casts that wait, and casts that were dropped."""


class Observer(Protocol):
    """What an incarnation tells its supervisor (or, inside a process actor, its parent)."""

    def progressed(self, actor: Incarnation) -> None: ...

    def has_started(self, actor: Incarnation) -> None: ...

    def beat(self, actor: Incarnation) -> None: ...

    def failed_start(self, actor: Incarnation, reason: ExitReason) -> None:
        """The verdict on a start is known; the remains are still being cleared away."""

    def reported(self, event: Event) -> None:
        """From a supervisor inside it."""

    def stuck(self, actor: Incarnation, text: str) -> None:
        """It can't be ended; `text` says what was tried and where it hangs."""
