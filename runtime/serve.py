"""``runtime serve``: the root process. It binds the socket, runs the tree, minds the signals, and says how it went."""

import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TypeVar

import anyio
import trio

import actors

from .config import Config
from .console import Console, failure_block
from .listen import bind
from .log import configure
from .reload import Reloader
from .tree import Tree, open_tree

E = TypeVar("E", bound=BaseException)


class _Ended(Exception):
    """The server is to end with this exit code."""

    def __init__(self, code: int) -> None:
        self.code = code


def main(config: Config, reread: Callable[[], Config]) -> int:
    """Serve until a signal or a failure ends it. Returns the process's exit code.

    ``reread`` gives the configuration anew, for SIGHUP; raises ConfigError.
    """
    began = time.monotonic()
    configure(config.log)
    try:
        listener = bind(config.http.host, config.http.port)
    except OSError as error:
        print(f"runtime: {error.strerror or error}", file=sys.stderr)
        return 1
    console = Console(config, began)
    try:
        return trio.run(partial(_serve, config, reread, listener, console))
    finally:
        listener.close()
        console.close()


async def _serve(config: Config, reread: Callable[[], Config], listener: socket.socket, console: Console) -> int:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        try:
            async with (
                open_tree(config, listener=listener, wait_started=False, on_event=console.event) as tree,
                anyio.create_task_group() as tasks,
            ):
                reloader = Reloader(config, reread, tree.supervisor)
                for path in tree.configured:
                    tasks.start_soon(reloader.follow, path)
                tasks.start_soon(_mind_signals, signals, tree, reloader, console)
                await tree.supervisor.wait_started()
                url = "http://{}:{}".format(*listener.getsockname()[:2])
                console.ready(url, await tree.supervisor.refresh(), tree.model)
                await tree.supervisor.wait()
        except BaseException as error:
            return _verdict(error, console)
    return 0


async def _mind_signals(signals: AsyncIterator[int], tree: Tree, reloader: Reloader, console: Console) -> None:
    """The first signal drains, the second ends at once; SIGHUP reads the configuration again."""
    while (first := await anext(signals)) == signal.SIGHUP:
        reloader.reload()
    supervision = reloader.config.supervision
    console.stopping(signal.Signals(first).name)
    second = 0
    async with anyio.create_task_group() as patience:

        async def hurry() -> None:
            nonlocal second
            while (second := await anext(signals)) == signal.SIGHUP:
                pass
            console.stopping(signal.Signals(second).name)
            patience.cancel_scope.cancel()

        patience.start_soon(hurry)
        await tree.drain(supervision.drain_timeout_s)
        patience.cancel_scope.cancel()
    with anyio.CancelScope(shield=True):
        await tree.supervisor.stop(0.0 if second else supervision.stop_timeout_s)
    raise _Ended(128 + second if second else 0)


def _verdict(error: BaseException, console: Console) -> int:
    ended = _find(error, _Ended)
    if ended is not None:
        return ended.code
    fault = _find(error, actors.ActorStartError) or _find(error, actors.RestartLimitExceeded)
    if fault is None:
        raise error
    console.close()
    print(failure_block(fault), file=sys.stderr, flush=True)
    return 1


def _find(error: BaseException, kind: type[E]) -> E | None:
    if isinstance(error, kind):
        return error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            if (found := _find(inner, kind)) is not None:
                return found
    return None
