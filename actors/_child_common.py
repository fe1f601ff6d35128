"""What both kinds of process actors do before their target runs, and after."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias, get_type_hints

import msgspec
from setproctitle import setproctitle

from ._child import read_frame
from ._exit import Exited, ExitReason, Progress, is_abnormal, verdict_on
from ._target import import_target
from ._wire import Bye, Frame, Launch, Phase, decode_frame, encode_frame, load, portable

Body: TypeAlias = "Callable[[Any], Any]"  # a target with its arguments: it wants a context


def prepare(fd: int, setup: dict[str, Any]) -> tuple[Launch, Body]:
    """What the parent sends first, and what is to run; a failure is told, and ends the process."""
    setproctitle(setup["title"])
    launch = decode_frame(read_frame(fd))
    assert isinstance(launch, Launch)

    def send(frame: Frame) -> None:
        with contextlib.suppress(OSError):
            os.write(fd, encode_frame(frame))

    send(Phase(Progress("import", text=launch.target)))
    try:
        body = resolve(launch)
        send(Phase(Progress("start")))
        return launch, body
    except BaseException as exc:
        reason = verdict_on(exc, None, started=True)
    send(Bye(portable(reason)))
    leave(reason)


def resolve(launch: Launch) -> Body:
    """The target, imported, and its arguments as its annotations want them."""
    target = import_target(launch.target)
    args = [load(arg) for arg in launch.args]
    if args:
        import inspect

        parameters = list(inspect.signature(target).parameters.values())[1:]
        hints = get_type_hints(target)
        for at, (parameter, arg) in enumerate(zip(parameters, args, strict=False)):
            hint = hints.get(parameter.name)
            if hint is not None and parameter.kind is not parameter.VAR_POSITIONAL:
                args[at] = msgspec.convert(msgspec.to_builtins(arg), hint)
    return lambda ctx: target(ctx, *args)


def leave(reason: ExitReason) -> NoReturn:
    """End the process, after its bye: the interpreter's own end still runs, but the verdict is out."""
    sys.exit(exit_code(reason))


def exit_code(reason: ExitReason) -> int:
    return reason.code if isinstance(reason, Exited) else int(is_abnormal(reason))
