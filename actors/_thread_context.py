"""What a main-thread process actor gets: its control plane runs in a daemon thread, the main thread is its own."""

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
from ._errors import ActorError
from ._exit import ExitReason, Lost, Progress, RemoteErrorData
from ._notices import Cast, Down, Drain, Notice, Stop, Up
from ._remote import capture
from ._snapshot import Snapshot
from ._stacks import thread_stacks

BEAT_EVERY_S = 0.05
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
        self._launch = launch
        self._sock = sock
        self._lock = threading.Lock()
        self._out: deque[bytes] = deque()
        self._out_wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._notices: deque[Notice] = deque()
        self._casts = 0  # of the notices, how many are casts
        self._dropped = 0
        self._parked: deque[tuple[wire.Cast | wire.Call, Any]] = deque()
        self._handlers: dict[str, Callable[[Any], Any]] = {}
        self._early: list[wire.Call] = []
        self._unacked: dict[str, int] = {}
        self._is_started = False
        self._stop_at: float | None = None  # when the drain ends
        self._deadline: float | None = None
        self._stopped_by: str | None = None
        self._beat_at = -math.inf
        self._beat_phase: str | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"control of {self.path}", daemon=True)

    # -- for the actor ---
    def progress(self, phase: str, done: int | None = None, total: int | None = None, text: str = "") -> None:
        """Say how far the start is; extends the start deadline."""
        self._post(wire.Phase(Progress(phase, done, total, text)))

    def started(self, value: Any = None) -> None:
        """Say, once, that this actor is ready; `value` becomes `ref.value`."""
        if self._is_started:
            raise ActorError(f"actor {self.path!r} has called started() before")
        data = wire.dump(value)
        with self._lock:
            self._is_started = True
            self._post(wire.Started(data))
            early, self._early = self._early, []
        for call in early:
            self._answer(call)

    def beat(self, phase: str = "") -> None:
        """Say that this actor is alive, and in which phase. Cheap enough for every step: most only compare times."""
        now = time.monotonic()
        if phase != self._beat_phase or now - self._beat_at >= BEAT_EVERY_S:
            self._beat_at, self._beat_phase = now, phase
            self._post(wire.Beat(phase))

    def stopping(self) -> float | None:
        """None, or by when (time.monotonic clock, maybe inf) this actor must have returned, or be killed."""
        return self._deadline

    def notices(self) -> list[Notice]:
        """What is new since the last call."""
        try:
            os.eventfd_read(self.wakeup_fd)
        except BlockingIOError:
            return []
        with self._lock:
            news = list(self._notices)
            self._notices.clear()
            self._casts = 0
            while self._parked and self._casts < self._launch.mailbox:
                frame, payload = self._parked.popleft()
                self._take(frame, payload)
        return news

    def watch(self, path: str) -> None:
        """From now on, `notices()` has the ups and downs of the actor at an absolute path; first what is known."""
        self._post(wire.Watch(path))

    def cast_nowait(self, path: str, payload: Any) -> bool:
        """Put a message into the mailbox of an actor anywhere in the tree; False if too many are on their way."""
        data = wire.dump(payload)
        with self._lock:
            if self._unacked.get(path, 0) >= wire.WINDOW or self._closing:
                return False
            self._unacked[path] = self._unacked.get(path, 0) + 1
            self._post(wire.Cast(path, 0, data))
        return True

    def on(self, method: str, handler: Callable[[Any], Any]) -> None:
        """Answer calls of `method` on the control thread: the handler must be quick and thread-safe."""
        with self._lock:
            self._handlers[method] = handler
            early, self._early = self._early, []
        for call in early:
            self._answer(call)

    # -- for the bootstrap ---
    def start_control(self, reader: wire.FrameReader, early: list[wire.AnyFrame]) -> None:
        self._reader = reader
        for frame in early:
            self._on_frame(frame)
        self._sock.setblocking(False)
        self._thread.start()

    def finish(self, reason: ExitReason) -> None:
        """Say bye; returns when it is out, or can't be."""
        self._post(wire.Bye(wire.portable(reason)))
        self._closing = True
        os.eventfd_write(self._out_wake, 1)
        self._thread.join(FLUSH_TIMEOUT_S)

    @property
    def is_started(self) -> bool:
        return self._is_started

    @property
    def stopped_by(self) -> str | None:
        return self._stopped_by

    # -- control thread ---
    def _post(self, frame: wire.Frame) -> None:
        self._out.append(wire.encode_frame(frame))
        os.eventfd_write(self._out_wake, 1)

    def _notify(self, notice: Notice) -> None:
        self._notices.append(notice)
        os.eventfd_write(self.wakeup_fd, 1)

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            traceback.print_exc()
            os._exit(70)  # without its control plane this process is of no use; the parent has the traceback

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._out_wake, select.POLLIN)
        rest = b""
        while True:
            poll.register(self._sock, select.POLLIN | (select.POLLOUT if rest else 0))
            ready = dict(poll.poll(self._timeout_ms()))
            if self._out_wake in ready:
                os.eventfd_read(self._out_wake)
            rest = self._write(rest)
            if self._closing and not rest and not self._out:
                return
            if ready.get(self._sock.fileno(), 0) & ~select.POLLOUT and not self._read():
                self._on_stop("the death of its parent", self._launch.grace_s, drain=False)
                return
            if self._stop_at is not None and time.monotonic() >= self._stop_at:
                self._stop_now()

    def _timeout_ms(self) -> float | None:
        if self._stop_at is None or math.isinf(self._stop_at):
            return None
        return max(self._stop_at - time.monotonic(), 0.0) * 1000 + 1

    def _write(self, rest: bytes) -> bytes:
        while True:
            if not rest:
                size = 0
                batch: list[bytes] = []
                while self._out and size < 1 << 17:
                    batch.append(self._out.popleft())
                    size += len(batch[-1])
                rest = b"".join(batch)
            if not rest:
                return b""
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                return rest
            except OSError:
                self._out.clear()
                return b""

    def _read(self) -> bool:
        """What is there; False at the end of the stream."""
        try:
            data = self._sock.recv(1 << 18)
            if not data:
                return False
            for frame in self._reader.feed(data):
                self._on_frame(frame)
        except BlockingIOError:
            return True
        except (OSError, wire.ProtocolError):
            return False
        return True

    def _on_frame(self, frame: wire.AnyFrame) -> None:
        match frame:
            case wire.Cast(_, generation, payload):
                if generation and generation != self.generation:
                    self._post(wire.Taken(self.path, 1, True))
                else:
                    with self._lock:
                        self._offer(frame, wire.load(payload))
            case wire.Call():
                self._answer(frame)
            case wire.Cancel():
                pass  # handlers are quick
            case wire.Taken(path, count):
                with self._lock:
                    left = self._unacked.get(path, 0) - count
                    if left > 0:
                        self._unacked[path] = left
                    else:
                        self._unacked.pop(path, None)
            case wire.Told(path, generation, value, reason):
                news = Up(path, wire.load(value), generation) if reason is None else Down(path, generation, reason)
                self._notify(news)
            case wire.Stop(by, budget_s, drain):
                self._on_stop(by, math.inf if budget_s is None else budget_s, drain)
            case _:
                raise wire.ProtocolError(f"unexpected {type(frame).__name__}")

    def _on_stop(self, by: str, budget_s: float, drain: bool) -> None:
        now = time.monotonic()
        deadline = now + budget_s
        self._stopped_by = self._stopped_by or by
        if drain and self._deadline is None:
            self._stop_at = deadline - min(CANCEL_SHARE_S, budget_s / 5) if math.isfinite(deadline) else math.inf
            self._last_deadline = deadline
            self.draining = True
            self._notify(Drain(self._stop_at))
        else:
            self._last_deadline = deadline
            self._stop_now()

    def _stop_now(self) -> None:
        self._stop_at = None
        self._deadline = self._last_deadline
        self._notify(Stop(self._deadline))

    # -- casts and calls ---
    def _offer(self, frame: wire.Cast | wire.Call, payload: Any) -> None:
        if self._casts < self._launch.mailbox:
            self._take(frame, payload)
        elif self._launch.overflow == "drop-oldest":
            oldest = next(at for at, notice in enumerate(self._notices) if isinstance(notice, Cast))
            del self._notices[oldest]
            self._casts -= 1
            self._dropped += 1
            self._take(frame, payload)
        elif self._launch.overflow == "wait":
            self._parked.append((frame, payload))
        elif isinstance(frame, wire.Call):
            self._post(wire.Reply(frame.id, None, wire.CallError("full", self.path)))
        else:
            self._dropped += 1
            self._post(wire.Taken(self.path, 1, True))

    def _take(self, frame: wire.Cast | wire.Call, payload: Any) -> None:
        self._casts += 1
        self._notify(Cast(payload))
        if isinstance(frame, wire.Call):
            self._post(wire.Reply(frame.id, wire.dump(self._launch.overflow)))
        else:
            self._post(wire.Taken(self.path, 1))

    def _answer(self, call: wire.Call) -> None:
        if call.generation and call.generation != self.generation:
            gone = Lost(f"generation {self.generation} is in its place")
            self._post(wire.Reply(call.id, None, wire.CallError("died", self.path, call.generation, gone)))
            return
        if call.method == "$cast":
            with self._lock:
                self._offer(call, wire.load(call.payload))
            return
        if call.method == "$snapshot":
            state = Snapshot(path=self.path, kind="process", state="", mailbox=self._casts, dropped=self._dropped)
            self._post(wire.Reply(call.id, wire.dump(state)))
            return
        if call.method == "$stacks":
            self._post(wire.Reply(call.id, wire.dump(thread_stacks())))
            return
        with self._lock:
            handler = self._handlers.get(call.method)
            if handler is None and not self._is_started:
                self._early.append(call)
                return
        if handler is None:
            text = f"actor {self.path!r} has no method {call.method!r}"
            error = RemoteErrorData("actors.NoSuchMethod", text)
            self._post(wire.Reply(call.id, None, wire.CallError("raised", self.path, error=error)))
            return
        try:
            self._post(wire.Reply(call.id, wire.dump(handler(wire.load(call.payload)))))
        except Exception as exc:
            self._post(wire.Reply(call.id, None, wire.CallError("raised", self.path, error=capture(exc))))
