"""Mailboxes of the data plane: one consumer binds, any number of producers connect by the address it hands out.

Between processes a mailbox is a ZeroMQ PULL socket and its producers are PUSH sockets; inside one process both ends are
a queue, and the messages are the objects themselves. The address says which, and travels as a value of the handshake.

Sockets are bound in Linux's abstract namespace, so that no file is left whatever dies, and speak CurveZMQ: the address
carries the mailbox's public key, so that only those who were given the address can get a word in. Bytes that are no
message are counted and dropped: they came from outside, and harm nobody.

Rules for a ZeroMQ socket in an event loop (its fd is edge-triggered, and any call on the socket can consume the edge):
one direction and one owning task per socket; receive until EAGAIN, look at EVENTS again, and only then wait on the fd;
give the loop a turn at least every ``DRAIN`` messages. ZeroMQ carries data only: that a peer lives is told elsewhere.
"""

import secrets
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import anyio
import anyio.lowlevel
import msgspec
import zmq

DRAIN = 64
HIGH_WATER = 10_000  # messages a producer may have under way to one consumer
MAX_BYTES = 64 << 20  # a frame over this is refused by ZeroMQ, and its sender disconnected

T = TypeVar("T")


class Outbox(Protocol):
    """The producer's end. Used by one thread."""

    def send_nowait(self, message: Any) -> bool:
        """Hand over ``message``; False where the consumer is too far behind (nothing was sent)."""
        ...

    def close(self) -> None: ...


class LocalMailboxes:
    """The mailboxes of one process and one event loop, by address."""

    def __init__(self) -> None:
        self._by_address: dict[str, LocalMailbox[Any]] = {}

    def bind(self) -> "LocalMailbox[Any]":
        return LocalMailbox(self._by_address)

    def connect(self, address: str) -> Outbox:
        """An outbox to ``address``; where nobody is bound (any more) its messages are dropped, as with a socket."""
        return _LocalOutbox(self._by_address, address)


class LocalMailbox(Generic[T]):
    """A mailbox whose producers live on the same event loop. Unbounded: both ends are driven step by step."""

    def __init__(self, by_address: "dict[str, LocalMailbox[Any]]") -> None:
        self.address = "local:" + secrets.token_hex(8)
        self._by_address = by_address
        by_address[self.address] = self
        self._queue: deque[T] = deque()
        self._news = anyio.Event()

    def put(self, message: T) -> None:
        self._queue.append(message)
        self._news.set()

    async def receive(self) -> Sequence[T]:
        """The messages that wait, at least one, at most ``DRAIN``. Cancelled: nothing is lost."""
        await anyio.lowlevel.checkpoint()
        while not self._queue:
            self._news = anyio.Event()
            await self._news.wait()
        return [self._queue.popleft() for _ in range(min(DRAIN, len(self._queue)))]

    def close(self) -> None:
        self._by_address.pop(self.address, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _LocalOutbox:
    def __init__(self, by_address: dict[str, LocalMailbox[Any]], address: str) -> None:
        self._by_address, self._address = by_address, address

    def send_nowait(self, message: Any) -> bool:
        if (box := self._by_address.get(self._address)) is not None:
            box.put(message)
        return True

    def close(self) -> None:
        pass


class SocketMailbox(Generic[T]):
    """A mailbox whose producers live anywhere on this host. ``kind`` is the (union of) message struct(s) to decode.

    Use either ``receive`` (from one task) or ``drain`` and ``socket`` (a plain thread with a ``zmq.Poller``).
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", kind: Any) -> None:
        self.garbage = 0  # frames that were no message
        self._decode = msgspec.msgpack.Decoder(kind).decode
        public, secret = zmq.curve_keypair()
        name = secrets.token_hex(12)
        self.address = f"ipc://@runtime-{name}#{public.decode()}"
        self.socket = context.socket(zmq.PULL)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVHWM, HIGH_WATER)
        self.socket.set(zmq.MAXMSGSIZE, MAX_BYTES)
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = public, secret
        self.socket.bind(f"ipc://@runtime-{name}")

    def drain(self, limit: int = DRAIN) -> list[T]:
        """The messages that wait, at most ``limit``; never blocks."""
        messages: list[T] = []
        while len(messages) < limit:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                messages.append(self._decode(frame))
            except msgspec.MsgspecError:
                self.garbage += 1
        return messages

    async def receive(self) -> Sequence[T]:
        """The messages that wait, at least one, at most ``DRAIN``. Cancelled: nothing is lost."""
        await anyio.lowlevel.checkpoint()
        while not (messages := self.drain()):
            if not cast(int, self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
                await anyio.wait_readable(cast(int, self.socket.get(zmq.FD)))
        return messages

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SocketOutbox:
    """A producer's end of a ``SocketMailbox``, by the address it handed out."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        endpoint, _, key = address.partition("#")
        self._encode = msgspec.msgpack.Encoder().encode
        self.socket = context.socket(zmq.PUSH)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.SNDHWM, HIGH_WATER)
        self.socket.curve_serverkey = key.encode()
        self.socket.curve_publickey, self.socket.curve_secretkey = zmq.curve_keypair()
        self.socket.connect(endpoint)

    def send_nowait(self, message: Any) -> bool:
        try:
            self.socket.send(self._encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self.socket.close()


class DataPlane:
    """What an actor needs to take part in the data plane: one per process (``local`` is shared by its task actors)."""

    def __init__(self) -> None:
        self.local = LocalMailboxes()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._outboxes: list[SocketOutbox] = []

    @property
    def context(self) -> "zmq.Context[zmq.Socket[bytes]]":
        # Made late: a process whose actors only talk among themselves starts no ZeroMQ thread.
        if self._context is None:
            self._context = zmq.Context()
        return self._context

    def bind(self, kind: Any, *, local: bool) -> LocalMailbox[Any] | SocketMailbox[Any]:
        """A mailbox for messages of ``kind``; ``local``: all its producers are tasks of this process."""
        return self.local.bind() if local else SocketMailbox(self.context, kind)

    def connect(self, address: str) -> Outbox:
        if address.startswith("local:"):
            return self.local.connect(address)
        self._outboxes = [outbox for outbox in self._outboxes if not outbox.socket.closed]
        self._outboxes.append(SocketOutbox(self.context, address))
        return self._outboxes[-1]

    def close(self) -> None:
        for outbox in self._outboxes:
            outbox.close()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
