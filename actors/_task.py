"""An actor that is a task: its mailbox, its call handlers, its stop. Inside a process actor, the same class runs."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from anyio.abc import TaskGroup

from ._context import CallInfo, Context, Handler
from ._errors import ActorDied, ActorError, MailboxFull
from ._exit import Exited, ExitReason, Lost, Progress, Raised, RemoteErrorData, Returned, StartTimeout, Stopped
from ._hub import Hub, PendingCall, to_call_error
from ._incarnation import Observer, State
from ._mailbox import Mailbox, OnTaken, Parked
from ._remote import capture
from ._spec import Overflow
from ._stacks import task_stacks
from ._wire import CallError, Parcel

STUCK_GRACE_S = 1.0  # after its deadline, a task that has not ended yet is reported
CANCEL_SHARE_S = 1.0  # of a stop's budget, what is kept for the cancel stage after a drain


class TaskActor:
    """`target(ctx, *args)` in a cancel scope of its own, with a clock for its start and its stop."""

    is_prefix = False

    def __init__(
        self,
        path: str,
        generation: int,
        target: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        *,
        hub: Hub,
        observer: Observer,
        environment: Any,
        start_timeout: float = math.inf,
        start_timeout_max: float = math.inf,
        drain: bool = False,
        mailbox: int = 1024,
        overflow: Overflow = "wait",
    ) -> None:
        self.path = path
        self.generation = generation
        self.hub = hub
        self.environment = environment
        self.pid: int | None = os.getpid()
        self.state = State.NEW
        self.phase = ""
        self.progress = Progress()
        self.value: Any = None
        self.started_at: float | None = None
        self.exception: BaseException | None = None
        self.stderr_tail: tuple[str, ...] = ()
        self.mailbox = Mailbox(mailbox, overflow)
        self.cancel_at: float | None = None
        self.context = Context(self)
        self._target = target
        self._args = args
        self._observer = observer
        self._start_timeout = start_timeout
        self._start_timeout_max = start_timeout_max
        self._drain = drain
        self._handlers: dict[str, Handler] = {}
        self._early: deque[PendingCall] = deque()  # calls of methods not yet set, while the actor starts
        self._open: set[PendingCall] = set()
        self._tasks: TaskGroup | None = None
        self._begun_at = 0.0
        self._deadline = math.inf
        self._start_deadline = math.inf
        self._stopped_by: str | None = None
        self._timed_out: StartTimeout | None = None
        self._how = "cancelled"
        self._task_id = 0
        self._clock_wake = anyio.Event()

    # -- life ---
    async def run(self) -> ExitReason:
        if self._stopped_by is not None:
            return Stopped(self._stopped_by)
        self.state = State.STARTING
        self._begun_at = anyio.current_time()
        self._extend_start()
        self.hub.register(self)
        reason: ExitReason = Lost("its task was cancelled from outside")
        try:
            async with anyio.create_task_group() as clock:
                clock.start_soon(self._run_clock)
                reason = await self._run_target()
                clock.cancel_scope.cancel()
        finally:
            self.state = State.ENDED
            self.hub.unregister(self, self.generation, reason)
            died = ActorDied(self.path, self.generation, reason)
            self.mailbox.fail_parked(died)
            for call in (*self._early, *self._open):
                call.finish(None, to_call_error(died))
        return reason

    async def _run_target(self) -> ExitReason:
        self._task_id = anyio.get_current_task().id
        value: Any = None
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                value = await self._call_target(tasks.cancel_scope)
                tasks.cancel_scope.cancel()
        except Exception as exc:  # a group of cancellations and errors, less the cancellations
            self._raised(exc)
        if self._timed_out is not None:
            return self._timed_out
        if self._stopped_by is not None:
            detail = "" if self.exception is None else f"{type(self.exception).__name__}: {self.exception}"
            return Stopped(self._stopped_by, self._how, detail)
        if self.exception is None:
            return self._returned(value)
        if isinstance(self.exception, SystemExit):
            code = self.exception.code
            return self._returned(None) if code in (None, 0) else Exited(code if isinstance(code, int) else 1)
        return Raised(capture(self.exception))

    async def _call_target(self, scope: anyio.CancelScope) -> Any:
        try:
            value = await self._target(self.context, *self._args)
            self._how = "returned"
            return value
        except (Exception, SystemExit) as exc:
            self._raised(exc)
        except KeyboardInterrupt as exc:  # the terminal's, and so the whole tree's
            self._raised(exc)
            self.environment.interrupt(exc)
        except BaseException as exc:
            cancelled = scope.cancel_called or anyio.current_effective_deadline() == -math.inf
            if cancelled or not type(exc).__module__.startswith("asyncio"):
                raise
            self._raised(exc)  # asyncio only: someone cancelled the task itself, or the target raised it
        finally:
            self._tasks = None  # it takes no more: calls that come now hear of the end

    def _raised(self, exc: BaseException) -> None:
        self.exception = exc
        self._how = "raised"

    def _returned(self, value: Any) -> ExitReason:
        if self.started_at is None:
            return Raised(RemoteErrorData("actors.NotStarted", "the target returned before it had called started()"))
        return Returned(value)

    async def _run_clock(self) -> None:
        reported = False
        while True:
            now = anyio.current_time()
            if self._stopped_by is not None:
                assert self.cancel_at is not None
                if now >= self.cancel_at:
                    self._cancel()
                stuck_at = self._deadline + STUCK_GRACE_S
                if now >= stuck_at and not reported:
                    reported = True
                    self._observer.stuck(self, "a task can't be killed; it hangs here:\n" + self.stacks())
                until = self.cancel_at if now < self.cancel_at else math.inf if reported else stuck_at
            elif self.started_at is None and now >= self._start_deadline:
                limit = self._start_deadline - self._begun_at
                self._timed_out = StartTimeout(self.phase, self.progress, round(limit, 3))
                self._observer.failed_start(self, self._timed_out)
                self._cancel()
                until = math.inf
            else:
                until = self._start_deadline if self.started_at is None else math.inf
            self._clock_wake = anyio.Event()
            with anyio.move_on_at(until):
                await self._clock_wake.wait()

    def _cancel(self) -> None:
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel(f"stopped by {self._stopped_by}" if self._stopped_by else "start timeout")

    def stop(self, deadline: float, by: str) -> None:
        now = anyio.current_time()
        first = self._stopped_by is None
        if not first and deadline >= self._deadline:
            return
        self._deadline = deadline
        self._stopped_by = self._stopped_by or by
        if self._drain and self.started_at is not None and self.state is not State.STOPPING:
            budget = deadline - now
            self.cancel_at = deadline if math.isinf(budget) else deadline - min(CANCEL_SHARE_S, budget / 5)
            self.state = State.DRAINING
            self.context.draining.set()
        else:
            self.cancel_at = now
            self.state = State.STOPPING
        if self.cancel_at <= now:
            self.state = State.STOPPING
            self._cancel()
        self._clock_wake.set()
        for runner in self.hub.supervisors.get(self.path, ()):
            if runner.core.ending is not None:
                runner.stop(deadline, by)
        self.hub.changed()

    def stop_deadline(self) -> float:
        """When the stop of this actor must be over; inf while nobody stops it."""
        return self._deadline

    def mailbox_counts(self) -> tuple[int, int]:
        return len(self.mailbox), self.mailbox.dropped + self.hub.lost_casts.get(self.path, 0)

    def stacks(self) -> str:
        """Where the tasks of this actor are."""
        return task_stacks(self._task_id)

    # -- what the context passes on ---
    def _extend_start(self) -> None:
        now = anyio.current_time()
        self._start_deadline = min(now + self._start_timeout, self._begun_at + self._start_timeout_max)

    def on_progress(self, progress: Progress) -> None:
        self.progress = progress
        self.phase = progress.phase
        if self.started_at is None:
            self._extend_start()
        self._observer.progressed(self)

    def on_started(self, value: Any) -> None:
        if self.started_at is not None:
            raise ActorError(f"actor {self.path!r} has called started() before")
        self.value = value
        self.started_at = anyio.current_time()
        self.phase = ""
        if self.state is State.STARTING:
            self.state = State.RUNNING
        self._clock_wake.set()
        self._observer.has_started(self)
        self._accept_early()

    def on_beat(self, phase: str) -> None:
        self.phase = phase
        self._observer.beat(self)

    def set_handler(self, method: str, handler: Handler) -> None:
        self._handlers[method] = handler
        self._accept_early()

    def _accept_early(self) -> None:
        waiting, self._early = self._early, deque()
        for call in waiting:
            self.accept_call(call)

    # -- endpoint ---
    def _check_generation(self, generation: int) -> None:
        if generation and generation != self.generation:
            raise self.hub.stale(self.path, generation)

    def accept_call(self, call: PendingCall) -> None:
        self._check_generation(call.generation)
        handler = self._handlers.get(call.method)
        if self._tasks is None:  # not begun, or about to end: `run` answers, with the reason
            self._early.append(call)
            call.cancel_hook = lambda: self._drop_early(call)
        elif handler is not None:
            self._open.add(call)
            self._tasks.start_soon(self._answer, call, handler)
        elif call.method == "$cast":
            self._cast_call(call)
        elif call.method == "$stacks":
            call.finish(Parcel(self.stacks()))
        elif self.started_at is None:
            self._early.append(call)
            call.cancel_hook = lambda: self._drop_early(call)
        else:
            text = f"actor {self.path!r} has no method {call.method!r}"
            call.finish(None, CallError("raised", self.path, error=RemoteErrorData("actors.NoSuchMethod", text)))

    def _drop_early(self, call: PendingCall) -> None:
        if call in self._early:
            self._early.remove(call)
        call.finish(None, CallError("cancelled", self.path))

    def _cast_call(self, call: PendingCall) -> None:
        """A cast whose sender wants to know what became of it; the answer is the mailbox's policy."""
        policy = Parcel(self.mailbox.overflow)
        if self.mailbox.put(call.payload):
            call.finish(policy)
        elif self.mailbox.overflow == "fail":
            call.finish(None, CallError("full", self.path))
        else:
            parked = self.mailbox.park(call.payload, lambda: None)

            def on_taken() -> None:
                failed = parked.failed
                call.finish(*((policy, None) if failed is None else (None, to_call_error(failed))))

            parked.on_taken = on_taken

            def cancel() -> None:
                parked.drop()
                call.finish(None, CallError("cancelled", self.path))

            call.cancel_hook = cancel

    async def _answer(self, call: PendingCall, handler: Handler) -> None:
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
        self._open.discard(call)
        call.finish(result, error)

    def accept_cast(self, path: str, generation: int, parcel: Parcel, on_taken: OnTaken | None) -> bool | Parked:
        self._check_generation(generation)
        if self.mailbox.put(parcel):
            return True
        if self.mailbox.overflow == "fail":
            if on_taken is None:
                return False
            raise MailboxFull(self.path)
        return False if on_taken is None else self.mailbox.park(parcel, on_taken)

    def wants_confirmation(self, path: str) -> bool:
        return False

    def learn_policy(self, path: str, policy: str) -> None:
        pass

    def send_watch(self, path: str, on: bool) -> None:
        raise AssertionError("a local actor holds nothing behind it")
