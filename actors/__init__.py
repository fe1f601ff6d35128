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
    from ._events import Event
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
    from ._launcher import ExitStatus, Launcher, LocalLauncher, Process
    from ._notices import Cast, Down, Drain, Notice, Stop, Up
    from ._ref import Ref
    from ._snapshot import Snapshot, format_tree
    from ._spec import Backoff, ChildSpec, Spec, SupervisorSpec, check
    from ._supervisor import Supervisor, open_supervisor
    from ._thread_context import ThreadContext

__all__ = [
    "ActorClosed",
    "ActorDied",
    "ActorError",
    "ActorStartError",
    "Backoff",
    "CallInfo",
    "CallTimeout",
    "Cast",
    "ChildSpec",
    "Context",
    "Down",
    "Drain",
    "Event",
    "ExitReason",
    "ExitStatus",
    "Exited",
    "Launcher",
    "LocalLauncher",
    "Lost",
    "MailboxFull",
    "NoSuchActor",
    "Notice",
    "Process",
    "Progress",
    "Raised",
    "Ref",
    "RemoteError",
    "RemoteErrorData",
    "RestartLimitExceeded",
    "Returned",
    "Signalled",
    "Snapshot",
    "Spec",
    "SpecError",
    "StartTimeout",
    "Stop",
    "Stopped",
    "Supervisor",
    "SupervisorSpec",
    "ThreadContext",
    "Unresponsive",
    "Up",
    "Watch",
    "check",
    "format_tree",
    "is_abnormal",
    "open_supervisor",
]

_HOMES = {
    "_context": "CallInfo Context Watch",
    "_errors": "ActorClosed ActorDied ActorError ActorStartError CallTimeout MailboxFull NoSuchActor "
    "RemoteError RestartLimitExceeded SpecError",
    "_events": "Event",
    "_exit": "ExitReason Exited Lost Progress Raised RemoteErrorData Returned Signalled StartTimeout Stopped "
    "Unresponsive is_abnormal",
    "_launcher": "ExitStatus Launcher LocalLauncher Process",
    "_notices": "Cast Down Drain Notice Stop Up",
    "_ref": "Ref",
    "_snapshot": "Snapshot format_tree",
    "_spec": "Backoff ChildSpec Spec SupervisorSpec check",
    "_supervisor": "Supervisor open_supervisor",
    "_thread_context": "ThreadContext",
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            value = globals()[name] = getattr(import_module(f".{module}", __name__), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
