"""A scheduler rank: the process that owns a device. Its main thread is the step loop; the control plane has a thread.

The loop sleeps in one poll over its mailbox and its control notices when there is nothing to do, and never polls while
there is. It imports torch while the model's files are still on their way.
"""

import dataclasses
import gc
import time

import msgspec
import zmq

import actors

from .config import Config
from .faults import ThreadDoor
from .handshakes import DetokenizerUp, FrontendUp, SchedulerUp
from .mailbox import DataPlane, Outbox, SocketMailbox
from .messages import Abort, Flush, StepTokens, Submit, ToScheduler
from .peers import DETOKENIZER, METRICS, MODEL, Peers, value
from .reload import Reloaded
from .report import Report
from .sources import ModelFiles

REPORT_PERIOD_S = 0.1


class Rank:
    """The step loop of rank 0 of one replica."""

    def __init__(self, ctx: actors.ThreadContext, config: Config, peers: Peers) -> None:
        self.ctx, self.config, self.peers = ctx, config, peers
        self.plane = DataPlane()
        self.mailbox: SocketMailbox[ToScheduler] = SocketMailbox(self.plane.context, ToScheduler)
        self.poller = zmq.Poller()
        self.poller.register(self.mailbox.socket, zmq.POLLIN)
        self.poller.register(ctx.wakeup_fd, zmq.POLLIN)
        self.door = ThreadDoor(ctx) if config.supervision.debug_faults else None
        self.files: ModelFiles | None = None
        self.stopping = False
        self._outbox: Outbox | None = None
        self._via = 0  # generation of the detokenizer that ``_outbox`` leads to
        self._early: list[Submit] = []  # those that count on a detokenizer we have not heard of yet
        self._origins: dict[str, str] = {}  # frontend's path -> its origin
        self._aborted_at = 0.0
        self._reported_at = 0.0
        self._reported: dict[str, float] = {}
        self._phases_s: dict[str, float] = {}
        self._phase_began = time.monotonic()
        self._phase = ""

    # --- start

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Report progress; a new name closes the phase before it."""
        now = time.monotonic()
        if name != self._phase:
            if self._phase:
                self._phases_s[self._phase] = round(now - self._phase_began, 3)
            self._phase, self._phase_began = name, now
        self.ctx.progress(name, done, total)

    def run(self) -> None:
        while self.door is not None and not self.door.opened:
            self._wait(None)
            self._hear()
        self.ctx.watch(MODEL)
        self.phase("import torch")
        import torch  # noqa: F401  it takes longest: while the model's files are on their way

        from .engine.build import build

        while self.files is None:
            self.phase("wait for the model files")
            self._wait(self.config.supervision.say_s)
            self._hear()
            if self.stopping:
                return
        self.core, model = build(self.config, self.files, self.phase)
        if self.door is not None:
            self.door.haunt(self.core)
        self.ctx.watch(DETOKENIZER)
        for path in self.peers.frontends:
            self.ctx.watch(path)
        # What is alive now stays: the collector need not look at torch and the weights again and again.
        gc.collect()
        gc.freeze()
        self.phase("started")
        self.ctx.started(SchedulerUp(self.mailbox.address, model, self._phases_s))
        try:
            self._loop()
        finally:
            self.core.close()
            self.plane.close()

    # --- the loop

    def _loop(self) -> None:
        core, beat_s = self.core, self.config.supervision.beat_s
        while not self.stopping:
            if core.has_work() and self._outbox is not None:
                self.ctx.beat("step")
                step = core.step()
                if step is not None:
                    self._send(step)
                self._report(soon=False)
                self._hear()
            else:
                self._report(soon=True)
                self.ctx.beat("idle")
                self._wait(beat_s)
                self._hear()
            for message in self.mailbox.drain():
                self._take(message)

    def _wait(self, timeout_s: float | None) -> None:
        self.poller.poll(None if timeout_s is None else int(timeout_s * 1000))

    def _take(self, message: ToScheduler) -> None:
        if isinstance(message, Submit):
            if message.via > self._via:
                self._early.append(message)
            else:
                self.core.submit(message)
        elif isinstance(message, Abort):
            self._early = [m for m in self._early if (m.origin, m.id) != (message.origin, message.id)]
            self.core.abort(message.origin, message.id, message.attempt)
            self._aborted_at = time.monotonic()
        elif isinstance(message, Flush):
            self.core.flush()

    def _send(self, step: StepTokens) -> None:
        if step.opened:
            step = msgspec.structs.replace(step, source=self.ctx.path)
        # A detokenizer that is behind holds the engine back: better than losing words. If it is stuck, it is replaced.
        while self._outbox is not None and not self._outbox.send_nowait(step):
            self.ctx.beat("wait for the detokenizer")
            self.poller.poll(10)
            self._hear()
            if self.stopping:
                return

    # --- what the tree tells

    def _hear(self) -> None:
        for notice in self.ctx.notices():
            match notice:
                case actors.Up(path=path) if path == MODEL:
                    self.files = value(notice.value, ModelFiles)
                case actors.Up(path=path) if path == DETOKENIZER:
                    self._connect(value(notice.value, DetokenizerUp).address, notice.generation)
                case actors.Down(path=path) if path == DETOKENIZER:
                    self._disconnect()
                case actors.Up(path=path) if path in self.peers.frontends:
                    self._origins[path] = value(notice.value, FrontendUp).origin
                case actors.Down(path=path) if path in self._origins:
                    self.core.abort_origin(self._origins.pop(path))
                case actors.Cast(payload=Reloaded(config=config)):
                    limits = self.core.scheduler.config
                    queued = config.engine.max_queued_requests
                    self.core.scheduler.config = dataclasses.replace(limits, max_queued_requests=queued)
                case actors.Cast(payload=payload) if self.door is not None:
                    self.door.take(payload)
                case actors.Stop():
                    self.stopping = True

    def _connect(self, address: str, generation: int) -> None:
        self._disconnect()
        self._outbox, self._via = self.plane.connect(address), generation
        early, self._early = self._early, []
        for message in early:
            self._take(message)

    def _disconnect(self) -> None:
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None

    # --- figures

    def _report(self, *, soon: bool) -> None:
        """Tell the metrics actor where we are: now and then while steps go on, and before falling asleep."""
        now = time.monotonic()
        if not soon and now - self._reported_at < REPORT_PERIOD_S:
            return
        figures = {**self.core.stats(), "aborted_at": self._aborted_at, "garbage_frames": self.mailbox.garbage}
        if figures != self._reported:
            self._reported_at, self._reported = now, figures
            self.ctx.cast_nowait(METRICS, Report(self.ctx.path, figures))


def scheduler(ctx: actors.ThreadContext, config: Config, peers: Peers) -> None:
    """The actor. Started value: ``SchedulerUp``."""
    Rank(ctx, config, peers).run()
