"""A process actor whose target is a plain function that owns the main thread."""

from __future__ import annotations

import socket
from typing import Any

from ._child_common import leave, not_started, prepare, read_launch, reason_of, set_title
from ._exit import ExitReason, Returned, Stopped
from ._thread_context import ThreadContext


def run(fd: int, setup: dict[str, Any]) -> None:
    set_title(setup["title"])
    sock = socket.socket(fileno=fd)
    launch, reader, early = read_launch(sock)
    target, args = prepare(sock, launch)
    context = ThreadContext(sock, launch)
    context.start_control(reader, early)
    reason: ExitReason
    how = "returned"
    try:
        value = target(context, *args)
        reason = Returned(value) if context.is_started or context.stopped_by is not None else not_started()
    except BaseException as exc:
        reason = reason_of(exc)
        how = "raised" if isinstance(exc, Exception) else "exited"
    if context.stopped_by is not None:
        reason = Stopped(context.stopped_by, how, "" if how == "returned" else str(reason))
    context.finish(reason)
    leave(reason)
