"""Exceptions as data: bounded in size and depth, never unpickled."""

from __future__ import annotations

import traceback
from typing import Any

from ._exit import Exited, ExitReason, Raised, RemoteErrorData, Returned

LIMIT_BYTES = 64 * 1024
_DEPTH = 8
_MEMBERS = 16


def type_path(cls: type) -> str:
    """`package.module.Class`; builtins keep their short name."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def clip(text: str, limit: int) -> str:
    """`text` shortened in its middle: both ends of a traceback matter."""
    if len(text) <= limit:
        return text
    half = max(limit // 2 - 20, 0)
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[len(text) - half :]}"


def capture(exc: BaseException, limit: int = LIMIT_BYTES, depth: int = _DEPTH) -> RemoteErrorData:
    """`exc` with its notes, causes and group members, within about `limit` characters."""
    try:
        message = str(exc.args[0]) if isinstance(exc, BaseExceptionGroup) else str(exc)
    except Exception as broken:
        message = f"<its __str__ raised {type(broken).__name__}>"
    own = max(limit // 2, 400)
    frames = "".join(traceback.format_tb(exc.__traceback__)) if exc.__traceback__ else ""
    cause = context = None
    group: tuple[RemoteErrorData, ...] = ()
    if depth > 0:
        if exc.__cause__ is not None:
            cause = capture(exc.__cause__, limit // 4, depth - 1)
        elif exc.__context__ is not None and not exc.__suppress_context__:
            context = capture(exc.__context__, limit // 4, depth - 1)
        if isinstance(exc, BaseExceptionGroup):
            shown = exc.exceptions[:_MEMBERS]
            group = tuple(capture(e, limit // 4 // len(shown), depth - 1) for e in shown)
            if len(exc.exceptions) > _MEMBERS:
                message += f" (the first {_MEMBERS} of {len(exc.exceptions)} are shown)"
    notes = tuple(clip(str(note), own // 8) for note in getattr(exc, "__notes__", ())[:8])
    return RemoteErrorData(
        type_path(type(exc)), clip(message, own // 2), notes, clip(frames, own), cause, context, group
    )


def verdict_on(exc: BaseException | None, value: Any, started: bool) -> ExitReason:
    """Why a target has ended that raised `exc` or, if that is None, returned `value`."""
    if isinstance(exc, SystemExit) and exc.code not in (None, 0):
        return Exited(exc.code if isinstance(exc.code, int) else 1)
    if exc is not None and not isinstance(exc, SystemExit):
        return Raised(capture(exc))
    if not started:
        return Raised(RemoteErrorData("actors.NotStarted", "the target returned before it had called started()"))
    return Returned(value)
