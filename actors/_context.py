"""What an actor on an event loop gets: the same object in a task actor and in an async process actor."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import msgspec

from ._calls import call, cast
from ._door import SNAPSHOT
from ._exit import Progress
from ._hub import Hub, News
from ._notices import Down, Up
from ._snapshot import Snapshot
from ._spec import Spec, SupervisorSpec

if TYPE_CHECKING:
    from ._supervisor import Supervisor
    from ._task import TaskActor

SNAPSHOT_TIMEOUT_S = 5.0


class CallInfo(msgspec.Struct, frozen=True):
    """Who calls, and until when (anyio.current_time clock) the answer is of use."""

    method: str
    caller: str
    deadline: float | None


Handler: TypeAlias = Callable[[Any, CallInfo], Awaitable[Any]]


class Context:
    """Handed to the target as its first argument. To be used on the actor's own event loop only."""

    def __init__(self, actor: TaskActor) -> None:
        self.path = actor.path
        self.name = actor.path.rpartition("/")[2]
        self.generation = actor.generation
        self._actor = actor
        self._mail: anyio.Event | None = None
        self.draining = anyio.Event()

    def __repr__(self) -> str:
        return f"<Context of {self.path!r}, generation {self.generation}>"

    @property
    def deadline(self) -> float | None:
        """When a stop cancels this actor (anyio.current_time clock); None while nobody stops it."""
        return self._actor.cancel_at if self._actor.stopped_by is not None else None

    def progress(self, phase: str, done: int | None = None, total: int | None = None, text: str = "") -> None:
        """Say how far the start is; extends the start deadline. After `started()` it just names the phase."""
        self._actor.on_progress(Progress(phase, done, total, text))

    def started(self, value: Any = None) -> None:
        """Say, once, that this actor is ready. `value` becomes `ref.value` and the value of `Up` notices."""
        self._actor.on_started(value)

    def beat(self, phase: str = "") -> None:
        """Say that this actor is alive, and in which phase (limits may differ by phase)."""
        self._actor.on_beat(phase)

    def on(self, method: str, handler: Handler) -> None:
        """Answer calls of `method`: each runs in a task of this actor, cancelled with the caller's wait."""
        self._actor.door.set_handler(method, handler)

    @property
    async def inbox(self) -> AsyncIterator[Any]:
        """The casts to this actor, one by one, for ever."""
        mailbox = self._actor.mailbox
        while True:
            while not mailbox:
                self._mail = anyio.Event()
                await self._mail.wait()
            yield mailbox.get().load()

    def on_mail(self) -> None:
        """From the mailbox."""
        if self._mail is not None:
            self._mail.set()

    def watch(self, path: str) -> Watch:
        """Iterate over `Up` and `Down` of the actor at an absolute path: first what is known, then what happens."""
        return Watch(self._actor.hub, path)

    async def call(self, path: str, method: str, payload: Any = None, timeout: float | None = None) -> Any:
        """Call an actor anywhere in the tree. Cancellation crosses to the callee. Raises what `Ref.call` raises."""
        return await call(self._actor.hub, path, method, payload, timeout, caller=self.path)

    async def cast(self, path: str, payload: Any) -> None:
        """Put a message into the mailbox of an actor anywhere in the tree, as its overflow policy says."""
        await cast(self._actor.hub, path, payload)

    def cast_nowait(self, path: str, payload: Any) -> bool:
        """The same without waiting; False when there was no room or no such actor."""
        return self._actor.hub.cast_nowait(path, payload)

    async def snapshot(self) -> Snapshot:
        """The state of the whole tree, from its root."""
        data = await self.call("/", SNAPSHOT, timeout=SNAPSHOT_TIMEOUT_S)
        return msgspec.convert(data, Snapshot) if isinstance(data, dict) else data

    def open_supervisor(
        self, children: Sequence[Spec] = (), *, name: str = "", wait_started: bool = True, **options: Any
    ) -> AbstractAsyncContextManager[Supervisor]:
        """A supervisor below this actor; options as those of `actors.open_supervisor`."""
        from ._supervisor import open_nested

        path = f"{self.path}/{name}" if name else self.path
        spec = SupervisorSpec(path.rpartition("/")[2], children, **options)
        return open_nested(self._actor, path, spec, wait_started)


class _Feed:
    """What the hub holds of a watch, so that a watch that is dropped can go."""

    def __init__(self) -> None:
        self.news: deque[Up | Down] = deque()
        self.wake = anyio.Event()

    def tell(self, news: News) -> None:
        self.news.append(news.notice())
        self.wake.set()


class Watch:
    """An asynchronous iterator over an actor's ups and downs. It ends its subscription when closed or dropped."""

    def __init__(self, hub: Hub, path: str) -> None:
        self._hub = hub
        self._path = path
        self._feed = _Feed()
        hub.watch(path, self._feed, self._feed.tell)

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Up | Down:
        """The next notice. Cancelled, it loses none."""
        while not self._feed.news:
            self._feed.wake = anyio.Event()
            await self._feed.wake.wait()
        return self._feed.news.popleft()

    def close(self) -> None:
        self._hub.unwatch(self._path, self._feed)

    def __del__(self) -> None:
        if hasattr(self, "_feed"):
            self.close()
