"""The HTTP frontend as an actor: the app, the request table and the tokenizer behind one listening socket."""

import math
import os
import socket
from functools import partial

import trio

import actors
from runtime.config import Config
from runtime.frontend import open_frontend
from runtime.log import configure, set_level
from runtime.mailbox import DataPlane
from runtime.peers import Peers
from runtime_http.app import create_app, front_of
from runtime_http.front import Front
from runtime_http.options import Options
from runtime_http.serve import LAST_WORDS_S, serve


def reload(front: Front, own_process: bool, config: Config) -> None:
    """Requests from now on are judged by ``config``."""
    front.options = Options.of(config)
    if own_process:
        set_level(config.log)


async def frontend(
    ctx: actors.Context, config: Config, peers: Peers, listener_fd: int, plane: DataPlane | None = None
) -> None:
    """The actor, as a task (``plane``: its process's) or as a process of its own.

    ``listener_fd``: a listening socket, inherited or the process's own; it is duplicated. Serves from the first moment
    (503 until all is up); started when everything behind it is up. Drains when told, within the deadline it is given.
    """
    if plane is None:
        configure(config.log)
    local = plane is not None and not peers.detokenizer_is_process
    data_plane = plane or DataPlane()
    listener = socket.socket(fileno=os.dup(listener_fd))

    async def drained() -> float:
        """Until the server is to close; connections are taken till then, so that clients and /ready hear a 503."""
        await ctx.draining.wait()
        # Without a deadline it is nobody's wish, but the end of a tree that gave up: there is nothing to wait for.
        deadline = ctx.deadline if ctx.deadline is not None and math.isfinite(ctx.deadline) else 0.0
        with trio.move_on_at(deadline - 3 * LAST_WORDS_S):
            await front.drain()
            return LAST_WORDS_S  # for the last chunks to get out
        return 0.0

    with listener:
        async with open_frontend(ctx, config, peers, data_plane, local=local) as front, trio.open_nursery() as nursery:

            async def say_started() -> None:
                await front.wait_ready()
                ctx.started(front.up)

            app = create_app(front)
            front.on_reload = partial(reload, front_of(app), plane is None)
            nursery.start_soon(say_started)
            await serve(front, [listener], app=app, shutdown_trigger=drained)
            nursery.cancel_scope.cancel()
    if plane is None:
        data_plane.close()
