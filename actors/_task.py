"""An actor that is a task. Inside a process actor, the same class runs."""

from __future__ import annotations

import math
import os
from typing import Any

import anyio
from anyio.abc import TaskGroup

from ._context import CallInfo, Context, Handler
from ._door import Door, Mailbox, Message
from ._errors import ActorError
from ._exit import ExitReason, Lost, StartTimeout, Stopped, capture, verdict_on
from ._incarnation import Actor, Observer, State
from ._snapshot import Snapshot
from ._spec import ChildSpec
from ._stacks import task_stacks
from ._target import import_target
from ._wire import CallError, Parcel

STUCK_GRACE_S = 1.0  # after its deadline, a task that has not ended yet is reported
CANCEL_SHARE_S = 1.0  # of a stop's budget, what is kept for the cancel stage after a drain


class TaskActor(Actor):
    """`target(ctx, *args)` in a cancel scope of its own, with a clock for its start and its stop."""

    def __init__(self, spec: ChildSpec, path: str, generation: int, observer: Observer) -> None:
        super().__init__(spec, path, generation, observer)
        self.pid = os.getpid()
        self.context = Context(self)
        self.mailbox = Mailbox(spec.mailbox, spec.overflow, self.context.on_mail)
        self.door = Door(path, generation, self.hub, self.mailbox, self._start_answer)
        self.cancel_at = math.inf  # once it is stopped
        self._serving: set[Message] = set()
        self._tasks: TaskGroup | None = None
        self._timed_out: StartTimeout | None = None
        self._returned = False
        self._task_id = 0

    # -- life ---
    async def run(self) -> ExitReason:
        if self.stopped_by is not None:
            return Stopped(self.stopped_by)
        self._begin(State.STARTING)
        self.hub.doors[self.path] = self.door
        reason: ExitReason = Lost("its task was cancelled from outside")
        try:
            async with anyio.create_task_group() as clock:
                clock.start_soon(self._run_clock)
                reason = await self._run_target()
                clock.cancel_scope.cancel()
        finally:
            self.state = State.ENDED
            self.hub.remove(self.path, self.generation, reason)
            died = CallError("died", self.path, self.generation, reason)
            self.door.close(died)
            for call in self._serving:
                call.finish(None, died)
        return reason

    async def _run_target(self) -> ExitReason:
        self._task_id = anyio.get_current_task().id
        value: Any = None
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self.door.is_open = True
                value = await self._call_target(tasks.cancel_scope)
                tasks.cancel_scope.cancel()
        except Exception as exc:  # a group of cancellations and errors, less the cancellations
            self.exception = exc
        if self._timed_out is not None:
            return self._timed_out
        if self.stopped_by is not None:
            if self.exception is not None:
                return Stopped(self.stopped_by, "raised", f"{type(self.exception).__name__}: {self.exception}")
            return Stopped(self.stopped_by, "returned" if self._returned else "cancelled")
        return verdict_on(self.exception, value, self.started_at is not None)

    async def _call_target(self, scope: anyio.CancelScope) -> Any:
        try:
            target = self._spec.target
            function = import_target(target) if isinstance(target, str) else target
            value = await function(self.context, *self._spec.args)
            self._returned = True
            return value
        except (Exception, SystemExit) as exc:
            self.exception = exc
        except KeyboardInterrupt as exc:  # the terminal's, and so the whole tree's
            self.exception = exc
            self.environment.interrupt(exc)
        except BaseException as exc:
            cancelled = scope.cancel_called or anyio.current_effective_deadline() == -math.inf
            if cancelled or not type(exc).__module__.startswith("asyncio"):
                raise
            self.exception = exc  # asyncio only: someone cancelled the task itself, or the target raised it
        finally:
            self._tasks = None
            self.door.is_open = False  # calls that come now hear of the end

    async def _run_clock(self) -> None:
        await self._reach(self._patience_ends)
        if self.stopped_by is None:
            self._timed_out = self._start_failed()
            self._cancel()
        await self._reach(lambda: self.cancel_at)
        self._cancel()
        await self._reach(lambda: self.stop_deadline + STUCK_GRACE_S)
        self._tell("stuck", text="a task can't be killed; it hangs here:\n" + self.stacks())

    def _patience_ends(self) -> float:
        if self.stopped_by is not None:
            return -math.inf
        return math.inf if self.started_at is not None else self._start_deadline

    def _cancel(self) -> None:
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel(f"stopped by {self.stopped_by}" if self.stopped_by else "start timeout")

    def stop(self, deadline: float, by: str) -> None:
        if not self._heed(deadline, by):
            return
        self.cancel_at = now = anyio.current_time()
        if self._spec.drain and self.started_at is not None and self.state is not State.STOPPING:
            budget = deadline - now
            self.cancel_at = deadline if math.isinf(budget) else deadline - min(CANCEL_SHARE_S, budget / 5)
            self.context.draining.set()
        self.state = State.DRAINING if self.cancel_at > now else State.STOPPING
        if self.state is State.STOPPING:
            self._cancel()
        for runner in self._opened():
            if runner.core.ending is not None:
                runner.stop(deadline, by)

    # -- looking ---
    def _opened(self) -> list[Any]:
        """The supervisors that it has opened for itself."""
        return [runner for runner in self.hub.runners.values() if runner.opened_by is self]

    def inner(self) -> tuple[Snapshot, ...]:
        found: list[Snapshot] = []
        for runner in self._opened():
            found += runner.inner() if runner.path == self.path else (runner.snapshot(),)
        return tuple(found)

    def mailbox_counts(self) -> tuple[int, int]:
        return len(self.mailbox), self.mailbox.dropped

    def stacks(self) -> str:
        """Where the tasks of this actor are."""
        return task_stacks(self._task_id)

    # -- what the context passes on ---
    def on_started(self, value: Any) -> None:
        if self.started_at is not None:
            raise ActorError(f"actor {self.path!r} has called started() before")
        super().on_started(value)
        self.door.started = True
        self._tell("started")
        self.door.accept_early()

    def on_beat(self, phase: str) -> None:
        self.phase = phase
        assert self._observer is not None
        self._observer.beat(self)

    # -- calls ---
    def _start_answer(self, call: Message, handler: Handler | None) -> None:
        if handler is None:
            call.finish(Parcel(self.stacks()))
            return
        assert self._tasks is not None
        self._serving.add(call)
        self._tasks.start_soon(self._answer, call, handler)

    async def _answer(self, call: Message, handler: Handler) -> None:
        info = CallInfo(call.method, call.caller, call.deadline)
        error: CallError | None = None
        result: Parcel | None = None
        with anyio.CancelScope(deadline=math.inf if call.deadline is None else call.deadline) as scope:
            call.cancel_hook = scope.cancel
            try:
                result = Parcel(await handler(call.payload.load(), info))
            except Exception as exc:
                error = CallError("raised", self.path, error=capture(exc))
        if scope.cancelled_caught:
            error = CallError("cancelled", self.path)
        self._serving.discard(call)
        call.finish(result, error)
