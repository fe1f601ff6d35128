"""Every error that the library raises."""

from __future__ import annotations

from ._exit import ExitReason, Progress, Raised, RemoteErrorData


class ActorError(Exception):
    """Base class of the library's errors."""


class SpecError(ActorError, ValueError):
    """A child spec that could never work; raised before anything starts."""


class ActorStartError(ActorError):
    """An actor ended, or was given up, before it had called `started()`; nothing of it is left.

    `remote_traceback` and `stderr_tail` are text; `reason` is what the verdict was, `progress` its last word.
    """

    def __init__(
        self,
        path: str,
        reason: ExitReason,
        phase: str = "",
        progress: Progress | None = None,
        stderr_tail: tuple[str, ...] = (),
    ) -> None:
        self.path = path
        self.reason = reason
        self.progress = progress or Progress()
        self.phase = phase or self.progress.phase
        self.remote_traceback = reason.error.format() if isinstance(reason, Raised) else ""
        self.stderr_tail = stderr_tail
        super().__init__(path, reason)

    def __str__(self) -> str:
        text = f"actor {self.path!r} did not start: {self.reason}"
        if self.phase:
            text += f", in phase {self.phase!r}"
        if self.remote_traceback:
            text += "\nits traceback:\n" + "\n".join("  " + line for line in self.remote_traceback.splitlines())
        elif self.stderr_tail:
            text += "\nits last words on stderr:\n" + "\n".join("  " + line for line in self.stderr_tail[-20:])
        return text


class ActorDied(ActorError):
    """The actor that was called is dead, or that incarnation of it is; nothing is replayed to a new one."""

    def __init__(self, path: str, generation: int, reason: ExitReason) -> None:
        self.path = path
        self.generation = generation
        self.reason = reason
        super().__init__(path, generation, reason)

    def __str__(self) -> str:
        return f"actor {self.path!r} (generation {self.generation}) is gone: {self.reason}"


class RestartLimitExceeded(ActorError):
    """A supervisor gave up: too many deaths in the period, or a cause that must not be retried.

    `causes` are the paths and reasons of the deaths that led there, the last one last.
    """

    def __init__(self, path: str, causes: tuple[tuple[str, ExitReason], ...], why: str) -> None:
        self.path = path
        self.causes = causes
        self.why = why
        super().__init__(path, causes, why)

    def __str__(self) -> str:
        text = f"supervisor {self.path or 'root'!r} gave up: {self.why}"
        text += "".join(f"\n  {path}: {reason}" for path, reason in self.causes)
        if self.causes and isinstance(last := self.causes[-1][1], Raised):
            text += "\nthe last traceback:\n" + "\n".join("  " + line for line in last.error.format().splitlines())
        return text


class CallTimeout(ActorError, TimeoutError):
    """A call's own deadline passed; the callee's scope was cancelled."""

    def __init__(self, path: str, method: str, timeout: float) -> None:
        self.path = path
        self.method = method
        self.timeout = timeout
        super().__init__(f"call of {method!r} on actor {path!r} got no answer within {timeout:g} s")


class RemoteError(ActorError):
    """The callee's handler raised; the remote exception as data."""

    def __init__(self, error: RemoteErrorData) -> None:
        self.error = error
        self.type_name = error.type
        self.message = error.message
        self.traceback = error.format()
        super().__init__(f"{error.type}: {error.message}")
        self.add_note("remote traceback:\n" + self.traceback)


class MailboxFull(ActorError):
    """A mailbox with the overflow policy "fail" has no room."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"the mailbox of actor {path!r} is full")


class NoSuchActor(ActorError):
    """Nothing is known at this path: it never ran there."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"there is no actor {path!r}")


class ActorClosed(ActorError):
    """The supervisor is stopping or has ended; it starts nothing more."""
