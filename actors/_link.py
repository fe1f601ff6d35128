"""A control channel end on the event loop: a socket, frames in and out, batched both ways."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable

import anyio
import anyio.lowlevel
from anyio.abc import TaskStatus

from ._wire import AnyFrame, Frame, FrameReader, ProtocolError, encode_frame

_READ_BYTES = 256 * 1024
_SEND_BYTES = 128 * 1024


class Link:
    """Sends never block: what the socket doesn't take waits in order. Senders bound what they have in flight.

    Urgent frames (stop, calls, replies, news) go out at once and pass the bulk ones (casts), which go out in batches.
    """

    def __init__(self, sock: socket.socket, flush_hook: Callable[[], None] | None = None) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._urgent: deque[bytes] = deque()
        self._bulk: deque[bytes] = deque()
        self._partial = b""
        self._wake = anyio.Event()
        self._flush_hook = flush_hook
        self._frames = FrameReader()
        self.closed = False

    def send(self, frame: Frame) -> None:
        """Hand over an urgent frame. On a closed link it is dropped: who cares about the peer learns of its death."""
        if self.closed:
            return
        data = encode_frame(frame)
        if not self._partial and not self._urgent:
            data = self._write(data)
            if not data:
                return
            self._partial = data
        else:
            self._urgent.append(data)
        self._wake.set()

    def send_bulk(self, frame: Frame) -> None:
        """Hand over a frame that may wait for others of its kind."""
        if not self.closed:
            self._bulk.append(encode_frame(frame))
            self._wake.set()

    def continue_with(self, reader: FrameReader) -> None:
        """Go on with what someone has read of this socket before."""
        self._frames = reader

    def poke(self) -> None:
        """Have the writer run its flush hook soon."""
        self._wake.set()

    def _write(self, data: bytes) -> bytes:
        try:
            return data[self._sock.send(data) :]
        except BlockingIOError:
            return data
        except OSError:  # the peer is gone; the reader or the pidfd reports it
            self.closed = True
            return b""

    def _gather(self) -> bytes:
        if self._partial:
            return self._partial
        batch: list[bytes] = []
        size = 0
        for queue in (self._urgent, self._bulk):
            while queue and size < _SEND_BYTES:
                batch.append(queue.popleft())
                size += len(batch[-1])
        return b"".join(batch)

    async def write(self) -> None:
        """Flush what `send` and `send_bulk` left, for ever; returns when the link is closed."""
        while not self.closed:
            if self._flush_hook is not None:
                self._flush_hook()
            self._partial = self._gather()
            if self._partial:
                self._partial = self._write(self._partial)
                if self._partial:
                    await self._wait_writable()
                else:
                    await anyio.lowlevel.checkpoint()
            else:
                self._wake = anyio.Event()
                await self._wake.wait()

    async def flush(self) -> None:
        """Wait until everything handed over was written or the link closed."""
        if self._flush_hook is not None:
            self._flush_hook()
        while not self.closed and (self._partial or self._urgent or self._bulk):
            self._partial = self._write(self._gather())
            if self._partial:
                await self._wait_writable()

    async def _wait_writable(self) -> None:
        try:
            await anyio.wait_writable(self._sock)
        except anyio.ClosedResourceError:
            self.closed = True

    async def read(
        self, on_frame: Callable[[AnyFrame], None], *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Give every frame to `on_frame`; returns at the end of the stream. Raises ProtocolError."""
        task_status.started()
        while True:
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                try:
                    await anyio.wait_readable(self._sock)
                except anyio.ClosedResourceError:
                    return
                continue
            except OSError:
                return
            if not data:
                return
            for frame in self._frames.feed(data):
                on_frame(frame)
            await anyio.lowlevel.checkpoint()

    def read_rest(self, on_frame: Callable[[AnyFrame], None]) -> None:
        """Take what the peer left in the socket before it died, without waiting."""
        while True:
            try:
                data = self._sock.recv(_READ_BYTES)
            except OSError:  # nothing more, or closed
                return
            if not data:
                return
            try:
                for frame in self._frames.feed(data):
                    on_frame(frame)
            except ProtocolError:
                return

    def close(self) -> None:
        """Close the socket; waiters in `read` and `write` are woken by the loop."""
        if self._sock.fileno() >= 0:
            anyio.notify_closing(self._sock)
            self._sock.close()
        self.closed = True
        self._wake.set()
