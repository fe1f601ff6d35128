"""Messages on their way, and the door of an actor: handlers for calls, a bounded mailbox for casts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from ._exit import RemoteErrorData
from ._wire import CallError, Overflow, Parcel

if TYPE_CHECKING:
    from ._hub import Hub

CAST = "$cast"  # the method of a message for the mailbox; its result is the mailbox's policy
STACKS = "$stacks"
SNAPSHOT = "$snapshot"

Answer: TypeAlias = "Callable[[Message, Any], None]"


class Message(Struct, eq=False):
    """A call, or a cast: `finish` is called exactly once with a result or an error, for a cast when it got in."""

    path: str
    generation: int
    method: str
    payload: Parcel
    caller: str = ""
    deadline: float | None = None
    on_finish: Callable[[Message], None] | None = None
    waits: bool = True  # a cast, for room
    asks: bool = False  # a cast, whether it found room
    done: bool = False
    result: Parcel | None = None
    error: CallError | None = None
    cancel_hook: Callable[[], None] | None = None  # of whoever has it now

    def finish(self, result: Parcel | None, error: CallError | None = None) -> None:
        if not self.done:
            self.done = True
            self.result = result
            self.error = error
            if self.on_finish is not None:
                self.on_finish(self)

    def cancel(self) -> None:
        """Ask whoever has it to stop working on it; `finish` follows when that has happened."""
        if not self.done and self.cancel_hook is not None:
            self.cancel_hook()

    def wait_in(self, queue: deque[Message]) -> None:
        """Queue up; cancelled, it leaves the queue."""

        def leave() -> None:
            if self in queue:
                queue.remove(self)
            self.finish(None, CallError("cancelled", self.path))

        queue.append(self)
        self.cancel_hook = leave


class Mailbox:
    """Casts wait here. Calls, stops and notices never pass through it, so a full one blocks none of them."""

    def __init__(self, capacity: int, overflow: Overflow, on_put: Callable[[], None]) -> None:
        self.capacity = capacity
        self.overflow = overflow
        self.dropped = 0  # casts that had to go, or found no room
        self._on_put = on_put
        self._taken = Parcel(overflow)
        self._items: deque[Parcel] = deque()
        self._parked: deque[Message] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, message: Message) -> None:
        if len(self._items) < self.capacity:
            self._take(message)
        elif self.overflow == "drop-oldest":
            self._items.popleft()
            self.dropped += 1
            self._take(message)
        elif self.overflow == "wait" and message.waits:
            message.wait_in(self._parked)
        else:
            self.dropped += 1
            message.finish(None, CallError("full", message.path))

    def _take(self, message: Message) -> None:
        self._items.append(message.payload)
        self._on_put()
        message.finish(self._taken)

    def get(self) -> Parcel:
        """The oldest cast; there must be one."""
        parcel = self._items.popleft()
        while self._parked and len(self._items) < self.capacity:
            self._take(self._parked.popleft())
        return parcel

    def close(self, error: CallError) -> None:
        """The reader is gone: release everyone who waits for room."""
        while self._parked:
            self._parked.popleft().finish(None, error)


class Door:
    """Where the messages for one actor come in. `answer` gets a call and its handler, or a call of STACKS and None."""

    def __init__(self, path: str, generation: int, hub: Hub, mailbox: Mailbox, answer: Answer) -> None:
        self.path = path
        self.generation = generation
        self.mailbox = mailbox
        self.is_open = False  # calls can be answered
        self.started = False  # all handlers are known
        self._hub = hub
        self._answer = answer
        self._handlers: dict[str, Any] = {}
        self._early: deque[Message] = deque()

    def accept(self, message: Message) -> None:
        method = message.method
        if message.generation and message.generation != self.generation:
            message.finish(None, self._hub.stale(self.path, message.generation))
        elif method == CAST:
            self.mailbox.put(message)
        elif not self.is_open:
            message.wait_in(self._early)
        elif (handler := self._handlers.get(method)) is not None or method == STACKS:
            self._answer(message, handler)
        elif not self.started:
            message.wait_in(self._early)
        else:
            text = f"actor {self.path!r} has no method {method!r}"
            message.finish(None, CallError("raised", self.path, error=RemoteErrorData("actors.NoSuchMethod", text)))

    def set_handler(self, method: str, handler: Any) -> None:
        self._handlers[method] = handler
        self.accept_early()

    def accept_early(self) -> None:
        """Calls that came too early may be answered now."""
        waiting = list(self._early)
        self._early.clear()
        for message in waiting:
            self.accept(message)

    def close(self, error: CallError) -> None:
        """The actor has ended: whoever waits at its door learns it."""
        self.mailbox.close(error)
        while self._early:
            self._early.popleft().finish(None, error)
