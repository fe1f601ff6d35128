"""One request on quart-trio with one task beside it, and without its leak.

quart-trio 0.12 runs a request as two tasks and cancels both when the server reports a disconnect. hypercorn reports one
while it sends the end of *every* answer, so the sending task dies inside the server, which then neither closes the
connection nor arms its idle timer. Here the request runs in the app's own task, the listener beside it only cancels
requests whose answer is not whole, and the end is sent when nobody cancels any more.
"""

from typing import Any, cast

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
from quart.utils import encode_headers
from quart.wrappers import Request
from quart.wrappers.response import DataBody, Response
from quart_trio.asgi import TrioASGIHTTPConnection
from werkzeug.wrappers import Response as WerkzeugResponse

from runtime_http.exchange import KEY, Exchange

LINGER_S = 10.0


class LeanConnection(TrioASGIHTTPConnection):
    """For ``QuartTrio.asgi_http_class``."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        request = self._create_request_from_scope(send)
        async with trio.open_nursery() as nursery:
            listener = Listener(request, nursery.cancel_scope)
            nursery.start_soon(listener.run, receive)
            response = await self.app.handle_request(request)
            listener.discard = True
            last = b""
            with trio.move_on_after(self._timeout_s(response)) as limit:
                last = await self._send(send, response)
            if limit.cancelled_caught:
                nursery.cancel_scope.cancel()
                return  # no end marker: the client must not take it for the whole answer
            if not listener.received.is_set():
                await send({"type": "http.response.body", "body": last, "more_body": True})
                last = b""
                # The client still sends the body of a request that has its answer. Closing now would reset the
                # connection, and the answer in it would be lost: take the rest for a while and throw it away.
                with trio.move_on_after(self._linger_s()):
                    await listener.received.wait()
            listener.finished = True
            await send({"type": "http.response.body", "body": last, "more_body": False})
            nursery.cancel_scope.cancel()

    def _linger_s(self) -> float:
        exchange: Exchange | None = cast(dict[str, Any], self.scope).get(KEY)
        return LINGER_S if exchange is None else exchange.linger_s

    def _timeout_s(self, response: Any) -> float:
        timeout = self.app.config["RESPONSE_TIMEOUT"]
        if isinstance(response, Response) and response.timeout != Ellipsis:
            timeout = response.timeout
        return float("inf") if timeout is None else timeout

    async def _send(self, send: ASGISendCallable, response: Response | WerkzeugResponse) -> bytes:
        """Send everything but the last part, which comes back."""
        headers = encode_headers(response.headers)
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        if isinstance(response, WerkzeugResponse):
            for data in response.response:
                body = data.encode() if isinstance(data, str) else data
                await send({"type": "http.response.body", "body": body, "more_body": True})
        elif isinstance(response.response, DataBody):
            return response.response.data[response.response.begin : response.response.end]
        else:
            async with response.response as parts:
                async for data in parts:
                    body = data.encode() if isinstance(data, str) else data
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        return b""


class Listener:
    """Reads what the client sends: the body, then nothing until it leaves."""

    def __init__(self, request: Request, scope: trio.CancelScope) -> None:
        self.request = request
        self.scope = scope
        self.received = trio.Event()
        self.discard = False  # the answer is being sent: nobody reads the body any more
        self.finished = False  # the end of the answer is being sent: a disconnect is no news

    async def run(self, receive: ASGIReceiveCallable) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.request":
                if not self.discard:
                    self.request.body.append(message.get("body", b""))
                if not message.get("more_body", False):
                    self.request.body.set_complete()
                    self.received.set()
            elif message["type"] == "http.disconnect":
                if not self.finished:
                    self.scope.cancel()
                return
