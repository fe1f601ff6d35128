"""The public face of a supervisor, and the way to open one."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskGroup

from ._context import Watch
from ._errors import ActorClosed, ActorError
from ._exit import ExitReason
from ._hub import Hub
from ._incarnation import Environment
from ._launcher import Launcher, LocalLauncher
from ._notices import OnEvent
from ._ref import Ref, ref_to
from ._runner import Runner, refresh, serve_snapshots
from ._snapshot import Snapshot
from ._spec import AutoShutdown, Spec, Strategy, SupervisorSpec

if TYPE_CHECKING:
    from ._task import TaskActor


class Supervisor:
    """A running supervisor, as its owner sees it. Got from `open_supervisor`; to be used on that event loop only."""

    def __init__(self, runner: Runner) -> None:
        self.path = runner.path
        self._runner = runner
        self._hub = runner.hub
        self._tasks: TaskGroup
        self._body = anyio.CancelScope()
        self._waiters = 0
        self._delivered = False
        self._interrupt: BaseException | None = None

    # -- children ---
    async def start(self, spec: Spec) -> Ref:
        """Add a child and wait until it has started. Cancelled, the child is stopped and forgotten before this ends.

        Raises ActorStartError, SpecError, or ActorClosed when the supervisor is stopping.
        """
        slot = self._runner.add(spec)
        try:
            await self._runner.wait_up(slot, 0)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._runner.stop_slot(slot, math.inf, "its starter, which was cancelled")
            raise
        return ref_to(slot, self._hub)

    def ref(self, path: str) -> Ref:
        """A ref to the present incarnation at an absolute path; to the path, if another process supervises it."""
        runner = self._hub.runners.get(path.rpartition("/")[0])
        slot = None if runner is None else runner.slots.get(path.rpartition("/")[2])
        return Ref(self._hub, path, 0, None, None) if slot is None else ref_to(slot, self._hub)

    # -- waiting ---
    async def wait_started(self) -> None:
        """Wait until every child of the first hour is up. Raises ActorStartError or whatever ended the supervisor."""
        await self._wait_for(self._runner.started)
        if self._runner.started_at is None:
            raise ActorClosed(f"supervisor {self.path or 'root'!r} was stopped before it had started")

    async def wait(self) -> ExitReason:
        """Wait for the end: Stopped, or Returned after an auto-shutdown.

        Raises RestartLimitExceeded or ActorStartError.
        Cancellation has no effect on the supervisor.
        """
        await self._wait_for(self._runner.ended)
        return self._runner.reason

    async def _wait_for(self, event: anyio.Event) -> None:
        self._waiters += 1
        try:
            await event.wait()
        finally:
            self._waiters -= 1
        if self._runner.finished is not None:
            await self._runner.ended.wait()
            if self._runner.exception is not None:
                self._delivered = True
                raise self._runner.exception

    async def stop(self, timeout: float | None = None, *, by: str = "its owner") -> None:
        """Stop all in order and wait for the end. Called again with a shorter timeout, it shortens the deadline.

        Cancelled, the stop goes on without this wait.
        """
        self.request_stop(math.inf if timeout is None else anyio.current_time() + timeout, by)
        await self._runner.ended.wait()

    def request_stop(self, deadline: float = math.inf, by: str = "its owner") -> None:
        """The same without waiting; `deadline` is on the anyio.current_time clock."""
        self._runner.stop(deadline, by)

    # -- looking ---
    def snapshot(self) -> Snapshot:
        """The state of all below; of what is inside process actors, as they told it when they were last asked."""
        return self._runner.snapshot()

    async def refresh(self) -> Snapshot:
        """The same, after every process was asked for its state now."""
        await refresh(self._hub)
        return self.snapshot()

    def watch(self, path: str) -> Watch:
        """`async for notice in sup.watch(path)`: Up and Down of the actor at an absolute path; first what is known."""
        return Watch(self._hub, path)

    # -- the runner's host ---
    def interrupt(self, exc: BaseException) -> None:
        """Stop all, end the block, and raise `exc` from it."""
        if self._interrupt is None:
            self._interrupt = exc
            self._tasks.start_soon(self._end_interrupted)  # not here, in the midst of an event

    async def _end_interrupted(self) -> None:
        self.request_stop(math.inf, type(self._interrupt).__name__)
        self._body.cancel(type(self._interrupt).__name__)

    async def _host(self) -> None:
        await self._runner.run()
        if self._runner.exception is not None and not self._waiters:
            self._body.cancel("its supervisor gave up")

    @asynccontextmanager
    async def _opened(self, wait_started: bool) -> AsyncIterator[Supervisor]:
        error: BaseException | None = None
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            if self._runner.opened_by is None:
                serve_snapshots(self._hub, tasks, self.snapshot)
            tasks.start_soon(self._host)
            try:
                with self._body:
                    if wait_started:
                        await self.wait_started()
                    yield self
            except (Exception, KeyboardInterrupt, SystemExit) as exc:
                error = exc  # raised below, without the task group's wrapping
            finally:
                remaining = anyio.current_effective_deadline()
                deadline = math.inf if math.isinf(remaining) else remaining
                if self._runner.opened_by is not None:
                    deadline = min(deadline, self._runner.opened_by.stop_deadline)
                self.request_stop(deadline, "its owner, which left the block")
                with anyio.CancelScope(shield=True):
                    await self._runner.ended.wait()
                if self._runner.opened_by is None:
                    tasks.cancel_scope.cancel()
        if self._interrupt is not None:
            raise self._interrupt
        failure = self._runner.exception
        if error is not None:
            if failure is not None and failure is not error and not self._delivered:
                error.add_note(f"meanwhile, {failure}")
            raise error
        if failure is not None and not self._delivered:
            raise failure


def open_supervisor(
    children: Sequence[Spec] = (),
    *,
    name: str = "root",
    strategy: Strategy = "one_for_one",
    intensity: int = 3,
    period: float = 60.0,
    auto_shutdown: AutoShutdown = "never",
    wait_started: bool = True,
    launcher: Launcher | None = None,
    on_event: OnEvent | None = None,
    seed: int | None = None,
) -> AbstractAsyncContextManager[Supervisor]:
    """The root of a tree: `async with open_supervisor([...]) as sup`.

    Entering waits until all `children` have started, unless `wait_started` is False. Leaving the block, also by
    cancellation, stops all in order before it returns. When the supervisor gives up, the block is cancelled and the
    reason (RestartLimitExceeded or ActorStartError) raised from it, unless someone waited for it inside.

    `on_event` is called with an `Event` for every fact, on the loop's thread; it must not block or raise. `seed` fixes
    the backoff's jitter.
    """
    spec = SupervisorSpec(
        name, children, strategy=strategy, intensity=intensity, period=period, auto_shutdown=auto_shutdown
    )

    hub = Hub("", anyio.current_time)
    environment = Environment(hub, launcher or LocalLauncher(), on_event, random.Random(seed).random)
    supervisor = Supervisor(Runner(spec, "", 0, environment, None))
    environment.interrupt = supervisor.interrupt
    return supervisor._opened(wait_started)


@asynccontextmanager
async def open_nested(
    actor: TaskActor, path: str, spec: SupervisorSpec, wait_started: bool
) -> AsyncIterator[Supervisor]:
    """A supervisor that an actor opens for itself; it is part of the actor and shares its hub."""
    if path in actor.hub.runners:
        raise ActorError(f"actor {actor.path!r} has an open supervisor at {path!r} already")
    runner = actor.hub.runners[path] = Runner(spec, path, 0, actor.environment, None, opened_by=actor)
    try:
        async with Supervisor(runner)._opened(wait_started) as supervisor:
            yield supervisor
    finally:
        actor.hub.runners.pop(path, None)
