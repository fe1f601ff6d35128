"""The messages between two hubs over one link: calls, casts in a window, watches. Both ends are alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import anyio

from ._errors import ActorDied, ActorError
from ._exit import ExitReason
from ._hub import Hub, News, PendingCall
from ._link import Link
from ._mailbox import OnTaken, Parked
from ._remote import capture
from ._wire import WINDOW, AnyFrame, Call, CallError, Cancel, Cast, Parcel, Reply, Taken, Told, Unwatch, Watch, portable


class _Lane:
    """Casts for one path over this link: how many are unacknowledged, and who waits for room."""

    __slots__ = ("parked", "unacked")

    def __init__(self) -> None:
        self.unacked = 0
        self.parked: deque[tuple[int, Parked]] = deque()


class Peer:
    """The process at the other end, as an endpoint; `on_control` gets the frames that are not messages."""

    is_prefix = True

    def __init__(self, hub: Hub, path: str, link: Link, on_control: Callable[[AnyFrame], None]) -> None:
        self.path = path
        self.generation = 0
        self.closed: tuple[int, ExitReason] | None = None
        self._hub = hub
        self._link = link
        self._on_control = on_control
        self._calls: dict[int, PendingCall] = {}  # ours, that the peer works on
        self._serving: dict[int, PendingCall] = {}  # the peer's, that we work on
        self._ids = 0
        self._lanes: dict[str, _Lane] = {}
        self._taken: dict[str, int] = {}
        self._refused: set[str] = set()
        self._policies: dict[str, str] = {}  # of the mailboxes behind the link, where known

    # -- endpoint: towards the peer ---
    def _check(self, path: str, generation: int) -> None:
        if self.closed is not None:
            raise ActorDied(path, *self.closed)
        if generation and path == self.path and self.generation and generation != self.generation:
            raise self._hub.stale(path, generation)

    def accept_call(self, call: PendingCall) -> None:
        self._check(call.path, call.generation)
        self._ids += 1
        number = self._ids
        budget = None if call.deadline is None else max(call.deadline - anyio.current_time(), 0.0)
        try:
            data = call.payload.dump()
        except Exception as exc:
            call.finish(None, CallError("raised", call.path, error=capture(exc)))
            return
        self._calls[number] = call
        call.cancel_hook = lambda: self._link.send(Cancel(number))
        self._link.send(Call(number, call.path, call.generation, call.method, call.caller, budget, data))

    def accept_cast(self, path: str, generation: int, parcel: Parcel, on_taken: OnTaken | None) -> bool | Parked:
        self._check(path, generation)
        lane = self._lanes.get(path)
        if lane is None:
            lane = self._lanes[path] = _Lane()
        if lane.unacked < WINDOW:
            frame = Cast(path, generation, parcel.dump())
            lane.unacked += 1
            self._link.send_bulk(frame)
            return True
        if on_taken is None:
            return False
        parked = Parked(parcel, on_taken)
        lane.parked.append((generation, parked))
        return parked

    def wants_confirmation(self, path: str) -> bool:
        return self.closed is None and self._policies.get(path, "fail") == "fail"

    def learn_policy(self, path: str, policy: str) -> None:
        self._policies[path] = policy

    def send_watch(self, path: str, on: bool) -> None:
        self._link.send(Watch(path) if on else Unwatch(path))

    def close(self, generation: int, reason: ExitReason) -> None:
        """The peer is gone: everyone who waits for it learns it now, and what it asked for is dropped."""
        self.closed = (generation, reason)
        for call in list(self._calls.values()):
            call.finish(None, CallError("died", self.path, generation, reason))
        self._calls.clear()
        for served in list(self._serving.values()):
            served.cancel()
        self._serving.clear()
        for path, lane in self._lanes.items():
            for _, parked in lane.parked:
                parked.failed = ActorDied(path, generation, reason)
                if parked.alive:
                    parked.on_taken()
        self._lanes.clear()
        for path in self._hub.watched_by(self):
            self._hub.unwatch(path, self)

    # -- frames from the peer ---
    def on_frame(self, frame: AnyFrame) -> None:
        match frame:
            case Cast():
                self._on_cast(frame)
            case Taken(path, count, refused):
                self._on_taken(path, count, refused)
            case Call():
                self._on_call(frame)
            case Reply(number, result, error):
                call = self._calls.pop(number, None)
                if call is not None:
                    call.finish(None if result is None else Parcel(data=result), error)
            case Cancel(number):
                if (served := self._serving.get(number)) is not None:
                    served.cancel()
            case Watch(path):
                self._hub.watch(path, self, self._tell)
            case Unwatch(path):
                self._hub.unwatch(path, self)
            case Told(path, generation, value, reason):
                self._hub.hear(News(path, generation, Parcel(data=value), reason))
            case _:
                self._on_control(frame)

    def _tell(self, news: News) -> None:
        try:
            value = news.value.dump() if news.reason is None else b"\x92\xc0\xc0"
        except Exception:  # a task actor's value need not be encodable: others learn that it is up
            value = b"\x92\xc0\xc0"
        self._link.send(Told(news.path, news.generation, value, news.reason and portable(news.reason)))

    def _on_call(self, frame: Call) -> None:
        deadline = None if frame.budget_s is None else anyio.current_time() + frame.budget_s
        call = PendingCall(
            frame.path,
            frame.generation,
            frame.method,
            Parcel(data=frame.payload),
            caller=frame.caller,
            deadline=deadline,
            on_finish=partial(self._reply, frame.id),
        )
        self._serving[frame.id] = call
        self._hub.start_call(call)

    def _reply(self, number: int, result: Parcel | None, error: CallError | None) -> None:
        if self._serving.pop(number, None) is None:
            return
        data = None
        if result is not None:
            try:
                data = result.dump()
            except Exception as exc:
                error = CallError("raised", self.path, error=capture(exc))
        if error is not None and error.reason is not None:
            error = CallError(error.kind, error.path, error.generation, portable(error.reason), error.error)
        self._link.send(Reply(number, data, error))

    def _on_cast(self, frame: Cast) -> None:
        path = frame.path
        parcel = Parcel(data=frame.payload)
        try:
            taken = self._hub.find(path).accept_cast(path, frame.generation, parcel, partial(self._acknowledge, path))
        except ActorError:
            self._hub.count_lost(path)
            self._refused.add(path)
            taken = True
        if taken is True:
            self._acknowledge(path)

    def _acknowledge(self, path: str) -> None:
        self._taken[path] = self._taken.get(path, 0) + 1
        self._link.poke()

    def flush_taken(self) -> None:
        """The link's writer calls this before it looks for work: acknowledgements go out in batches."""
        if self._taken:
            taken, self._taken = self._taken, {}
            refused, self._refused = self._refused, set()
            for path, count in taken.items():
                self._link.send_bulk(Taken(path, count, path in refused))

    def _on_taken(self, path: str, count: int, refused: bool) -> None:
        if refused:
            self._policies.pop(path, None)  # the next cast that waits asks, and hears why
        lane = self._lanes.get(path)
        if lane is None:
            return
        lane.unacked -= count
        while lane.parked and lane.unacked < WINDOW:
            generation, parked = lane.parked.popleft()
            if parked.alive:
                lane.unacked += 1
                self._link.send_bulk(Cast(path, generation, parked.parcel.dump()))
                parked.on_taken()
        if not lane.unacked and not lane.parked:
            del self._lanes[path]
