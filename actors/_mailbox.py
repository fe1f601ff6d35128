"""A bounded queue with one reader and an overflow policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import anyio

from ._errors import ActorError
from ._wire import Parcel

if TYPE_CHECKING:
    from ._spec import Overflow

OnTaken: TypeAlias = Callable[[], None]


class Parked:
    """A message that waits for room. `drop` forgets it: its sender was cancelled. `failed`: why it never got in."""

    __slots__ = ("alive", "failed", "on_taken", "parcel")

    def __init__(self, parcel: Parcel, on_taken: OnTaken) -> None:
        self.parcel = parcel
        self.on_taken = on_taken
        self.alive = True
        self.failed: ActorError | None = None

    def drop(self) -> None:
        self.alive = False


class Mailbox:
    """Casts wait here. Calls, stops and notices never pass through it, so a full one blocks none of them."""

    def __init__(self, capacity: int, overflow: Overflow) -> None:
        self.capacity = capacity
        self.overflow: Overflow = overflow
        self.dropped = 0
        self._items: deque[Parcel] = deque()
        self._parked: deque[Parked] = deque()
        self._wake: anyio.Event | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, parcel: Parcel) -> bool:
        """Take it or, if there is no room, say False; "drop-oldest" always has room."""
        if len(self._items) >= self.capacity:
            if self.overflow != "drop-oldest":
                return False
            self._items.popleft()
            self.dropped += 1
        self._items.append(parcel)
        if self._wake is not None:
            self._wake.set()
        return True

    def park(self, parcel: Parcel, on_taken: OnTaken) -> Parked:
        """Queue behind the full box; `on_taken` is called when the message got in."""
        parked = Parked(parcel, on_taken)
        self._parked.append(parked)
        return parked

    async def get(self) -> Parcel:
        """The oldest message. Cancelled, it takes none. One reader at a time."""
        while not self._items:
            self._wake = anyio.Event()
            try:
                await self._wake.wait()
            finally:
                self._wake = None
        parcel = self._items.popleft()
        while self._parked and len(self._items) < self.capacity:
            parked = self._parked.popleft()
            if parked.alive:
                self._items.append(parked.parcel)
                parked.on_taken()
        return parcel

    def fail_parked(self, error: ActorError) -> None:
        """The reader is gone: release everyone who waits for room."""
        while self._parked:
            parked = self._parked.popleft()
            parked.failed = error
            if parked.alive:
                parked.on_taken()
