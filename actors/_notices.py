"""What watchers and main-thread actors are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from ._exit import ExitReason


@dataclass(frozen=True, slots=True)
class Up:
    """The actor at `path` has started; `value` is what it said with `started(value)`."""

    path: str
    value: Any
    generation: int


@dataclass(frozen=True, slots=True)
class Down:
    """The actor at `path` that was up is down. Exactly one per generation that was up."""

    path: str
    generation: int
    reason: ExitReason


@dataclass(frozen=True, slots=True)
class Cast:
    """A message for a main-thread actor."""

    payload: Any


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what is in work, take nothing new; a Stop follows. `deadline` is on the time.monotonic clock."""

    deadline: float | None


@dataclass(frozen=True, slots=True)
class Stop:
    """End now; at `deadline` (time.monotonic clock) the process is killed."""

    deadline: float | None


Notice: TypeAlias = Up | Down | Cast | Drain | Stop
