"""A process actor whose target is a plain function that owns the main thread; a daemon thread is its control plane."""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from . import _wire as wire
from ._child_common import Body, leave, prepare
from ._door import Door, Mailbox, Message
from ._errors import ActorError
from ._exit import ExitReason, Progress, Stopped, capture, verdict_on
from ._hub import Hub, News
from ._notices import Cast, Drain, Notice, Stop
from ._peer import Peer
from ._snapshot import Snapshot
from ._stacks import thread_stacks
from ._wire import Parcel

FLUSH_TIMEOUT_S = 1.0
CANCEL_SHARE_S = 1.0  # of a stop's budget, what is kept for the Stop notice after a Drain


class ThreadContext:
    """All methods may be called from any thread, and none of them waits."""

    def __init__(self, sock: socket.socket, launch: wire.Launch) -> None:
        self.path = launch.path
        self.name = launch.path.rpartition("/")[2]
        self.generation = launch.generation
        self.draining = False
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable whenever `notices()` has something new."""
        self._grace_s = launch.grace_s
        self._sock = sock
        self._lock = threading.RLock()  # for the hub, the peer and the news
        self._out_wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._hub = Hub(self.path, time.monotonic)
        self._hub.on_snapshot = self._answer_snapshot
        self._peer = Peer(sock, self._hub, self._on_control)
        self._peer.wake = self._wake
        self._hub.uplink = self._peer
        self._mailbox = Mailbox(launch.mailbox, launch.overflow, self._notify)
        self._door = Door(self.path, self.generation, self._hub, self._mailbox, self._to_answer)
        self._door.is_open = True
        self._hub.doors[self.path] = self._door
        self._news: deque[Notice] = deque()
        self._calls: deque[tuple[Message, Callable[[Any], Any]]] = deque()  # for the control thread to answer
        self._cancel_at = math.inf  # when the drain ends
        self._stop_at = math.inf
        self._is_stopping = False
        self._stopped_by: str | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"control of {self.path}", daemon=True)

    # -- for the actor ---
    def progress(self, phase: str, done: int | None = None, total: int | None = None, text: str = "") -> None:
        """Say how far the start is; extends the start deadline."""
        with self._lock:
            self._peer.send(wire.Phase(Progress(phase, done, total, text)))

    def started(self, value: Any = None) -> None:
        """Say, once, that this actor is ready; `value` becomes `ref.value`."""
        data = wire.dump(value)
        with self._lock:
            if self._door.started:
                raise ActorError(f"actor {self.path!r} has called started() before")
            self._door.started = True
            self._peer.send(wire.Started(data))
            self._door.accept_early()

    def beat(self, phase: str = "") -> None:
        """Say that this actor is alive, and in which phase. Cheap enough for every step: most only compare times."""
        with self._lock:
            self._peer.beat(phase)

    def stopping(self) -> float | None:
        """None, or by when (time.monotonic clock, maybe inf) this actor must have returned, or be killed."""
        return self._stop_at if self._is_stopping else None

    def notices(self) -> list[Notice]:
        """What is new since the last call; casts first."""
        try:
            os.eventfd_read(self.wakeup_fd)
        except BlockingIOError:
            return []
        with self._lock:
            casts = [Cast(self._mailbox.get().load()) for _ in range(len(self._mailbox))]
            news = [*casts, *self._news]
            self._news.clear()
        return news

    def watch(self, path: str) -> None:
        """From now on, `notices()` has the ups and downs of the actor at an absolute path; first what is known."""
        with self._lock:
            self._hub.watch(path, self, self._on_news)

    def cast_nowait(self, path: str, payload: Any) -> bool:
        """Put a message into the mailbox of an actor anywhere in the tree; False if too many are on their way."""
        with self._lock:
            return self._hub.cast_nowait(path, payload)

    def on(self, method: str, handler: Callable[[Any], Any]) -> None:
        """Answer calls of `method` on the control thread: the handler must be quick and thread-safe."""
        with self._lock:
            self._door.set_handler(method, handler)

    # -- both threads, under the lock ---
    def _wake(self) -> None:
        if threading.get_ident() != self._thread.ident:  # the control thread looks before it sleeps
            os.eventfd_write(self._out_wake, 1)

    def _notify(self) -> None:
        os.eventfd_write(self.wakeup_fd, 1)

    def _on_news(self, news: News) -> None:
        self._news.append(news.notice())
        self._notify()

    def _to_answer(self, call: Message, handler: Callable[[Any], Any] | None) -> None:
        self._calls.append((call, handler or (lambda payload: thread_stacks())))
        self._wake()

    def _answer_snapshot(self, call: Message) -> None:
        waiting, dropped = len(self._mailbox), self._mailbox.dropped
        call.finish(Parcel(Snapshot(self.path, "process", "", mailbox=waiting, dropped=dropped)))

    def _on_control(self, frame: wire.AnyFrame) -> None:
        match frame:
            case wire.Stop(by, budget_s, drain):
                self._on_stop(by, math.inf if budget_s is None else budget_s, drain)
            case _:
                raise wire.ProtocolError(f"unexpected {type(frame).__name__}")

    def _on_stop(self, by: str, budget_s: float, drain: bool) -> None:
        self._stopped_by = self._stopped_by or by
        self._stop_at = time.monotonic() + budget_s
        if drain and not self._is_stopping:
            if math.isfinite(budget_s):
                self._cancel_at = self._stop_at - min(CANCEL_SHARE_S, budget_s / 5)
            self.draining = True
            self._news.append(Drain(self._cancel_at))
            self._notify()
        else:
            self._stop_now()

    def _stop_now(self) -> None:
        self._cancel_at = math.inf
        self._is_stopping = True
        self._news.append(Stop(self._stop_at))
        self._notify()

    # -- control thread ---
    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            traceback.print_exc()
            os._exit(70)  # without its control plane this process is of no use; the parent has the traceback

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._out_wake, select.POLLIN)
        while True:
            with self._lock:
                while not self._peer.write_some() and not self._peer.is_blocked:
                    pass
                blocked = self._peer.is_blocked
                if self._closing and not blocked:
                    return
                timeout_s = max(self._cancel_at - time.monotonic(), 0.0)
            poll.register(self._sock, select.POLLIN | (select.POLLOUT if blocked else 0))
            ready = dict(poll.poll(None if math.isinf(timeout_s) else timeout_s * 1000 + 1))
            if self._out_wake in ready:
                os.eventfd_read(self._out_wake)
            with self._lock:
                if ready.get(self._sock.fileno(), 0) & ~select.POLLOUT and not self._read():
                    self._on_stop("the death of its parent", self._grace_s, drain=False)
                    return
                if time.monotonic() >= self._cancel_at:
                    self._stop_now()
            while self._calls:
                self._answer(*self._calls.popleft())

    def _read(self) -> bool:
        """What is there; False at the end of the stream."""
        try:
            return self._peer.read_some()
        except BlockingIOError:
            return True
        except wire.ProtocolError:
            return False

    def _answer(self, call: Message, handler: Callable[[Any], Any]) -> None:
        result: Parcel | None = None
        error: wire.CallError | None = None
        try:
            result = Parcel(handler(call.payload.load()))
        except Exception as exc:
            error = wire.CallError("raised", self.path, error=capture(exc))
        with self._lock:
            call.finish(result, error)

    def run(self, body: Body) -> ExitReason:
        """The life of the actor; its bye is out, or can't be, when this returns."""
        self._thread.start()
        value: Any = None
        error: BaseException | None = None
        try:
            value = body(self)
        except BaseException as exc:
            error = exc
        reason = verdict_on(error, value, self._door.started or self._stopped_by is not None)
        if self._stopped_by is not None:
            how = "returned" if error is None else "raised" if isinstance(error, Exception) else "exited"
            reason = Stopped(self._stopped_by, how, "" if error is None else str(reason))
        with self._lock:
            self._peer.send(wire.Bye(wire.portable(reason)))
            self._closing = True
            self._wake()
        self._thread.join(FLUSH_TIMEOUT_S)
        return reason


def run(fd: int, setup: dict[str, Any]) -> None:
    launch, body = prepare(fd, setup)
    leave(ThreadContext(socket.socket(fileno=fd), launch).run(body))
