"""What both kinds of process actors do before their target runs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn, get_type_hints

import msgspec

from ._exit import Exited, ExitReason, Progress, Raised, RemoteErrorData, Returned, Stopped
from ._remote import capture
from ._target import import_target
from ._wire import AnyFrame, Bye, Frame, FrameReader, Launch, Phase, encode_frame, load, portable


def set_title(title: str) -> None:
    """With setproctitle where it is installed, else only the kernel's 15 characters."""
    if importlib.util.find_spec("setproctitle") is not None:
        import setproctitle

        setproctitle.setproctitle(title)
    else:
        with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
            comm.write(title[-15:])


def send_now(sock: socket.socket, frame: Frame) -> None:
    """Before there is a loop, and after."""
    with contextlib.suppress(OSError):
        sock.setblocking(True)
        sock.sendall(encode_frame(frame))


def read_launch(sock: socket.socket) -> tuple[Launch, FrameReader, list[AnyFrame]]:
    """The launch frame, and what came with it."""
    reader = FrameReader()
    frames: list[AnyFrame] = []
    while not frames:
        data = sock.recv(1 << 18)
        if not data:
            os._exit(0)
        frames += reader.feed(data)
    launch = frames.pop(0)
    assert isinstance(launch, Launch)
    return launch, reader, frames


def prepare(sock: socket.socket, launch: Launch) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The target and its arguments as its annotations want them; a failure is told, and ends the process."""
    send_now(sock, Phase(Progress("import", text=launch.target)))
    try:
        target = import_target(launch.target)
        args = convert_args(target, [load(arg) for arg in launch.args])
        send_now(sock, Phase(Progress("start")))
        return target, args
    except BaseException as exc:
        reason = reason_of(exc)
    send_now(sock, Bye(portable(reason)))
    leave(reason)


def convert_args(target: Callable[..., Any], args: list[Any]) -> tuple[Any, ...]:
    if not args:
        return ()
    import inspect

    parameters = list(inspect.signature(target).parameters.values())[1:]
    hints = get_type_hints(target)
    for at, (parameter, arg) in enumerate(zip(parameters, args, strict=False)):
        hint = hints.get(parameter.name)
        if hint is not None and parameter.kind is not parameter.VAR_POSITIONAL:
            args[at] = msgspec.convert(msgspec.to_builtins(arg), hint)
    return tuple(args)


def reason_of(exc: BaseException) -> ExitReason:
    if isinstance(exc, SystemExit):
        if exc.code in (None, 0):
            return Returned()
        return Exited(exc.code if isinstance(exc.code, int) else 1)
    return Raised(capture(exc))


def not_started() -> ExitReason:
    return Raised(RemoteErrorData("actors.NotStarted", "the target returned before it had called started()"))


def leave(reason: ExitReason) -> NoReturn:
    """End the process, after its bye: the interpreter's own end still runs, but the verdict is out."""
    sys.exit(exit_code(reason))


def exit_code(reason: ExitReason) -> int:
    match reason:
        case Returned() | Stopped():
            return 0
        case Exited(code):
            return code
        case _:
            return 1
