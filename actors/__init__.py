"""Structured-concurrency supervision: task actors and process actors under one API, on trio and asyncio.

Names are imported when they are first used: what a process actor doesn't need costs nothing at its start.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._context import CallInfo, Context, Watch
    from ._errors import (
        ActorClosed,
        ActorDied,
        ActorError,
        ActorStartError,
        CallTimeout,
        MailboxFull,
        NoSuchActor,
        RemoteError,
        RestartLimitExceeded,
        SpecError,
    )
    from ._exit import (
        Exited,
        ExitReason,
        Lost,
        Progress,
        Raised,
        RemoteErrorData,
        Returned,
        Signalled,
        StartTimeout,
        Stopped,
        Unresponsive,
        is_abnormal,
    )
    from ._launcher import Launcher, LocalLauncher, Process
    from ._notices import Cast, Down, Drain, Event, Notice, Stop, Up
    from ._ref import Ref
    from ._snapshot import Snapshot, format_tree
    from ._spec import Backoff, ChildSpec, Spec, SupervisorSpec, check
    from ._supervisor import Supervisor, open_supervisor
    from ._thread_context import ThreadContext

__all__ = ["CallInfo", "Context", "Watch"]
__all__ += ["ActorClosed", "ActorDied", "ActorError", "ActorStartError", "CallTimeout", "MailboxFull", "NoSuchActor"]
__all__ += ["RemoteError", "RestartLimitExceeded", "SpecError"]
__all__ += ["ExitReason", "Exited", "Lost", "Progress", "Raised", "RemoteErrorData", "Returned", "Signalled"]
__all__ += ["StartTimeout", "Stopped", "Unresponsive", "is_abnormal"]
__all__ += ["Launcher", "LocalLauncher", "Process"]
__all__ += ["Cast", "Down", "Drain", "Event", "Notice", "Stop", "Up"]
__all__ += ["Ref"]
__all__ += ["Snapshot", "format_tree"]
__all__ += ["Backoff", "ChildSpec", "Spec", "SupervisorSpec", "check"]
__all__ += ["Supervisor", "open_supervisor"]
__all__ += ["ThreadContext"]

_HOMES = (
    "_errors",
    "_exit",
    "_notices",
    "_snapshot",
    "_spec",
    "_thread_context",
    "_context",
    "_launcher",
    "_supervisor",
)
"""What needs no event loop comes first."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            names = vars(import_module(f".{home}", __name__))
            if name in names:
                globals()[name] = names[name]
                return names[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
