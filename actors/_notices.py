"""What watchers and main-thread actors are told, and what a supervisor reports while it works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from ._exit import ExitReason, Progress


class Up(Struct, frozen=True):
    """The actor at `path` has started; `value` is what it said with `started(value)`."""

    path: str
    value: Any
    generation: int


class Down(Struct, frozen=True):
    """The actor at `path` that was up is down. Exactly one per generation that was up."""

    path: str
    generation: int
    reason: ExitReason


class Cast(Struct, frozen=True):
    """A message for a main-thread actor."""

    payload: Any


class Drain(Struct, frozen=True):
    """Finish what is in work, take nothing new; a Stop follows. `deadline` is on the time.monotonic clock."""

    deadline: float | None


class Stop(Struct, frozen=True):
    """End now; at `deadline` (time.monotonic clock) the process is killed."""

    deadline: float | None


Notice: TypeAlias = Up | Down | Cast | Drain | Stop


EventKind: TypeAlias = Literal[
    "starting", "progress", "started", "failed_start", "stopping", "exited", "stuck", "supervisor_ended"
]


class Event(Struct, frozen=True):
    """`next` and `delay_s` say what follows an exit: "restart" (after the delay), "stays down", "give up", "stopped" or
    "removed"; `count` is the number of deaths that the supervisor counts at the moment."""

    kind: EventKind
    path: str
    generation: int = 0
    pid: int | None = None
    reason: ExitReason | None = None
    progress: Progress | None = None
    next: str = ""
    delay_s: float = 0.0
    count: int = 0
    intensity: int = 0
    uptime_s: float | None = None
    text: str = ""

    def __str__(self) -> str:
        who = f"{self.path or 'root'}" + (f" (generation {self.generation}" if self.generation else "")
        if self.generation:
            who += f", pid {self.pid})" if self.pid is not None else ")"
        what = {"failed_start": "failed to start", "supervisor_ended": "ended"}.get(self.kind, self.kind)
        if self.reason is not None:
            what += f": {self.reason}"
        elif self.progress is not None:
            what += f": {self.progress}"
        if self.uptime_s is not None:
            what += f", after {self.uptime_s:.1f} s"
        if self.next == "restart" and self.count:
            what += f"; restart {self.count}/{self.intensity} in {self.delay_s:.1f} s"
        elif self.next:
            what += f"; {self.next}"
        return f"{who} {what}" + (f"\n{self.text}" if self.text else "")


OnEvent: TypeAlias = Callable[[Event], None]
