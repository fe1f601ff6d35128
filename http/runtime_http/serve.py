"""Serve a front over HTTP on sockets that somebody else has bound."""

import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config as HyperConfig
from hypercorn.config import Sockets
from hypercorn.trio.run import worker_serve
from hypercorn.typing import ASGIFramework
from quart_trio import QuartTrio

from runtime.service import Service
from runtime_http import gone
from runtime_http.app import create_app, front_of
from runtime_http.errors import ApiError
from runtime_http.front import Front
from runtime_http.options import Options

KEEPALIVE_S = 60
LAST_WORDS_S = 1.0  # for error events to get out after the drain budget is spent


async def serve(
    service: Service,
    sockets: Sequence[socket.socket],
    *,
    shutdown_trigger: Callable[[], Awaitable[float | None]] | None = None,
    options: Options | None = None,
    app: QuartTrio | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until ``shutdown_trigger`` returns, then drain. ``task_status`` gets the URLs when connections are taken.

    The sockets are listening ones (also inherited: ``socket.socket(fileno=fd)``); they stay the caller's, who closes
    them and thereby ends what the kernel still accepts. ``app`` may be one made by ``create_app``, with more routes.

    What the trigger returns is the drain budget in seconds (None: the configured one). Draining, idle connections close
    at once, new requests are refused with 503, running ones go on; when the budget is spent the rest get an error event
    or answer, and a moment later their connections are dropped. Cancelled, everything is dropped at once.
    """
    gone.install()
    app = app or create_app(service, options)
    front = front_of(app)
    config = hyper_config(front.options)
    own = [sock.dup() for sock in sockets]
    for sock in own:
        sock.setblocking(False)
        watch_clients(sock, front.options.send_stall_s)

    async with trio.open_nursery() as nursery:

        async def trigger() -> None:
            budget_s = await shutdown_trigger() if shutdown_trigger is not None else await trio.sleep_forever()
            if budget_s is None:
                budget_s = front.options.drain_s
            config.graceful_timeout = budget_s + 2 * LAST_WORDS_S
            front.begin_drain()
            nursery.start_soon(drain, front, budget_s)

        nursery.start_soon(drop_on_cancel, front)
        await worker_serve(
            ASGIWrapper(cast(ASGIFramework, app)),
            config,
            sockets=Sockets([], own, []),
            shutdown_trigger=trigger,
            task_status=task_status,
        )
        nursery.cancel_scope.cancel()


async def drain(front: Front, budget_s: float) -> None:
    with trio.move_on_after(budget_s):
        await front.wait_quiet()
        return
    front.cut(ApiError(503, "The server is shutting down.", code="shutting_down"))
    await trio.sleep(LAST_WORDS_S)
    front.drop_connections()


async def drop_on_cancel(front: Front) -> None:
    """Sends are shielded in the server: a client that does not read would hold a cancelled server for ever."""
    try:
        await trio.sleep_forever()
    finally:
        front.drop_connections()


def watch_clients(sock: socket.socket, stall_s: float) -> None:
    """Have the kernel break connections whose clients vanished or take nothing; accepted sockets inherit this.

    It sees every way of sending, the shielded ones of the server too.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S // 4),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", int(stall_s * 1000)),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def hyper_config(options: Options) -> HyperConfig:
    config = HyperConfig()
    config.keep_alive_timeout = options.keep_alive_s
    config.keep_alive_max_requests = 10**9
    config.graceful_timeout = options.drain_s
    config.h11_max_incomplete_size = options.max_header_bytes
    config.backlog = options.backlog
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("runtime.http.server")
    return config


def bind(host: str, port: int, backlog: int = 2048) -> socket.socket:
    """A listening TCP socket. Raises OSError, "address in use" among others."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
