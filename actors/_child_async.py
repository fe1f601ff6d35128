"""A process actor on an event loop: the same task actor as elsewhere, with its parent as its observer."""

from __future__ import annotations

import math
import socket
from typing import Any

import anyio
from msgspec.structs import replace

from . import _wire as wire
from ._child_common import Body, leave, prepare
from ._exit import ExitReason, Lost, Progress
from ._hub import Hub
from ._incarnation import Environment, Incarnation
from ._launcher import Launcher, LocalLauncher
from ._link import Link
from ._notices import Event
from ._runner import serve_snapshots
from ._snapshot import Snapshot
from ._spec import ChildSpec
from ._task import TaskActor

FLUSH_TIMEOUT_S = 1.0


def run(fd: int, setup: dict[str, Any]) -> None:
    launch, body = prepare(fd, setup)

    async def main() -> ExitReason:
        return await ProcessMain(socket.socket(fileno=fd), launch, body, LocalLauncher()).run()

    leave(anyio.run(main, backend=setup["backend"]))


class ProcessMain:
    """The actor, its hub, and the link to its parent."""

    def __init__(self, sock: socket.socket, launch: wire.Launch, body: Body, launcher: Launcher) -> None:
        self._grace_s = launch.grace_s
        self._hub = Hub(launch.path, anyio.current_time)
        self._link = Link(sock, self._hub, self._on_control)
        self._hub.uplink = self._link
        self._hub.generations.update(launch.generations)
        spec = ChildSpec(
            launch.path.rpartition("/")[2],
            body,
            start_timeout=math.inf,  # its parent keeps the time
            start_timeout_max=math.inf,
            drain=launch.drain,
            mailbox=launch.mailbox,
            overflow=launch.overflow,
        )
        self.environment = Environment(self._hub, launcher, self._report)
        self._actor = TaskActor(spec, launch.path, launch.generation, self)

    async def run(self) -> ExitReason:
        """The life of the actor; its bye is out when this returns."""
        async with anyio.create_task_group() as tasks:
            serve_snapshots(self._hub, tasks, self._snapshot)
            tasks.start_soon(self._read)
            tasks.start_soon(self._link.write)
            reason = await self._actor.run()
            tasks.cancel_scope.cancel()
        self._link.send(wire.Bye(wire.portable(reason)))
        with anyio.move_on_after(FLUSH_TIMEOUT_S):
            await self._link.flush()
        return reason

    async def _read(self) -> None:
        why = "the death of its parent"
        try:
            await self._link.read()
        except wire.ProtocolError as exc:
            why = f"a broken control channel ({exc})"
        self._actor.stop(anyio.current_time() + self._grace_s, why)
        self._link.died(0, Lost("its parent is gone"))

    def _on_control(self, frame: wire.AnyFrame) -> None:
        match frame:
            case wire.Stop(by, budget_s, _):
                self._actor.stop(math.inf if budget_s is None else anyio.current_time() + budget_s, by)
            case _:
                raise wire.ProtocolError(f"unexpected {type(frame).__name__}")

    def _report(self, event: Event) -> None:
        """From a supervisor in this process."""
        self._link.send(wire.Reported(replace(event, reason=event.reason and wire.portable(event.reason))))

    # -- observer of the actor ---
    def observe(self, actor: Incarnation, event: Event) -> None:
        if event.kind == "progress":
            self._link.send(wire.Phase(actor.progress))
        elif event.kind == "started":
            self._link.send(wire.Started(wire.dump(actor.value)))

    def beat(self, actor: Incarnation) -> None:
        self._link.beat(actor.phase)

    # -- what is below ---
    def _snapshot(self) -> Snapshot:
        return replace(self._actor.snapshot(), kind="process", progress=Progress())
