"""Calls and casts of actors on an event loop."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel

from ._door import CAST, Message
from ._errors import ActorDied, ActorError, CallTimeout, MailboxFull, NoSuchActor, RemoteError
from ._exit import Lost
from ._hub import Hub
from ._wire import CallError, Parcel

CANCEL_GRACE_S = 0.5
CASTS_PER_YIELD = 64  # a sender that never yields would never let its messages go


async def call(
    hub: Hub, path: str, method: str, payload: Any, timeout: float | None, *, caller: str = "", generation: int = 0
) -> Any:
    """Call and wait for the result. Cancelled or timed out, the callee's scope is cancelled, and its end is awaited
    for a moment. Raises ActorDied, NoSuchActor, RemoteError, CallTimeout or MailboxFull."""
    deadline = None if timeout is None else hub.now() + timeout
    message = Message(path, generation, method, Parcel(payload), caller, deadline)
    with anyio.move_on_after(timeout):
        await anyio.lowlevel.checkpoint_if_cancelled()
        hub.deliver(message)
        if not message.done:
            await _finished(message)
    error = message.error
    if not message.done or (error is not None and error.kind == "cancelled"):
        raise CallTimeout(path, method, timeout or 0.0)
    if error is not None:
        raise _exception(error)
    return None if message.result is None else message.result.load()


async def cast(hub: Hub, path: str, payload: Any, *, generation: int = 0) -> None:
    """Put into the mailbox; waits while it is full, if its policy is "wait". Cancelled while it waits, nothing is
    sent. Raises MailboxFull, ActorDied or NoSuchActor."""
    await anyio.lowlevel.checkpoint_if_cancelled()
    message = Message(path, generation, CAST, Parcel(payload), asks=True)
    hub.deliver(message)
    if not message.done:
        await _finished(message)
    if message.error is not None:
        raise _exception(message.error)
    hub.casts += 1
    if hub.casts % CASTS_PER_YIELD == 0:
        await anyio.lowlevel.cancel_shielded_checkpoint()


async def _finished(message: Message) -> None:
    done = anyio.Event()
    message.on_finish = lambda _: done.set()
    try:
        await done.wait()
    finally:
        if not message.done:
            message.cancel()
            with anyio.move_on_after(CANCEL_GRACE_S, shield=True):
                await done.wait()


def _exception(error: CallError) -> ActorError:
    match error.kind:
        case "died":
            return ActorDied(error.path, error.generation, error.reason or Lost())
        case "full":
            return MailboxFull(error.path)
        case "nosuch":
            return NoSuchActor(error.path)
        case _:
            assert error.error is not None
            return RemoteError(error.error)
