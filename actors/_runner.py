"""The runner of one supervisor: carries out what the core decides, and tells the core what happened."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup
from msgspec.structs import replace

from . import _core
from ._calls import call
from ._core import Core
from ._door import SNAPSHOT, Message
from ._errors import ActorClosed, ActorError, ActorStartError, RestartLimitExceeded
from ._exit import ExitReason, Lost, Raised, Returned, Stopped, capture, is_abnormal
from ._hub import Hub, News
from ._incarnation import Environment, Incarnation, Observer, State
from ._notices import Event
from ._process import ProcessActor
from ._snapshot import Snapshot
from ._spec import Spec, SupervisorSpec
from ._task import TaskActor
from ._wire import Parcel

REFRESH_TIMEOUT_S = 0.5


class Slot:
    """A child: its spec, its present incarnation, and those who wait for news of it."""

    def __init__(self, spec: Spec, path: str) -> None:
        self.spec = spec
        self.path = path
        self.incarnation: Incarnation | None = None
        self.last_up = 0  # the last generation that has started
        self.gone = False
        self.error: Exception | None = None
        self.changed = anyio.Event()

    @property
    def generation(self) -> int:
        return 0 if self.incarnation is None else self.incarnation.generation

    def notify(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()


class Runner(Incarnation):
    """An incarnation like any actor: `run` is the supervisor's life, `stop` asks for its end."""

    kind = "supervisor"

    def __init__(
        self,
        spec: SupervisorSpec,
        path: str,
        generation: int,
        environment: Environment,
        observer: Observer | None,
        opened_by: TaskActor | None = None,
    ) -> None:
        super().__init__(path, generation, environment, observer)
        self.opened_by = opened_by
        self.slots: dict[str, Slot] = {}
        self.started = anyio.Event()  # all up, or ended before
        self.ended = anyio.Event()
        self.finished: _core.Finished | None = None
        self.reason: ExitReason = Lost("it was torn down")  # once it has ended
        self.core = Core(spec, environment.draw)
        self._tasks: TaskGroup | None = None
        self._timer_wake = anyio.Event()
        self._done = anyio.Event()

    # -- life ---
    async def run(self) -> ExitReason:
        try:
            if self.stopped_by is not None:
                self.finished = _core.Finished("stop", self.stopped_by)
            else:
                await self._live()
            assert self.finished is not None
            self.reason = self._verdict(self.finished)
        finally:  # also when it crashes, as when `on_event` raises: whoever waits must not wait for ever
            self.state = State.ENDED
            self.hub.runners.pop(self.path, None)
            self.started.set()
            self.ended.set()
        self.environment.tell(Event("supervisor_ended", self.path, reason=self.reason))
        return self.reason

    async def _live(self) -> None:
        self.state = State.STARTING
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self.hub.runners[self.path] = self
                for child in self.core.spec.children:
                    self._new_slot(child)
                tasks.start_soon(self._run_timers)
                self._carry_out(self.core.begin(anyio.current_time()))
                await self._done.wait()
                tasks.cancel_scope.cancel()

    def _verdict(self, finished: _core.Finished) -> ExitReason:
        if finished.cause == "stop":
            return Stopped(finished.by)
        if finished.cause == "auto_shutdown":
            return Returned()
        if finished.cause == "start_failed":
            self.exception = self.slots[finished.name].error
        else:
            why = f"{finished.name!r} died of a cause that is not to be retried"
            if finished.cause == "limit":
                why = f"more than {self.core.spec.intensity} deaths within {self.core.spec.period:g} s"
            causes = tuple((self._child_path(name), reason) for name, reason in finished.deaths)
            self.exception = RestartLimitExceeded(self.path, causes, why)
        assert self.exception is not None
        return Raised(capture(self.exception))

    def stop(self, deadline: float, by: str) -> None:
        if self._tasks is None:
            self.stopped_by = by
            return
        if self.finished is None:
            self.state = State.STOPPING
            self._carry_out(self.core.stop(anyio.current_time(), deadline, by))

    async def _run_timers(self) -> None:
        while True:
            self._timer_wake = anyio.Event()
            with anyio.move_on_at(self.core.next_timer()):
                await self._timer_wake.wait()
                continue
            self._carry_out(self.core.advance(anyio.current_time()))

    # -- the core's actions ---
    def add(self, spec: Spec) -> Slot:
        """One more child. Raises SpecError, or ActorClosed if the supervisor is stopping."""
        if self._tasks is None or self.core.ending is not None:
            raise ActorClosed(f"supervisor {self.path or 'root'!r} is stopping; it starts nothing more")
        actions = self.core.add(spec, anyio.current_time())
        slot = self._new_slot(spec)
        self._carry_out(actions)
        return slot

    async def stop_slot(self, slot: Slot, deadline: float, by: str) -> None:
        """Stop a child for good and wait until it is gone. Cancelled, the stop goes on."""
        if not slot.gone and self.finished is None:
            self._carry_out(self.core.stop_child(slot.spec.name, anyio.current_time(), deadline, by))
        while not slot.gone:
            await slot.changed.wait()

    async def restart_slot(self, slot: Slot) -> None:
        """Stop a child, start it anew, and wait until it is up. Raises its start error or ActorClosed."""
        before = slot.generation
        if not slot.gone and self.finished is None:
            actions = self.core.restart_child(slot.spec.name, anyio.current_time(), "request, to restart it")
            self._carry_out(actions)
        await self.wait_up(slot, before)

    async def wait_up(self, slot: Slot, after: int) -> None:
        """Wait until a later generation than this one has started. Raises its start error or ActorClosed."""
        while slot.last_up <= after:
            if slot.gone or self.core.is_down_for_good(slot.spec.name):
                raise slot.error or ActorClosed(f"actor {slot.path!r} has ended and is not started again")
            await slot.changed.wait()

    def _carry_out(self, actions: list[_core.Action]) -> None:
        for action in actions:
            match action:
                case _core.Start(name):
                    self._start(name)
                case _core.Stop(name, deadline, by):
                    actor = self.slots[name].incarnation
                    assert actor is not None
                    self.environment.tell(actor.event("stopping"))
                    actor.stop(deadline, by)
                case _core.Decided():
                    self._decided(action)
                case _core.Removed(name):
                    slot = self.slots.pop(name)
                    slot.gone = True
                    slot.notify()
                    self.hub.forget(slot.path)
                case _core.AllStarted():
                    self.started_at = anyio.current_time()
                    self.state = State.RUNNING
                    self.started.set()
                    self._tell("started")
                case _core.Finished():
                    self.finished = action
                    for slot in self.slots.values():
                        slot.gone = True
                        slot.notify()
                    self._done.set()
        if self.core.ending is not None and self.state in (State.STARTING, State.RUNNING):
            self.state = State.STOPPING
        self._timer_wake.set()

    def _child_path(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name

    def _new_slot(self, spec: Spec) -> Slot:
        slot = self.slots[spec.name] = Slot(spec, self._child_path(spec.name))
        return slot

    def _start(self, name: str) -> None:
        slot = self.slots[name]
        slot.incarnation = self._make(slot, self.hub.next_generation(slot.path))
        self.environment.tell(slot.incarnation.event("starting"))
        assert self._tasks is not None
        self._tasks.start_soon(self._run_child, slot, slot.incarnation, name=slot.path)

    def _make(self, slot: Slot, generation: int) -> Incarnation:
        spec = slot.spec
        if isinstance(spec, SupervisorSpec):
            return Runner(spec, slot.path, generation, self.environment, self)
        kind = ProcessActor if spec.where == "process" else TaskActor
        return kind(spec, slot.path, generation, self)

    async def _run_child(self, slot: Slot, incarnation: Incarnation) -> None:
        reason = await incarnation.run()
        if slot.last_up == slot.generation:
            self.hub.publish(News(slot.path, slot.generation, Parcel(), reason))
        if incarnation.started_at is None and self.core.children[slot.spec.name].status != "stopping":
            slot.error = start_error(incarnation, reason)
        self._carry_out(self.core.child_exited(slot.spec.name, reason, anyio.current_time()))
        slot.notify()

    def _decided(self, decided: _core.Decided) -> None:
        actor = self.slots[decided.name].incarnation
        assert actor is not None
        self.environment.tell(
            actor.event(
                "exited",
                reason=decided.reason,
                next=decided.next,
                delay_s=decided.delay_s,
                count=decided.count,
                intensity=self.core.spec.intensity,
                uptime_s=None if actor.started_at is None else anyio.current_time() - actor.started_at,
                text="\n".join(actor.stderr_tail) if is_abnormal(decided.reason) else "",
            )
        )

    # -- the children's words ---
    def observe(self, actor: Incarnation, event: Event) -> None:
        slot = self.slots[actor.path.rpartition("/")[2]]
        started = event.kind == "started"
        if started:
            slot.last_up = actor.generation
            self.hub.publish(News(actor.path, actor.generation, Parcel(actor.value)))
        self.environment.tell(event)
        if started:
            self._carry_out(self.core.child_started(slot.spec.name, anyio.current_time()))
            slot.notify()

    def beat(self, actor: Incarnation) -> None:
        """Only processes are watched for silence."""

    # -- looking ---
    def inner(self) -> tuple[Snapshot, ...]:
        return tuple(self._child_snapshot(self.slots[name], child) for name, child in self.core.children.items())

    def _child_snapshot(self, slot: Slot, child: _core.Child) -> Snapshot:
        last_exit = None if child.last_exit is None else str(child.last_exit)
        actor = slot.incarnation
        if actor is not None and child.status != "down":
            return replace(actor.snapshot(), restarts=child.restarts, last_exit=last_exit)
        state = State.BACKOFF if child.want and self.core.ending is None else State.ENDED
        return Snapshot(
            path=slot.path,
            kind="supervisor" if isinstance(slot.spec, SupervisorSpec) else slot.spec.where,
            state=State.NEW if actor is None else state,
            generation=slot.generation,
            restarts=child.restarts,
            last_exit=last_exit,
        )


def start_error(incarnation: Incarnation, reason: ExitReason) -> Exception:
    """The innermost failed start is the one to report; a nested supervisor's is its child's."""
    if isinstance(incarnation.exception, ActorStartError | RestartLimitExceeded):
        return incarnation.exception
    error = ActorStartError(incarnation.path, reason, incarnation.phase, incarnation.progress, incarnation.stderr_tail)
    error.__cause__ = incarnation.exception
    return error


async def refresh(hub: Hub, timeout: float = REFRESH_TIMEOUT_S) -> None:
    """Ask every process right below this one for its state now; who doesn't answer is shown as last heard."""

    async def ask(actor: ProcessActor) -> None:
        with contextlib.suppress(ActorError):
            actor.inside = await call(hub, actor.path, SNAPSHOT, None, timeout)

    async with anyio.create_task_group() as tasks:
        for runner in hub.runners.values():
            for slot in runner.slots.values():
                actor = slot.incarnation
                if isinstance(actor, ProcessActor) and actor.reached_target and actor.state is not State.ENDED:
                    tasks.start_soon(ask, actor)


def serve_snapshots(hub: Hub, tasks: TaskGroup, snapshot: Callable[[], Snapshot]) -> None:
    """Answer whoever asks for the state of this process."""

    async def answer(message: Message) -> None:
        left = math.inf if message.deadline is None else message.deadline - hub.now()
        await refresh(hub, min(REFRESH_TIMEOUT_S, 0.8 * left))  # an answer without those that hang beats none
        message.finish(Parcel(snapshot()))

    hub.on_snapshot = lambda message: tasks.start_soon(answer, message)
