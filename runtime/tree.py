"""The serving tree: which actors there are, how they are supervised, and in which order they stop.

    root                     one_for_one
    ├── metrics              task
    ├── model                task      finds, fetches and converts the model's files
    ├── replica0             one_for_all over its ranks
    │   └── scheduler0       process   the step loop
    ├── standby0             the same once more, idle, ready to take over (supervision.standby)
    ├── detokenizer          task or process
    ├── http                 one_for_one over one listening socket that the root owns
    │   └── frontend0..      task or process   Quart app, request table
    │       └── tokenizer    task
    └── client               task      the embedder's own frontend, where there is one

All start at once: who needs another asks for it by path, and waits. A frontend serves 503 from its first moment, and
says that it is started when everything behind it is up: so the tree is ready when all of it has started.
"""

import math
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import sniffio
from msgspec import structs

import actors

from .config import Config
from .detokenizer import detokenizer
from .faults import FAULTS, faults
from .fetch import model
from .frontend import Frontend, open_frontend
from .handshakes import SchedulerUp
from .mailbox import DataPlane
from .metrics import metrics
from .peers import DETOKENIZER, METRICS, MODEL, Peers, value
from .restarts import limits, rules
from .service import ModelInfo

CLIENT = "client"
HTTP = "http"
# Leaving the block cuts what runs; this is for its error events to get out.
EXIT_GRACE_S = 0.25


async def client(
    ctx: actors.Context, config: Config, peers: Peers, plane: DataPlane, give: Callable[[Frontend], None]
) -> None:
    """The frontend of an embedding program: ``give`` hands it out. Started when everything behind it is up."""
    local = not peers.detokenizer_is_process
    async with open_frontend(ctx, config, peers, plane, local=local) as front:
        give(front)
        await front.wait_ready()
        ctx.started(front.up)
        await ctx.draining.wait()
        if ctx.deadline is not None and math.isfinite(ctx.deadline):  # else the tree gave up: nothing to wait for
            await front.drain()


def final(reason: actors.ExitReason) -> bool:
    """A supervisor that gave up has tried; to start it anew would be to begin the tries anew."""
    return True


class Tree:
    """A running serving tree. Made by ``open_tree``."""

    def __init__(self, config: Config, supervisor: actors.Supervisor, fronts: tuple[str, ...], peers: Peers) -> None:
        self.config, self.supervisor = config, supervisor
        self.frontend: Frontend | None = None  # the embedder's own
        self._fronts, self._scheduler = fronts, peers.schedulers[0]
        self.configured = (*peers.frontends, *peers.engines)  # the actors that a reload concerns

    @property
    def model(self) -> ModelInfo | None:
        """What is served; None while its engine is not up."""
        up = self.supervisor.ref(self._scheduler).value
        return None if up is None else value(up, SchedulerUp).model

    async def drain(self, budget_s: float) -> None:
        """Stop the frontends: no new requests; running ones have ``budget_s`` to finish, the rest end with an error."""
        async with anyio.create_task_group() as tasks:
            for path in self._fronts:
                tasks.start_soon(self._stop, path, budget_s)

    async def _stop(self, path: str, budget_s: float) -> None:
        with suppress(actors.ActorError):  # it may have stopped already, or never have started
            await self.supervisor.ref(path).stop(budget_s)


