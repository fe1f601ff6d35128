"""The switchboard of one process: which actor is where, and how calls, casts and watches reach it.

Every process has one hub. It knows the actors of its own process (local endpoints), the process actors below it
(endpoints with a prefix: everything inside them is behind them too), and the process above it (its uplink).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from msgspec import Struct

from ._errors import ActorDied, ActorError, CallTimeout, MailboxFull, NoSuchActor, RemoteError
from ._exit import ExitReason, Lost
from ._mailbox import OnTaken, Parked
from ._wire import CallError, Parcel

FORGOTTEN_KEPT = 4096
CANCEL_GRACE_S = 0.5
CASTS_PER_YIELD = 64  # a sender that never yields would never let its messages go


class PendingCall:
    """A call on its way: `finish` is called exactly once with a result or an error."""

    __slots__ = ("_on_finish", "caller", "cancel_hook", "deadline", "done", "generation", "method", "path", "payload")

    def __init__(
        self,
        path: str,
        generation: int,
        method: str,
        payload: Parcel,
        *,
        caller: str,
        deadline: float | None,
        on_finish: Callable[[Parcel | None, CallError | None], None],
    ) -> None:
        self.path = path
        self.generation = generation
        self.method = method
        self.payload = payload
        self.caller = caller
        self.deadline = deadline
        self.done = False
        self.cancel_hook: Callable[[], None] | None = None
        self._on_finish = on_finish

    def finish(self, result: Parcel | None, error: CallError | None = None) -> None:
        if not self.done:
            self.done = True
            self._on_finish(result, error)

    def cancel(self) -> None:
        """Ask the callee to stop working on it; `finish` follows when it has."""
        if not self.done and self.cancel_hook is not None:
            self.cancel_hook()


class News(Struct, frozen=True):
    """An actor is up with `value`, or down for `reason`."""

    path: str
    generation: int
    value: Parcel
    reason: ExitReason | None = None

    def age(self) -> tuple[int, bool]:
        return self.generation, self.reason is not None


class Endpoint(Protocol):
    """Where messages for a path are delivered. None of these block; all are called on the loop's thread."""

    path: str
    is_prefix: bool  # whether everything below `path` is behind it as well

    def accept_call(self, call: PendingCall) -> None: ...

    def accept_cast(self, path: str, generation: int, parcel: Parcel, on_taken: OnTaken | None) -> bool | Parked:
        """True: taken. False: no room and `on_taken` is None. Parked: waits for room. Raises ActorError."""

    def wants_confirmation(self, path: str) -> bool:
        """Whether a cast is to go as a call of "$cast", so that its sender hears of a refusal there."""

    def learn_policy(self, path: str, policy: str) -> None: ...

    def send_watch(self, path: str, on: bool) -> None: ...


class _Watched:
    """One path that someone here watches: the last news and who gets the next."""

    __slots__ = ("last", "subscribers")

    def __init__(self) -> None:
        self.last: News | None = None
        self.subscribers: dict[object, Callable[[News], None]] = {}


