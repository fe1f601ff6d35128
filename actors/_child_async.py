"""A process actor on an event loop: the same task actor as elsewhere, with its parent as its observer."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from typing import Any

import anyio

from . import _wire as wire
from ._child_common import leave, prepare, read_launch, set_title
from ._events import Event
from ._exit import ExitReason, Lost, Progress
from ._hub import Hub, PendingCall
from ._incarnation import Incarnation
from ._launcher import Launcher, LocalLauncher
from ._link import Link
from ._peer import Peer
from ._runner import Environment
from ._snapshot import Snapshot
from ._task import TaskActor
from ._views import nested_snapshots, refresh

BEAT_EVERY_S = 0.05
TREE_EVERY_S = 0.05
FLUSH_TIMEOUT_S = 1.0


def run(fd: int, setup: dict[str, Any]) -> None:
    set_title(setup["title"])
    sock = socket.socket(fileno=fd)
    launch, reader, early = read_launch(sock)
    target, args = prepare(sock, launch)

    async def main() -> ExitReason:
        return await ProcessMain(sock, launch, target, args, LocalLauncher()).run(reader, early)

    reason = anyio.run(main, backend=launch.backend)
    leave(reason)


class ProcessMain:
    """The actor, its hub, and the link to its parent."""

    def __init__(
        self,
        sock: socket.socket,
        launch: wire.Launch,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        launcher: Launcher,
    ) -> None:
        self._launch = launch
        self._link = Link(sock, lambda: self._peer.flush_taken())
        self._hub = Hub(launch.path)
        self._peer = Peer(self._hub, "", self._link, self._on_control)
        self._hub.uplink = self._peer
        self._hub.generations.update(launch.generations)
        self._hub.on_generation = lambda path, number: self._send(wire.Generation(path, number))
        self._hub.on_change = self._on_change
        self._hub.system["$snapshot"] = self._answer_snapshot
        self._changed = anyio.Event()
        self._beat_at = -math.inf
        self._beat_phase: str | None = None
        self._actor = TaskActor(
            launch.path,
            launch.generation,
            target,
            args,
            hub=self._hub,
            observer=self,
            environment=Environment(launcher, lambda event: self._send(wire.Reported(wire.portable_event(event)))),
            drain=launch.drain,
            mailbox=launch.mailbox,
            overflow=launch.overflow,  # type: ignore[arg-type]
        )

    async def run(self, reader: wire.FrameReader, early: list[wire.AnyFrame]) -> ExitReason:
        """The life of the actor; its bye is out when this returns."""
        self._link.continue_with(reader)
        async with anyio.create_task_group() as tasks:
            self._hub.tasks = tasks
            tasks.start_soon(self._read, early)
            tasks.start_soon(self._link.write)
            tasks.start_soon(self._push_tree)
            reason = await self._actor.run()
            tasks.cancel_scope.cancel()
        self._link.send(wire.Bye(wire.portable(reason)))
        with anyio.move_on_after(FLUSH_TIMEOUT_S):
            await self._link.flush()
        return reason

    async def _read(self, early: list[wire.AnyFrame]) -> None:
        try:
            for frame in early:
                self._peer.on_frame(frame)
            await self._link.read(self._peer.on_frame)
        except wire.ProtocolError as exc:
            self._actor.stop(anyio.current_time() + self._launch.grace_s, f"a broken control channel ({exc})")
        else:
            self._actor.stop(anyio.current_time() + self._launch.grace_s, "the death of its parent")
        self._peer.close(0, Lost("its parent is gone"))

    def _on_control(self, frame: wire.AnyFrame) -> None:
        match frame:
            case wire.Stop(by, budget_s, _):
                self._actor.stop(math.inf if budget_s is None else anyio.current_time() + budget_s, by)
            case _:
                raise wire.ProtocolError(f"unexpected {type(frame).__name__}")

    def _send(self, frame: wire.Frame) -> None:
        self._link.send(frame)

    # -- observer of the actor ---
    def progressed(self, actor: Incarnation) -> None:
        self._send(wire.Phase(actor.progress))

    def has_started(self, actor: Incarnation) -> None:
        self._send(wire.Started(wire.dump(actor.value)))

    def beat(self, actor: Incarnation) -> None:
        now = anyio.current_time()
        if actor.phase != self._beat_phase or now - self._beat_at >= BEAT_EVERY_S:
            self._beat_at, self._beat_phase = now, actor.phase
            self._send(wire.Beat(actor.phase))

    def failed_start(self, actor: Incarnation, reason: ExitReason) -> None:
        pass  # the parent keeps the time

    def reported(self, event: Event) -> None:
        self._send(wire.Reported(event))

    def stuck(self, actor: Incarnation, text: str) -> None:
        pass  # the parent kills

    # -- what is below ---
    def _snapshot(self) -> Snapshot:
        actor = self._actor
        waiting, dropped = actor.mailbox_counts()
        return Snapshot(
            path=actor.path,
            kind="process",
            state=actor.state,
            mailbox=waiting,
            dropped=dropped,
            progress=Progress(),
            children=nested_snapshots(self._hub, actor.path),
        )

    async def _answer_snapshot(self, call: PendingCall) -> None:
        await refresh(self._hub)
        call.finish(wire.Parcel(self._snapshot()))

    def _on_change(self) -> None:
        self._changed.set()

    async def _push_tree(self) -> None:
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            if self._hub.supervisors:
                self._send(wire.Tree(wire.encode_snapshots((self._snapshot(),))))
            await anyio.sleep(TREE_EVERY_S)
