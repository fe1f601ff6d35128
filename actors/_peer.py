"""One end of a control channel: frames over a socket, and the messages between two hubs. Both ends are alike.

It belongs to no event loop and never blocks: `_link.py` drives it from one, a main-thread actor from a thread.
"""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import Callable
from functools import partial

from msgspec import Struct, field

from . import _wire as wire
from ._door import CAST, Message
from ._exit import ExitReason, capture
from ._hub import Hub, News
from ._wire import Parcel

_READ_BYTES = 256 * 1024
_SEND_BYTES = 128 * 1024
BEAT_EVERY_S = 0.05


class _Lane(Struct):
    """Casts for one path over this link: how many are unacknowledged, and who waits for room.

    `policy` is the mailbox's, where it is known and refuses nothing; casts that ask go as calls until then.
    """

    policy: Parcel | None = None
    unacked: int = 0
    parked: deque[Message] = field(default_factory=deque)


class Peer:
    """The process at the other end of `sock`. `on_control` gets the frames that are not messages.

    Urgent frames (stop, calls, replies, news) go out at once and pass the bulk ones (casts), which go out in batches.
    What the socket doesn't take waits in order: senders bound what they have in flight.
    """

    def __init__(
        self,
        sock: socket.socket,
        hub: Hub,
        on_control: Callable[[wire.AnyFrame], None],
        path: str = "",
        generation: int = 0,
    ) -> None:
        sock.setblocking(False)
        self.path = path
        self.generation = generation
        self.closed = False  # nothing more can be written
        self.wake: Callable[[], None] = lambda: None  # set by whoever drives this: `write_some` has something to do
        self._sock = sock
        self._hub = hub
        self._on_control = on_control
        self._frames = wire.FrameReader()
        self._urgent: deque[bytes] = deque()
        self._bulk: deque[bytes] = deque()
        self._partial = b""
        self._calls: dict[int, Message] = {}  # ours, that the peer works on
        self._serving: dict[int, Message] = {}  # the peer's, that we work on
        self._ids = 0
        self._lanes: dict[str, _Lane] = {}
        self._taken: dict[str, int] = {}
        self._refused: set[str] = set()
        self._death: tuple[int, ExitReason] | None = None
        self._beat_at = -math.inf
        self._beat_phase: str | None = None

    # -- bytes ---
    def send(self, frame: wire.Frame) -> None:
        """Hand over an urgent frame. On a closed link it is dropped: who cares about the peer learns of its death."""
        if self.closed:
            return
        data = wire.encode_frame(frame)
        if self._partial or self._urgent:
            self._urgent.append(data)
        else:
            self._partial = self._write(data)
        if self._partial:
            self.wake()

    def _send_bulk(self, frame: wire.Frame) -> None:
        if not self.closed:
            self._bulk.append(wire.encode_frame(frame))
            self.wake()

    def _write(self, data: bytes) -> bytes:
        try:
            return data[self._sock.send(data) :]
        except BlockingIOError:
            return data
        except OSError:  # the peer is gone; the reader or the pidfd reports it
            self.closed = True
            return b""

    def write_some(self) -> bool:
        """Write a batch of what waits; True if nothing is left to write."""
        for path, count in self._taken.items():
            self._bulk.append(wire.encode_frame(wire.Taken(path, count, path in self._refused)))
        self._taken.clear()
        self._refused.clear()
        if not self._partial:
            batch: list[bytes] = []
            size = 0
            for queue in (self._urgent, self._bulk):
                while queue and size < _SEND_BYTES:
                    batch.append(queue.popleft())
                    size += len(batch[-1])
            self._partial = b"".join(batch)
        if self._partial:
            self._partial = self._write(self._partial)
        return self.closed or not (self._partial or self._urgent or self._bulk)

    @property
    def is_blocked(self) -> bool:
        """The socket took less than it was given."""
        return bool(self._partial)

    def read_some(self) -> bool:
        """Take in the frames that are there; False at the end of the stream. Raises BlockingIOError when there is
        nothing, and ProtocolError."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            raise
        except OSError:
            return False
        for frame in self._frames.feed(data):
            self._on_frame(frame)
        return bool(data)

    # -- towards the peer ---
    def accept(self, message: Message) -> None:
        """Send it there. Raises what the encoder raises."""
        path, generation = message.path, message.generation
        if self._death is not None:
            message.finish(None, wire.CallError("died", path, *self._death))
        elif generation and path == self.path and self.generation and generation != self.generation:
            message.finish(None, self._hub.stale(path, generation))
        elif message.method == CAST:
            self._send_cast(message)
        else:
            self._send_call(message)

    def _send_call(self, message: Message) -> None:
        self._ids += 1
        number = self._ids
        budget = None if message.deadline is None else max(message.deadline - self._hub.now(), 0.0)
        data = message.payload.dump()
        self._calls[number] = message
        message.cancel_hook = lambda: self.send(wire.Cancel(number))
        self.send(wire.Call(number, message.path, message.generation, message.method, message.caller, budget, data))

    def _send_cast(self, message: Message) -> None:
        lane = self._lanes.get(message.path)
        if lane is None:
            lane = self._lanes[message.path] = _Lane()
        data = message.payload.dump()
        if message.asks and lane.policy is None:
            self._send_call(message)
        elif lane.unacked < wire.WINDOW:
            lane.unacked += 1
            self._send_bulk(wire.Cast(message.path, message.generation, data))
            message.finish(lane.policy)
        elif message.waits:
            message.wait_in(lane.parked)
        else:
            message.finish(None, wire.CallError("full", message.path))

    def send_watch(self, path: str, on: bool) -> None:
        self.send(wire.Watch(path, on))

    def beat(self, phase: str) -> None:
        """Most only compare times."""
        now = self._hub.now()
        if phase != self._beat_phase or now - self._beat_at >= BEAT_EVERY_S:
            self._beat_at, self._beat_phase = now, phase
            self.send(wire.Beat(phase))

    def died(self, generation: int, reason: ExitReason) -> None:
        """The peer is gone: everyone who waits for it learns it now, and what it asked for is dropped."""
        self._death = (generation, reason)
        for message in [*self._calls.values(), *(cast for lane in self._lanes.values() for cast in lane.parked)]:
            message.finish(None, wire.CallError("died", self.path, generation, reason))
        self._calls.clear()
        self._lanes.clear()
        for served in list(self._serving.values()):
            served.cancel()
        self._serving.clear()
        self._hub.unwatch_all(self)

    # -- from the peer ---
    def _on_frame(self, frame: wire.AnyFrame) -> None:
        match frame:
            case wire.Cast(path, generation, payload):
                self._hub.deliver(Message(path, generation, CAST, Parcel(data=payload), on_finish=self._acknowledge))
            case wire.Taken():
                self._on_taken(frame)
            case wire.Call(number, path, generation, method, caller, budget_s, payload):
                deadline = None if budget_s is None else self._hub.now() + budget_s
                reply = partial(self._reply, number)
                message = Message(path, generation, method, Parcel(data=payload), caller, deadline, reply, asks=True)
                self._serving[number] = message
                self._hub.deliver(message)
            case wire.Reply(number, result, error):
                call = self._calls.pop(number, None)
                if call is not None:
                    value = None if result is None else Parcel(data=result)
                    if call.method == CAST and value is not None and value.load() != "fail":
                        self._lanes[call.path].policy = value
                    call.finish(value, error)
            case wire.Cancel(number):
                if (served := self._serving.get(number)) is not None:
                    served.cancel()
            case wire.Watch(path, on):
                if on:
                    self._hub.watch(path, self, self._tell)
                else:
                    self._hub.unwatch(path, self)
            case wire.Told(path, generation, value, reason):
                self._hub.hear(News(path, generation, Parcel(data=value), reason))
            case _:
                self._on_control(frame)

    def _tell(self, news: News) -> None:
        try:
            value = news.value.dump()
        except Exception:  # a task actor's value need not be encodable: others learn that it is up
            value = wire.dump(None)
        self.send(wire.Told(news.path, news.generation, value, news.reason and wire.portable(news.reason)))

    def _reply(self, number: int, message: Message) -> None:
        if self._serving.pop(number, None) is None:
            return
        data, error = None, message.error
        if message.result is not None:
            try:
                data = message.result.dump()
            except Exception as exc:
                error = wire.CallError("raised", self.path, error=capture(exc))
        if error is not None and error.reason is not None:
            error = wire.CallError(error.kind, error.path, error.generation, wire.portable(error.reason), error.error)
        self.send(wire.Reply(number, data, error))

    def _acknowledge(self, cast: Message) -> None:
        """In batches: the writer sends them."""
        self._taken[cast.path] = self._taken.get(cast.path, 0) + 1
        if cast.error is not None:
            self._refused.add(cast.path)
        self.wake()

    def _on_taken(self, taken: wire.Taken) -> None:
        lane = self._lanes.get(taken.path)
        if lane is None:
            return
        if taken.refused:
            lane.policy = None  # the next cast that waits asks, and hears why
        lane.unacked -= taken.count
        while lane.parked and lane.unacked < wire.WINDOW:
            message = lane.parked.popleft()
            lane.unacked += 1
            self._send_bulk(wire.Cast(message.path, message.generation, message.payload.dump()))
            message.finish(lane.policy)