class Hub:
    """`base` is the path of the process actor that this process is; "" in the root's process."""

    def __init__(self, base: str = "", uplink: Endpoint | None = None) -> None:
        self.base = base
        self.uplink = uplink
        self.endpoints: dict[str, Endpoint] = {}
        self.generations: dict[str, int] = {}
        self.runners: dict[str, Any] = {}  # of supervisors in this process, by path
        self.supervisors: dict[str, list[Any]] = {}  # those that actors opened for themselves, by the actor's path
        self.system: dict[
            str, Callable[[PendingCall], Coroutine[Any, Any, None]]
        ] = {}  # what a process answers, not an actor
        self.tasks: TaskGroup | None = None  # for those
        self.on_generation: Callable[[str, int], None] | None = None
        self.on_change: Callable[[], None] | None = None
        self.lost_casts: dict[str, int] = {}
        self._casts = 0
        self._forgotten: deque[str] = deque()
        self._ended: dict[str, tuple[int, ExitReason]] = {}
        self._last: dict[str, News] = {}
        self._watched: dict[str, _Watched] = {}

    # -- who is where ---
    def next_generation(self, path: str) -> int:
        """Generations grow for the whole life of the tree, also over restarts of the process that holds `path`."""
        number = self.generations.get(path, 0) + 1
        self.note_generation(path, number)
        return number

    def note_generation(self, path: str, number: int) -> None:
        self.generations[path] = number
        if self.on_generation is not None:
            self.on_generation(path, number)

    def generations_below(self, path: str) -> dict[str, int]:
        return {key: value for key, value in self.generations.items() if key.startswith(path + "/")}

    def register(self, endpoint: Endpoint) -> None:
        self.endpoints[endpoint.path] = endpoint
        if endpoint.is_prefix:
            for path in self._watched:
                if path.startswith(endpoint.path + "/"):
                    endpoint.send_watch(path, True)

    def unregister(self, endpoint: Endpoint, generation: int, reason: ExitReason) -> None:
        """Forget a dead endpoint; whatever was up behind it is down."""
        if self.endpoints.get(endpoint.path) is endpoint:
            del self.endpoints[endpoint.path]
        self._ended[endpoint.path] = (generation, reason)
        for path, watched in list(self._watched.items()):
            if path.startswith(endpoint.path + "/") and watched.last is not None and watched.last.reason is None:
                self._spread(News(path, watched.last.generation, Parcel(), reason))

    def forget(self, path: str) -> None:
        """The child at `path` was removed. What is known of the last few thousand of them is kept, for stale refs."""
        self._forgotten.append(path)
        if len(self._forgotten) > FORGOTTEN_KEPT:
            oldest = self._forgotten.popleft()
            if oldest not in self.endpoints and oldest not in self._forgotten:
                for table in (self.generations, self.lost_casts, self._ended, self._last):
                    table.pop(oldest, None)

    def _behind(self, path: str) -> Endpoint | None:
        """The process below this one that holds `path`."""
        at = path
        while at:
            endpoint = self.endpoints.get(at)
            if endpoint is not None and endpoint.is_prefix:
                return endpoint
            at = at.rpartition("/")[0]
        return None

    def is_ours(self, path: str) -> bool:
        return not self.base or path == self.base or path.startswith(self.base + "/")

    def find(self, path: str) -> Endpoint:
        """The endpoint for messages to `path`. Raises NoSuchActor or ActorDied."""
        endpoint = self.endpoints.get(path) or self._behind(path)
        if endpoint is None and not self.is_ours(path):
            endpoint = self.uplink
        if endpoint is not None:
            return endpoint
        at = path
        while at:
            if at in self._ended:
                raise ActorDied(at, *self._ended[at])
            at = at.rpartition("/")[0]
        raise NoSuchActor(path)

    def stale(self, path: str, generation: int) -> ActorDied:
        """What a message to an earlier incarnation is answered with."""
        reason = self.end_of(path, generation) or Lost("another generation is in its place")
        return ActorDied(path, generation, reason)

    def changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    # -- calls ---
    def start_call(self, call: PendingCall) -> None:
        """Deliver it; errors of delivery finish it at once."""
        try:
            answer = self.system.get(call.method)
            here = call.path == self.base or (call.path == "/" and self.uplink is None)
            if answer is not None and here and self.tasks is not None:
                self.tasks.start_soon(answer, call)
            else:
                self.find(call.path).accept_call(call)
        except ActorError as exc:
            call.finish(None, to_call_error(exc))

    async def call(
        self, path: str, method: str, payload: Any, timeout: float | None, *, caller: str = "", generation: int = 0
    ) -> Any:
        """Call and wait for the result. Cancelled or timed out, the callee's scope is cancelled, and its end is
        awaited for a moment. Raises ActorDied, NoSuchActor, RemoteError, CallTimeout or another ActorError."""
        done = anyio.Event()
        outcome: list[tuple[Parcel | None, CallError | None]] = []

        def on_finish(result: Parcel | None, error: CallError | None) -> None:
            outcome.append((result, error))
            done.set()

        deadline = None if timeout is None else anyio.current_time() + timeout
        call = PendingCall(
            path, generation, method, Parcel(payload), caller=caller, deadline=deadline, on_finish=on_finish
        )
        with anyio.move_on_after(timeout):
            try:
                await anyio.lowlevel.checkpoint_if_cancelled()
                self.start_call(call)
                await done.wait()
            finally:
                if not outcome:
                    call.cancel()
                    with anyio.move_on_after(CANCEL_GRACE_S, shield=True):
                        await done.wait()
        if not outcome or (outcome[0][1] is not None and outcome[0][1].kind in ("cancelled", "timeout")):
            raise CallTimeout(path, method, timeout or 0.0)
        result, error = outcome[0]
        if error is not None:
            raise from_call_error(error)
        return None if result is None else result.load()

    # -- casts ---
    async def cast(self, path: str, payload: Any, *, generation: int = 0) -> None:
        """Put into the mailbox; waits while it is full, if its policy is "wait". Cancelled while it waits, nothing is
        sent. Raises MailboxFull, ActorDied or NoSuchActor."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        endpoint = self.find(path)
        if endpoint.wants_confirmation(path):
            endpoint.learn_policy(path, await self.call(path, "$cast", payload, None, generation=generation))
            return
        waiter: list[anyio.Event] = []
        outcome = endpoint.accept_cast(path, generation, Parcel(payload), lambda: waiter[0].set())
        if isinstance(outcome, Parked):
            waiter.append(anyio.Event())
            try:
                await waiter[0].wait()
            except BaseException:
                outcome.drop()
                raise
            if outcome.failed is not None:
                raise outcome.failed
        self._casts += 1
        if self._casts % CASTS_PER_YIELD == 0:
            await anyio.lowlevel.cancel_shielded_checkpoint()

    def cast_nowait(self, path: str, payload: Any, *, generation: int = 0) -> bool:
        """Put into the mailbox if there is room; False if not, or if there is no such actor now."""
        try:
            return self.find(path).accept_cast(path, generation, Parcel(payload), None) is True
        except ActorError:
            return False

    def count_lost(self, path: str) -> None:
        """A cast found no actor, or a mailbox that refuses what has no room."""
        self.lost_casts[path] = self.lost_casts.get(path, 0) + 1

    # -- watches ---
    def end_of(self, path: str, generation: int) -> ExitReason | None:
        """Why that incarnation, of an actor in this process or right below it, has ended; None if it hasn't."""
        last, reason = self._ended.get(path, (0, Lost()))
        if 0 < generation < last:
            return Lost(f"generation {last} came after it")
        return reason if generation == last else None

    def publish(self, news: News) -> None:
        """From the supervisor that starts the actor at `news.path`: the authority on it."""
        self._last[news.path] = news
        self._spread(news)

    def hear(self, news: News) -> None:
        """From another process, because we asked."""
        self._spread(news)

    def _spread(self, news: News) -> None:
        watched = self._watched.get(news.path)
        if watched is None:
            return
        last = watched.last
        if last is not None and news.age() <= last.age():
            return  # known already
        if last is not None and last.reason is None and news.generation > last.generation:
            gap = News(news.path, last.generation, Parcel(), Lost("a newer incarnation is known"))
            for tell in list(watched.subscribers.values()):
                tell(gap)
        watched.last = news
        for tell in list(watched.subscribers.values()):
            tell(news)

    def watch(self, path: str, subscriber: object, tell: Callable[[News], None]) -> None:
        """Tell `tell` every piece of news on `path` from now on, and the last one now."""
        watched = self._watched.get(path)
        if watched is None:
            watched = self._watched[path] = _Watched()
            watched.last = self._last.get(path)
            self._ask(path, True)
        watched.subscribers[subscriber] = tell
        if watched.last is not None:
            tell(watched.last)

    def unwatch(self, path: str, subscriber: object) -> None:
        watched = self._watched.get(path)
        if watched is None:
            return
        watched.subscribers.pop(subscriber, None)
        if not watched.subscribers:
            del self._watched[path]
            self._ask(path, False)

    def watched_by(self, subscriber: object) -> list[str]:
        return [path for path, watched in self._watched.items() if subscriber in watched.subscribers]

    def _ask(self, path: str, on: bool) -> None:
        parent = path.rpartition("/")[0]
        below = self._behind(parent)
        if below is not None:
            below.send_watch(path, on)
        elif self.uplink is not None and (path == self.base or not self.is_ours(path)):
            self.uplink.send_watch(path, on)


def to_call_error(exc: ActorError) -> CallError:
    match exc:
        case ActorDied():
            return CallError("died", exc.path, exc.generation, exc.reason)
        case MailboxFull():
            return CallError("full", exc.path)
        case NoSuchActor():
            return CallError("nosuch", exc.path)
        case RemoteError():
            return CallError("raised", "", error=exc.error)
    raise exc


def from_call_error(error: CallError) -> ActorError:
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
