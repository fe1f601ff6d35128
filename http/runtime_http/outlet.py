"""Where a stream's bytes leave: at once if the client keeps up, else by a task that waits for it."""

from collections.abc import Callable
from typing import Any

import anyio
from quart.wrappers.response import ResponseBody

from runtime_http.exchange import Exchange
from runtime_http.options import Options
from runtime_http.stats import Stats

PING = b": nothing new\n\n"  # a comment, which clients skip


class Outlet(ResponseBody):
    """The body of a streamed answer, and the mailbox of the task that sends it.

    ``write`` is for the task that reads the engine's answers: it serves all streams and never waits. While ``clear``
    (the head is out, nothing is on its way) it writes to the socket itself; what the kernel refuses becomes the tail,
    and the request's own task wakes and sends it the awaited way. Until that is done nobody writes past it: news are
    kept by their producer, and ``pull`` renders them, merged, when the task asks for more.
    """

    def __init__(self, exchange: Exchange, stats: Stats, options: Options, pull: Callable[[], bytes]) -> None:
        self.exchange = exchange
        self.stats = stats
        self.stall_s = options.send_stall_s
        self.ping_s = options.ping_s
        self.pull = pull
        self._writes = 0
        self.clear = False
        self.ended = False  # no more will come
        self._tail = b""  # framed
        self._ping = b""  # to be sent if there is nothing else
        self._wake = anyio.Event()

    def can_write(self) -> bool:
        """Whether ``write`` may be used now. Without a wire it never may: everything is pulled."""
        return self.clear and self.exchange.wire is not None

    def write(self, data: bytes) -> None:
        """Send ``data`` without waiting. Only if ``can_write``."""
        assert self.exchange.wire is not None
        self._tail = self.exchange.wire.write(data)
        self._writes += 1
        if self._tail:
            self.clear = False
            self._wake.set()
        else:
            self.stats.fast_writes += 1

    async def _rest(self) -> None:
        """Let others write, until there is something that they could not, or nothing was written for long."""
        writes = self._writes
        self._wake = anyio.Event()
        self.clear = True
        try:
            with anyio.move_on_after(self.ping_s) as silence:
                await self._wake.wait()
        finally:
            self.clear = False
        if silence.cancelled_caught and self._writes == writes:
            self._ping = PING

    def wake(self) -> None:
        """There is something to pull, or the end was set."""
        self._wake.set()

    async def __aenter__(self) -> "Outlet":
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self.ended = True

    def __aiter__(self) -> "Outlet":
        return self

    async def __anext__(self) -> bytes:
        """Bytes for the server to send; with a wire they are sent here, and only the end is told."""
        wire = self.exchange.wire
        while True:
            if self._tail:
                assert wire is not None
                tail, self._tail = self._tail, b""
                self.stats.woken_writes += 1
                await wire.send(tail, self.stall_s)
            ended = self.ended
            data = self.pull() or self._ping
            self._ping = b""
            if data and wire is None:
                self.stats.woken_writes += 1
                return data
            if data and wire is not None:
                self._tail = wire.write(data)
                self.stats.woken_writes += not self._tail
            elif ended:
                raise StopAsyncIteration
            else:
                await self._rest()
