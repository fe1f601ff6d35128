"""What watchers and main-thread actors are told."""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Struct

from ._exit import ExitReason


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
