"""Where the tasks of an actor are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._task import TaskActor


def loop_stacks(actor: TaskActor) -> str:
    return ""