def specs(
    config: Config,
    peers: Peers,
    plane: DataPlane,
    listener: socket.socket | None,
    give: Callable[[Frontend], None],
) -> list[actors.Spec]:
    """The children of the root. ``give`` gets the embedder's frontend, where ``peers`` name one."""
    s = config.supervision
    common: dict[str, Any] = {"depends_on": (), **rules(s)}
    below: dict[str, Any] = {**limits(s), "give_up_on": final}
    beats: dict[str, Any] = {"hang_timeout": s.hang_timeout_s or None}  # of processes: a task can't be killed
    process = peers.detokenizer_is_process
    tree: list[actors.Spec] = [
        actors.ChildSpec(METRICS, metrics, args=(config,), overflow="drop-oldest", **common),
        actors.ChildSpec(MODEL, model, args=(config,), **common),
        *[
            actors.SupervisorSpec(
                path.partition("/")[0],
                [
                    actors.ChildSpec(
                        path.partition("/")[2],
                        "runtime.rank:scheduler",
                        args=(config, peers),
                        where="process",
                        backend="main-thread",
                        title=f"runtime: {path}",
                        **{**common, **beats},
                    )
                ],
                strategy="one_for_all",
                depends_on=(),
                **below,
            )
            for path in peers.engines
        ],
        actors.ChildSpec(
            DETOKENIZER,
            "runtime.detokenizer:detokenizer" if process else detokenizer,
            args=(config, peers) if process else (config, peers, plane),
            where="process" if process else "task",
            title="runtime: detokenizer" if process else None,
            **{**common, **(beats if process else {})},
        ),
    ]
    if s.debug_faults:
        tree.append(actors.ChildSpec(FAULTS, faults, args=(config, peers), **common))
    if listener is not None:
        in_process = config.supervision.placement.frontend == "process"
        tree.append(
            actors.SupervisorSpec(
                HTTP,
                [
                    actors.ChildSpec(
                        path.rpartition("/")[2],
                        "runtime_http.frontend:frontend",
                        args=(config, peers, listener.fileno()) + (() if in_process else (plane,)),
                        where="process" if in_process else "task",
                        pass_fds=(listener.fileno(),) if in_process else (),
                        drain=True,
                        title=f"runtime: {path}" if in_process else None,
                        **{**common, **(beats if in_process else {}), "stop_timeout": None},
                    )
                    for path in peers.frontends
                    if path != CLIENT
                ],
                depends_on=(),
                **below,
            )
        )
    if CLIENT in peers.frontends:
        arguments = (config, peers, plane, give)
        tree.append(actors.ChildSpec(CLIENT, client, args=arguments, drain=True, **{**common, "stop_timeout": None}))
    return tree


@asynccontextmanager
async def open_tree(
    config: Config,
    *,
    listener: socket.socket | None = None,
    with_client: bool = False,
    wait_started: bool = True,
    on_event: Callable[[actors.Event], None] | None = None,
) -> AsyncIterator[Tree]:
    """Run the serving tree in this nursery. ``listener``: serve HTTP on it (bound, listening; stays the caller's).

    Raises ``actors.ActorStartError`` where something does not start; nothing is left then. Leaving the block, also by
    cancellation, stops everything.
    """
    if listener is not None and sniffio.current_async_library() != "trio":
        # The front needs trio; on another loop it is a process with a loop of its own.
        placement = structs.replace(config.supervision.placement, frontend="process")
        config = structs.replace(config, supervision=structs.replace(config.supervision, placement=placement))
    names = [f"{HTTP}/frontend{i}" for i in range(config.http.frontends)] if listener is not None else []
    peers = Peers(
        standbys=tuple(f"standby{i}/scheduler0" for i in range(config.supervision.standby)),
        frontends=(*names, *([CLIENT] if with_client else [])),
        detokenizer_is_process=config.supervision.placement.detokenizer == "process",
    )
    plane = DataPlane()
    tree: Tree

    def give(front: Frontend) -> None:
        tree.frontend = front

    children = specs(config, peers, plane, listener, give)
    fronts = tuple(name for name in (HTTP, CLIENT) if name in {child.name for child in children})
    s = config.supervision
    try:
        async with actors.open_supervisor(
            children,
            name="root",
            **limits(s),
            wait_started=False,
            on_event=on_event,
        ) as supervisor:
            tree = Tree(config, supervisor, fronts, peers)
            try:
                if wait_started:
                    await supervisor.wait_started()
                yield tree
            finally:
                with anyio.CancelScope(shield=True):
                    await tree.drain(EXIT_GRACE_S)
    finally:
        plane.close()


if sys.platform != "linux":  # pragma: no cover
    raise ImportError("runtime needs Linux: pidfds and abstract sockets carry its supervision")
