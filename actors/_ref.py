"""A handle on one incarnation of an actor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from ._calls import call, cast
from ._context import Watch
from ._door import STACKS
from ._errors import ActorError, CallTimeout, NoSuchActor
from ._hub import Hub
from ._notices import Down
from ._process import ProcessActor

STACKS_TIMEOUT_S = 1.0

if TYPE_CHECKING:
    from ._runner import Runner, Slot


class Ref:
    """Calls and casts go to the incarnation that the ref was made for, never to a successor: they raise ActorDied.

    A ref with generation 0 (a path whose actor isn't supervised in this process) follows the path instead.
    """

    def __init__(self, hub: Hub, path: str, generation: int, value: Any, pid: int | None) -> None:
        self._hub = hub
        self.path = path
        self.generation = generation
        self.value = value
        self.pid = pid

    def __repr__(self) -> str:
        return f"<Ref {self.path!r}, generation {self.generation}>"

    async def call(self, method: str, payload: Any = None, timeout: float | None = None) -> Any:
        """The result of the actor's handler. Cancelling this cancels the handler, in whatever process it runs.

        Raises ActorDied (also when it dies meanwhile), RemoteError (the handler raised), CallTimeout, NoSuchActor.
        """
        hub = self._hub
        return await call(hub, self.path, method, payload, timeout, caller=hub.base, generation=self.generation)

    async def cast(self, payload: Any) -> None:
        """Put `payload` into the mailbox; what happens when it is full is the spec's `overflow`. A cancelled cast that
        waits for room sends nothing. Raises ActorDied, MailboxFull, NoSuchActor."""
        await cast(self._hub, self.path, payload, generation=self.generation)

    def cast_nowait(self, payload: Any) -> bool:
        """The same without waiting; False when there is no room, or no such actor any more."""
        return self._hub.cast_nowait(self.path, payload, generation=self.generation)

    async def down(self) -> Down:
        """Wait for the end of this incarnation; at once if it has ended. Cancellation has no effect on the actor."""
        if self.generation and (reason := self._hub.end_of(self.path, self.generation)) is not None:
            await anyio.lowlevel.checkpoint()
            return Down(self.path, self.generation, reason)
        async for notice in Watch(self._hub, self.path):
            if isinstance(notice, Down) and notice.generation >= self.generation:
                return notice
        raise AssertionError("a watch has no end")

    async def stacks(self) -> str:
        """Where the actor is: its tasks, as its loop tells; all its threads, if the loop does not answer."""
        try:
            text = await call(self._hub, self.path, STACKS, None, STACKS_TIMEOUT_S, generation=self.generation)
            return str(text)
        except CallTimeout:
            _, slot = self._owner()
            actor = None if slot is None else slot.incarnation
            return await actor.thread_stacks() if isinstance(actor, ProcessActor) else "its loop does not answer"

    async def stop(self, timeout: float | None = None) -> None:
        """Stop the actor and forget its spec; returns when it is gone. Cancelled, the stop goes on."""
        runner, slot = self._owner()
        if slot is not None and slot.generation == self.generation:
            deadline = math.inf if timeout is None else anyio.current_time() + timeout
            await runner.stop_slot(slot, deadline, "request")

    async def restart(self) -> Ref:
        """Stop the actor and start it again, uncounted; returns the ref of the new incarnation when it has started."""
        runner, slot = self._owner()
        if slot is None:
            raise NoSuchActor(self.path)
        await runner.restart_slot(slot)
        return ref_to(slot, self._hub)

    def _owner(self) -> tuple[Runner, Slot | None]:
        parent, _, name = self.path.rpartition("/")
        runner = self._hub.runners.get(parent)
        if runner is None:
            raise ActorError(f"actor {self.path!r} is not supervised in this process")
        return runner, runner.slots.get(name)


def ref_to(slot: Slot, hub: Hub) -> Ref:
    """A ref to the present incarnation of a child."""
    actor = slot.incarnation
    if actor is None:
        return Ref(hub, slot.path, 0, None, None)
    return Ref(hub, slot.path, actor.generation, actor.value, actor.pid)
