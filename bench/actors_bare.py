"""The least that a process actor can be, in a module that imports nothing of weight."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors import ThreadContext


def bare(ctx: ThreadContext) -> None:
    ctx.started()
    while ctx.stopping() is None:
        select.select([ctx.wakeup_fd], [], [])
        ctx.notices()
