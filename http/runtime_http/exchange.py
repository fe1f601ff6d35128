"""The outermost layer of the app: one request and its answer, as the ASGI server sees them."""

from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import ExitStack
from typing import Any

import anyio

from runtime_http.front import Front
from runtime_http.wire import Link, Wire, find_link, open_wire

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY = "runtime_http"  # where the scope holds the exchange


class Exchange:
    """Reached by the handlers through the request's scope."""

    __slots__ = ("closing", "linger_s", "link", "status", "whole", "wire")

    def __init__(self, link: Link | None, linger_s: float) -> None:
        self.link = link
        self.linger_s = linger_s
        self.wire: Wire | None = None  # once the head of a chunked answer is sent, where the short way exists
        self.closing = ExitStack()  # what must be left when the request ends, however it ends
        self.status = 0
        self.whole = False  # the end of the answer is on its way


class ExchangeLayer:
    """ASGI middleware. It must be the outermost one, or the short way to the socket is not found."""

    def __init__(self, app: App, front: Front) -> None:
        self.app = app
        self.front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or KEY in scope:
            return await self.app(scope, receive, send)
        root = self.front.options.root_path
        if root and scope["path"].startswith(root + "/"):  # a proxy in front may have taken the prefix off already
            scope["path"] = scope["path"][len(root) :]
        exchange = scope[KEY] = Exchange(find_link(send), self.front.options.linger_s)

        async def send_through(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                await send(message)
                exchange.wire = open_wire(exchange.link, scope, message)
            elif message.get("more_body", False):
                await send(message)
            else:
                exchange.whole = True
                exchange.wire = None
                # Sending the end closes the stream, which the server reports as a disconnect while this call still
                # runs; cancelled by that, the connection would be neither closed nor given its idle timer.
                with anyio.CancelScope(shield=True):
                    await send(message)

        self.front.exchanges.add(exchange)
        try:
            await self.app(scope, receive, send_through)
        finally:
            self.front.exchanges.discard(exchange)
            if exchange.link is not None and exchange.status and not exchange.whole:
                exchange.link.drop()  # a torn answer; nothing can follow it
            self.front.stats.count(scope["path"], exchange.status, whole=exchange.whole)
            exchange.closing.close()
