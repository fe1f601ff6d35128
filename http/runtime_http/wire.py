"""The short way to a client's socket: a stream's chunks framed and written at once, by whoever has them.

hypercorn's own way costs a lock, a shielded scope and two checkpoints a chunk. Here a chunk is framed by hand and
handed to the kernel; only what the kernel refuses takes the awaited way. h11 stays in SEND_BODY all the while (a chunk
does not change its state), so the head, the end marker, keep-alive and every error remain hypercorn's.

This leans on the private shape of hypercorn 0.18. Where anything looks different (TLS, HTTP/2, HTTP/1.0, another
server, a middleware between) there is no wire and the chunks go through the ASGI ``send``: correct, but slower.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any

import h11
import trio
from hypercorn.events import Closed
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.tcp_server import TCPServer

BODILESS = (204, 304)
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: discard and reset


class Link:
    """The connection under one request: hypercorn on trio, plain TCP or a Unix socket, HTTP/1 or HTTP/2."""

    def __init__(self, server: TCPServer, protocol: H11Protocol | H2Protocol, stream: trio.SocketStream) -> None:
        self.server = server
        self.protocol = protocol
        self.stream = stream

    def drop(self) -> None:
        """Reset the connection now. hypercorn finds it closed and reports a disconnect, which cancels the request.

        A reset, so that the kernel forgets what it holds, and no client takes what it got for the whole answer.
        Closing the socket wakes whoever sends or receives. A third one may wait: a reader that holds a pipelined
        request back until the present one is answered, which will never be. It wakes to find nothing there.
        """
        with contextlib.suppress(OSError):  # it may be closed already
            self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.stream.socket.close()
        if isinstance(self.protocol, H11Protocol):
            self.protocol.connection = Gone()  # type: ignore[assignment]
            self.protocol.can_read._event.set()  # type: ignore[attr-defined]


class Gone:
    """In the place of the h11 connection once the socket is closed: nothing comes, and what is sent is ignored."""

    our_state = None
    their_state = h11.ERROR
    they_are_waiting_for_100_continue = False
    trailing_data = (b"", False)

    def receive_data(self, data: bytes) -> None: ...

    def next_event(self) -> type[h11.NEED_DATA]:
        return h11.NEED_DATA

    def send(self, event: h11.Event) -> bytes:
        raise h11.LocalProtocolError("the connection was dropped")


def find_link(send: Any) -> Link | None:
    """The connection behind an ASGI ``send``, where it has the known shape."""
    stream = getattr(send, "__self__", None)
    if type(stream) is not HTTPStream:
        return None
    protocol = getattr(stream.send, "__self__", None)
    if not isinstance(protocol, H11Protocol | H2Protocol):
        return None
    server = getattr(protocol.send, "__self__", None)
    if not isinstance(server, TCPServer):
        return None
    transport: object = server.stream
    return Link(server, protocol, transport) if isinstance(transport, trio.SocketStream) else None


def open_wire(link: Link | None, scope: Mapping[str, Any], start: Mapping[str, Any]) -> "Wire | None":
    """A wire for the response whose head has just been sent, if its body goes out in chunks."""
    if (
        link is None
        or not isinstance(link.protocol, H11Protocol)
        or scope["http_version"] != "1.1"
        or scope["method"] == "HEAD"
        or start["status"] in BODILESS
    ):
        return None
    if any(bytes(name).lower() == b"content-length" for name, _ in start.get("headers", ())):
        return None
    connection = link.protocol.connection
    if not isinstance(connection, h11.Connection) or connection.our_state is not h11.SEND_BODY:
        return None
    return Wire(link)


class Wire:
    """The body of one chunked response."""

    __slots__ = ("link",)

    def __init__(self, link: Link) -> None:
        self.link = link

    def write(self, data: bytes) -> bytes:
        """Frame and write without waiting. What comes back is still to be sent, and before anything else.

        Errors are not met here, as the caller serves other streams too: all comes back, and ``send`` meets the same.
        """
        framed = b"%x\r\n%b\r\n" % (len(data), data)
        server = self.link.server
        if server.send_lock.locked():
            return framed
        # Asked for at each write: the number is -1 after a close, and a remembered one may by now be another client's.
        fd = self.link.stream.socket.fileno()
        if fd < 0:
            return framed
        try:
            sent = os.write(fd, framed)
        except OSError:
            return framed
        return framed[sent:] if sent < len(framed) else b""

    async def send(self, framed: bytes, stall_s: float) -> None:
        """Send what ``write`` gave back; waits for the client.

        A broken connection ends in the request's cancellation, and so does a client that is not done in ``stall_s``.
        A cancellation may leave a torn chunk, so the connection is dropped.
        """
        server = self.link.server
        async with server.send_lock:
            try:
                with trio.fail_after(stall_s):
                    await self.link.stream.send_all(framed)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await server.protocol.handle(Closed())
            except trio.TooSlowError:
                self.link.drop()
                await trio.sleep_forever()  # until the disconnect gets here
            except trio.Cancelled:
                self.link.drop()
                raise
