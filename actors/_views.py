"""Snapshots of what runs in this process, and of what its child processes tell of themselves."""

from __future__ import annotations

import contextlib
from typing import Any

import anyio
import msgspec

from ._errors import ActorError
from ._hub import Hub
from ._incarnation import State
from ._process import ProcessActor
from ._runner import Runner, Slot
from ._snapshot import Snapshot, aged
from ._spec import SupervisorSpec

REFRESH_TIMEOUT_S = 0.5


def supervisor_snapshot(runner: Runner) -> Snapshot:
    """The supervisor and everything below it, now; child processes as they last told."""
    return Snapshot(
        path=runner.path,
        kind="supervisor",
        state=runner.state,
        generation=runner.generation,
        uptime_s=None if runner.started_at is None else anyio.current_time() - runner.started_at,
        children=tuple(_child_snapshot(runner, slot) for slot in runner.in_order()),
    )


def _child_snapshot(runner: Runner, slot: Slot) -> Snapshot:
    child = runner.core.children[slot.spec.name]
    inc = slot.incarnation
    state = State.NEW if inc is None else inc.state
    if inc is not None and child.status == "down":
        state = State.BACKOFF if child.want and runner.core.ending is None else State.ENDED
    common: dict[str, Any] = {
        "state": state,
        "restarts": child.restarts,
        "last_exit": None if child.last_exit is None else str(child.last_exit),
    }
    if isinstance(slot.spec, SupervisorSpec):
        if isinstance(inc, Runner):
            return msgspec.structs.replace(supervisor_snapshot(inc), **common)
        return Snapshot(path=slot.path, kind="supervisor", **common)
    kind = slot.spec.where
    if inc is None or child.status == "down":
        return Snapshot(path=slot.path, kind=kind, generation=slot.generation, **common)
    now = anyio.current_time()
    waiting, dropped = inc.mailbox_counts()
    if isinstance(inc, ProcessActor):
        children = tuple(aged(s, now - inc.tree_at) for top in inc.tree for s in top.children)
    else:
        children = nested_snapshots(runner.hub, slot.path)
    return Snapshot(
        path=slot.path,
        kind=kind,
        phase=inc.phase,
        progress=inc.progress,
        generation=inc.generation,
        pid=inc.pid,
        uptime_s=None if inc.started_at is None else now - inc.started_at,
        mailbox=waiting,
        dropped=dropped,
        children=children,
        **common,
    )


def nested_snapshots(hub: Hub, path: str) -> tuple[Snapshot, ...]:
    """What the actor at `path`, in this process, supervises itself."""
    found: list[Snapshot] = []
    for runner in hub.supervisors.get(path, ()):
        snapshot = supervisor_snapshot(runner)
        found += snapshot.children if runner.path == path else (snapshot,)
    return tuple(found)


async def refresh(hub: Hub) -> None:
    """Ask every process right below this one for its state now; who doesn't answer is shown as last heard."""

    async def ask(actor: ProcessActor) -> None:
        with contextlib.suppress(ActorError):
            actor.take_tree(await hub.call(actor.path, "$snapshot", None, REFRESH_TIMEOUT_S))

    async with anyio.create_task_group() as tasks:
        for runner in hub.runners.values():
            for slot in runner.slots.values():
                if isinstance(slot.incarnation, ProcessActor) and slot.up:
                    tasks.start_soon(ask, slot.incarnation)
