"""The switchboard of one process: which actor is where, and how calls, casts and watches reach it.

Every process has one hub. It knows the actors of its own process (their doors), the process actors below it (peers:
everything inside them is behind them too), and the process above it (its uplink, a peer as well). It belongs to no
event loop, so that main-thread actors have one too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from msgspec import Struct

from ._door import CAST, SNAPSHOT, Door, Message
from ._exit import ExitReason, Lost
from ._notices import Down, Up
from ._wire import CallError, Parcel

FORGOTTEN_KEPT = 4096


class News(Struct, frozen=True):
    """An actor is up with `value`, or down for `reason`."""

    path: str
    generation: int
    value: Parcel
    reason: ExitReason | None = None

    def notice(self) -> Up | Down:
        """The same for users."""
        if self.reason is None:
            return Up(self.path, self.value.load(), self.generation)
        return Down(self.path, self.generation, self.reason)

    def age(self) -> tuple[int, bool]:
        return self.generation, self.reason is not None


class Neighbour(Protocol):
    """The process at the other end of a link: a Peer."""

    def accept(self, message: Message) -> None: ...

    def send_watch(self, path: str, on: bool) -> None: ...


class _Watched(Struct):
    """One path that someone here watches: the last news and who gets the next."""

    last: News | None
    subscribers: dict[object, Callable[[News], None]] = {}

    def tell(self, news: News) -> None:
        self.last = news
        for tell in list(self.subscribers.values()):
            tell(news)


def _upwards(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition("/")[0]


class Hub:
    """`base` is the path of the process actor that this process is; "" in the root's process. `now` is its clock."""

    def __init__(self, base: str, now: Callable[[], float]) -> None:
        self.base = base
        self.now = now
        self.uplink: Neighbour | None = None
        self.doors: dict[str, Door] = {}
        self.below: dict[str, Neighbour] = {}
        self.generations: dict[str, int] = {}
        self.runners: dict[str, Any] = {}  # of supervisors in this process, by path
        self.on_snapshot: Callable[[Message], object]  # answers for this process
        self.casts = 0  # so far, from here
        self._forgotten: deque[str] = deque()
        self._ended: dict[str, tuple[int, ExitReason]] = {}
        self._last: dict[str, News] = {}
        self._watched: dict[str, _Watched] = {}

    # -- who is where ---
    def next_generation(self, path: str) -> int:
        """Generations grow for the whole life of the tree, also over restarts of the process that holds `path`."""
        self.generations[path] = number = self.generations.get(path, 0) + 1
        return number

    def generations_below(self, path: str) -> dict[str, int]:
        return {key: value for key, value in self.generations.items() if key.startswith(path + "/")}

    def add_below(self, path: str, neighbour: Neighbour) -> None:
        self.below[path] = neighbour
        for watched in self._watched:
            if watched.startswith(path + "/"):
                neighbour.send_watch(watched, True)

    def remove(self, path: str, generation: int, reason: ExitReason) -> None:
        """The actor at `path` is dead, and whatever was up behind it is down."""
        self.doors.pop(path, None)
        self.below.pop(path, None)
        self._ended[path] = (generation, reason)
        for inner, watched in list(self._watched.items()):
            if inner.startswith(path + "/") and watched.last is not None and watched.last.reason is None:
                watched.tell(News(inner, watched.last.generation, Parcel(), reason))

    def forget(self, path: str) -> None:
        """The child at `path` was removed. What is known of the last few thousand of them is kept, for stale refs."""
        self._forgotten.append(path)
        if len(self._forgotten) > FORGOTTEN_KEPT:
            oldest = self._forgotten.popleft()
            if oldest not in self.doors and oldest not in self.below and oldest not in self._forgotten:
                for table in (self.generations, self._ended, self._last):
                    table.pop(oldest, None)

    def _behind(self, path: str) -> Neighbour | None:
        """The process below this one that holds `path`."""
        return next((self.below[at] for at in _upwards(path) if at in self.below), None)

    def _is_ours(self, path: str) -> bool:
        return not self.base or path == self.base or path.startswith(self.base + "/")

    # -- messages ---
    def deliver(self, message: Message) -> None:
        """Hand it over to whoever is responsible for its path, or finish it with what is known about that path.

        Raises what the encoder raises, if the payload has to cross to another process and can't.
        """
        path = message.path
        if message.method == SNAPSHOT and (path == self.base or (path == "/" and self.uplink is None)):
            self.on_snapshot(message)
            return
        receiver: Door | Neighbour | None = self.doors.get(path) or self.below.get(path) or self._behind(path)
        if receiver is None and not self._is_ours(path):
            receiver = self.uplink
        if receiver is not None:
            receiver.accept(message)
            return
        at = next((at for at in _upwards(path) if at in self._ended), None)
        message.finish(None, CallError("nosuch", path) if at is None else CallError("died", at, *self._ended[at]))

    def cast_nowait(self, path: str, payload: Any, *, generation: int = 0) -> bool:
        """Put into the mailbox if there is room; False if not, or if there is no such actor now."""
        message = Message(path, generation, CAST, Parcel(payload), waits=False)
        self.deliver(message)
        return message.error is None

    def end_of(self, path: str, generation: int) -> ExitReason | None:
        """Why that incarnation, of an actor in this process or right below it, has ended; None if it hasn't."""
        last, reason = self._ended.get(path, (0, Lost()))
        if 0 < generation < last:
            return Lost(f"generation {last} came after it")
        return reason if generation == last else None

    def stale(self, path: str, generation: int) -> CallError:
        """What a message to an earlier incarnation is answered with."""
        reason = self.end_of(path, generation) or Lost("another generation is in its place")
        return CallError("died", path, generation, reason)

    # -- watches ---
    def publish(self, news: News) -> None:
        """From the supervisor that starts the actor at `news.path`: the authority on it."""
        self._last[news.path] = news
        self.hear(news)

    def hear(self, news: News) -> None:
        """Also from another process, because we asked."""
        watched = self._watched.get(news.path)
        if watched is None:
            return
        last = watched.last
        if last is not None:
            if news.age() <= last.age():
                return  # known already
            if last.reason is None and news.generation > last.generation:
                watched.tell(News(news.path, last.generation, Parcel(), Lost("a newer incarnation is known")))
        watched.tell(news)

    def watch(self, path: str, subscriber: object, tell: Callable[[News], None]) -> None:
        """Tell `tell` every piece of news on `path` from now on, and the last one now."""
        watched = self._watched.get(path)
        if watched is None:
            watched = self._watched[path] = _Watched(self._last.get(path))
            self._ask(path, True)
        watched.subscribers[subscriber] = tell
        if watched.last is not None:
            tell(watched.last)

    def unwatch(self, path: str, subscriber: object) -> None:
        watched = self._watched.get(path)
        if watched is not None:
            watched.subscribers.pop(subscriber, None)
            if not watched.subscribers:
                del self._watched[path]
                self._ask(path, False)

    def unwatch_all(self, subscriber: object) -> None:
        for path in [path for path, watched in self._watched.items() if subscriber in watched.subscribers]:
            self.unwatch(path, subscriber)

    def _ask(self, path: str, on: bool) -> None:
        neighbour = self._behind(path.rpartition("/")[0])
        if neighbour is None and (path == self.base or not self._is_ours(path)):
            neighbour = self.uplink
        if neighbour is not None:
            neighbour.send_watch(path, on)
