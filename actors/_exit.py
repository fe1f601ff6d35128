"""The closed set of ways in which an actor ends, and exceptions, as data that crosses processes."""

from __future__ import annotations

import signal
import traceback
from typing import Any, TypeAlias

import msgspec

LIMIT_BYTES = 64 * 1024
_DEPTH = 8
_MEMBERS = 16
_SIGNALS = {number.value: number.name for number in signal.Signals}


class RemoteErrorData(msgspec.Struct, frozen=True, array_like=True):
    """An exception as data: it is never pickled, its size is bounded, its tree is kept.

    `type` is the dotted path of the class, `traceback` the text of this exception's own frames.
    """

    type: str
    message: str
    notes: tuple[str, ...] = ()
    traceback: str = ""
    cause: RemoteErrorData | None = None
    context: RemoteErrorData | None = None
    group: tuple[RemoteErrorData, ...] = ()

    def format(self, indent: str = "") -> str:
        """The whole tree as text, innermost cause first, as Python prints it."""
        parts: list[str] = []
        if self.cause is not None:
            parts += [self.cause.format(indent), f"{indent}-- was the direct cause of:"]
        elif self.context is not None:
            parts += [self.context.format(indent), f"{indent}-- while that was handled:"]
        parts += [indent + line for line in self.traceback.rstrip().splitlines()]
        parts.append(f"{indent}{self.type}: {self.message}")
        parts += [f"{indent}{note}" for note in self.notes]
        for number, error in enumerate(self.group, 1):
            parts += [f"{indent}+- {number} of {len(self.group)}:", error.format(indent + "|  ")]
        return "\n".join(parts)

    def matches(self, type_path: str) -> bool:
        """Whether this error, a cause or a group member has this type (dotted path, or just the class name)."""
        if self.type == type_path or self.type.rpartition(".")[2] == type_path:
            return True
        inner = (*self.group, *(e for e in (self.cause, self.context) if e is not None))
        return any(error.matches(type_path) for error in inner)


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """The last word of a starting actor about its start."""

    phase: str = ""
    done: int | None = None
    total: int | None = None
    text: str = ""

    def __str__(self) -> str:
        count = "" if self.done is None else f" {self.done}" + ("" if self.total is None else f"/{self.total}")
        return f"{self.phase or 'no phase'}{count}" + (f" ({self.text})" if self.text else "")


class _Reason(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Returned(_Reason, frozen=True):
    """The target returned after it had started. The only normal end that an actor chooses."""

    value: Any = None

    def __str__(self) -> str:
        return "returned"


class Raised(_Reason, frozen=True):
    """The target raised."""

    error: RemoteErrorData

    def __str__(self) -> str:
        return f"raised {self.error.type}: {self.error.message}"


class Signalled(_Reason, frozen=True):
    """The kernel ended the process with a signal."""

    signal: int
    core: bool = False

    def __str__(self) -> str:
        return f"killed by {_SIGNALS.get(self.signal, f'signal {self.signal}')}" + (
            " (core dumped)" if self.core else ""
        )


class Exited(_Reason, frozen=True):
    """The process ended itself with this code, without a word on the control channel."""

    code: int

    def __str__(self) -> str:
        return f"exited with code {self.code}"


class StartTimeout(_Reason, frozen=True):
    """The actor made no progress for its start timeout, or wasn't started by the hard cap."""

    phase: str = ""
    progress: Progress = Progress()
    limit_s: float = 0.0

    def __str__(self) -> str:
        return f"did not start within {self.limit_s:g} s; last progress: {self.progress}"


class Stopped(_Reason, frozen=True):
    """Its supervisor stopped it; `how` is "returned", "cancelled", "killed", "raised" or "stuck"."""

    by: str = ""
    how: str = "cancelled"
    detail: str = ""

    def __str__(self) -> str:
        return f"stopped by {self.by or 'its supervisor'}" + (f" ({self.how}{self.detail and ': ' + self.detail})")


class Unresponsive(_Reason, frozen=True):
    """Alive, but silent for longer than the hang limit of its phase; killed after a stack dump was taken."""

    last_beat_s: float
    phase: str = ""
    stacks: str = ""

    def __str__(self) -> str:
        return f"gave no sign of life for {self.last_beat_s:.1f} s in phase {self.phase or 'running'!r}"


class Lost(_Reason, frozen=True):
    """The control channel ended although the process lived, or its exit status was taken by someone else."""

    detail: str = ""

    def __str__(self) -> str:
        return f"lost ({self.detail or 'its control channel was closed'})"


ExitReason: TypeAlias = Returned | Raised | Signalled | Exited | StartTimeout | Stopped | Unresponsive | Lost


def is_abnormal(reason: ExitReason) -> bool:
    """Everything but a return and a stop that was asked for."""
    return not isinstance(reason, Returned | Stopped)


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
