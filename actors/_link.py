"""A peer that is driven by the event loop."""

from __future__ import annotations

import contextlib

import anyio
import anyio.lowlevel

from ._peer import Peer
from ._wire import ProtocolError


class Link(Peer):
    """`read` and `write` run for as long as the link is of use."""

    async def write(self) -> None:
        """Write what waits, for ever; returns when the link is closed."""
        while not self.closed:
            if self.write_some():
                woken = anyio.Event()
                self.wake = woken.set
                await woken.wait()
            elif self.is_blocked:
                await self._wait_writable()
            else:
                await anyio.lowlevel.checkpoint()

    async def flush(self) -> None:
        """Wait until everything handed over was written or the link closed."""
        while not self.write_some():
            await self._wait_writable()

    async def _wait_writable(self) -> None:
        try:
            await anyio.wait_writable(self._sock)
        except anyio.ClosedResourceError:
            self.closed = True

    async def read(self) -> None:
        """Take in every frame; returns at the end of the stream. Raises ProtocolError."""
        while True:
            try:
                if not self.read_some():
                    return
                await anyio.lowlevel.checkpoint()
            except BlockingIOError:
                try:
                    await anyio.wait_readable(self._sock)
                except anyio.ClosedResourceError:
                    return

    def read_rest(self) -> None:
        """Take what the peer left in the socket before it died, without waiting."""
        with contextlib.suppress(BlockingIOError, ProtocolError):
            while self.read_some():
                pass

    def close(self) -> None:
        """Close the socket; waiters in `read` and `write` are woken by the loop."""
        if self._sock.fileno() >= 0:
            anyio.notify_closing(self._sock)
            self._sock.close()
        self.closed = True
        self.wake()
