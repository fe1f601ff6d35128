"""A frontend: the request table, a tokenizer actor, and the ears that keep both in touch with the rest of the tree.

It is the ``Service`` that the HTTP app and embedders talk to. It can be opened before anything else is up, and then
says what it waits for.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

import actors

from .config import Config
from .faults import FAULTS, open_door
from .handshakes import FrontendUp, SchedulerUp
from .limits import check_options, checked
from .mailbox import DataPlane, LocalMailbox, Outbox, SocketMailbox
from .messages import SamplingParams, StepText
from .peers import DETOKENIZER, METRICS, Peers, value, walk
from .reload import Reloaded
from .report import Histogram, Report
from .requests import Request, RequestTable
from .restarts import limits, sweep
from .service import BadRequest, Delta, ModelInfo, QueueFull, Sink, TokenizerClient, Unavailable
from .tokenizing import TokenizerProxy, tokenizer_spec

REPORT_PERIOD_S = 0.1


class Frontend:
    """See ``service.Service``. Made by ``open_frontend``."""

    def __init__(self, ctx: actors.Context, config: Config, origin: str) -> None:
        self.config = config
        self._tokenizer = TokenizerProxy(ctx, f"{ctx.path}/tokenizer", config.supervision.hang_timeout_s)
        self.tokenizer: TokenizerClient = self._tokenizer
        self.up = FrontendUp(origin)
        self.draining = False
        self.idle = anyio.Event()
        self.on_reload: Callable[[Config], None] = lambda config: None
        self._ctx = ctx
        self._info: ModelInfo | None = None
        self._table = RequestTable(origin, anyio.current_time, self._observe)
        self._engines: dict[str, SchedulerUp] = {}  # the schedulers that are up, in the order in which they came up
        self._engine = ""  # the path of the one that serves us
        self._detokenizer_up = False
        self._was_ready = anyio.Event()
        self._outbox: Outbox | None = None
        self._dirty = anyio.Event()
        self._values = dict.fromkeys(
            ("requests_stop", "requests_length", "requests_abort", "requests_error", "requests_resumed"), 0.0
        )
        self._histograms = {name: Histogram() for name in ("time_to_first_token", "inter_token", "request_duration")}

    # --- Service

    @property
    def info(self) -> ModelInfo | None:
        return self._info

    def ready(self) -> bool:
        return bool(self._engine) and self._detokenizer_up and self._tokenizer.up and not self.draining

    def recovering(self) -> bool:
        return self._was_ready.is_set() and not self.ready() and not self.draining

    async def wait_ready(self) -> None:
        """Until everything behind this frontend was up once; says now and then that it waits."""
        while not self._was_ready.is_set():
            self._ctx.progress("wait for the engine")
            with anyio.move_on_after(self.config.supervision.say_s):
                await self._was_ready.wait()

    async def status(self) -> dict[str, Any]:
        tree = await self._ctx.snapshot()
        actors_ = [actor for actor in walk(tree) if actor.kind != "supervisor"]
        if self.draining:
            state = "draining"
        elif self.ready():
            state = "ready" if all(actor.state == "running" for actor in actors_) else "degraded"
        else:
            state = "degraded" if self._was_ready.is_set() else "starting"
        return {
            "state": state,
            "actors": [
                {
                    "path": actor.path,
                    "state": actor.state,
                    "phase": actor.phase,
                    "progress": {
                        name: value
                        for name in ("done", "total", "text")
                        if (value := getattr(actor.progress, name)) not in (None, "")
                    },
                    "generation": actor.generation,
                    "pid": actor.pid if actor.kind == "process" else None,
                    "restarts": actor.restarts,
                    "last_exit": actor.last_exit,
                }
                for actor in actors_
            ],
        }

    async def metrics(self) -> bytes:
        text: bytes = await self._ctx.call(METRICS, "render", None, timeout=5.0)
        return text

    async def fault(self, wanted: dict[str, Any]) -> None:
        """Provoke a fault (``faults.Fault``). Raises BadRequest with a sentence that says why not."""
        if refusal := await self._ctx.call(FAULTS, "fault", wanted, timeout=10):
            raise BadRequest(refusal)

    async def flush_cache(self) -> None:
        self._table.flush()

    def open(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        deadline_s: float | None = None,
        sink: Sink | None = None,
    ) -> Request:
        if self.draining:
            raise Unavailable("The server is shutting down and takes no new requests.", retry_after_s=5)
        if self._info is None:
            raise Unavailable("The model is still being loaded; /ready says how far it is.", retry_after_s=2)
        if not self._engine and len(self._table.live) >= self.config.engine.max_queued_requests:
            raise QueueFull("The engine is being restarted, and as many requests as may wait for it do.", 5)
        params = checked(self._info, prompt, params)
        check_options(priority, cache_salt, deadline_s)
        request = self._table.open(prompt, params, priority=priority, salt=cache_salt, budget_s=deadline_s, sink=sink)
        self._dirty.set()
        return request

    # --- the end

    async def drain(self) -> None:
        """Take no new requests; wait until those that run have ended. Cancelled: they go on."""
        self.draining = True
        while self._table.live:
            self.idle = anyio.Event()
            await self.idle.wait()

    def fail_all(self, sentence: str) -> None:
        """End every live request with an error that says ``sentence``."""
        self._table.fail_all(sentence, "shutdown")

    async def hear_reloads(self) -> None:
        """Take in what changes of the configuration while we run."""
        async for payload in self._ctx.inbox:
            self.config = value(payload, Reloaded).config
            self.on_reload(self.config)

    # --- hearing

    def helped_by(self, helpers: actors.Supervisor) -> None:
        """``helpers`` has the tokenizer."""
        path = self._tokenizer.path
        self._tokenizer.restart = lambda: helpers.ref(path).restart()

    async def listen(self, mailbox: LocalMailbox[StepText] | SocketMailbox[StepText]) -> None:
        while True:
            if self._was_ready.is_set():
                self._ctx.beat()
            with anyio.move_on_after(self.config.supervision.beat_s):
                for message in await mailbox.receive():
                    self._table.take(message)

    async def watch_engine(self, path: str, plane: DataPlane) -> None:
        """One scheduler serves, the first that is up; when it dies, the next one takes over at once."""
        async for notice in self._ctx.watch(path):
            self._engines.pop(path, None)
            if path == self._engine:
                self._leave()
            if isinstance(notice, actors.Up):
                self._engines[path] = value(notice.value, SchedulerUp)
            if not self._engine and self._engines:
                self._turn_to(next(iter(self._engines)), plane)
            self._look()

    def _turn_to(self, path: str, plane: DataPlane) -> None:
        up = self._engines[path]
        self._engine, self._info = path, self._info or up.model
        self._outbox = plane.connect(up.address)
        self._resumed()
        self._table.scheduler_up(self._outbox)

    def _leave(self) -> None:
        self._engine = ""
        self._table.scheduler_down()
        self.hang_up()

    def hang_up(self) -> None:
        """Close what leads to the scheduler: the process, and its other actors, may live on."""
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None

    async def watch_detokenizer(self) -> None:
        async for notice in self._ctx.watch(DETOKENIZER):
            if isinstance(notice, actors.Up):
                self._resumed()
                self._table.detokenizer_up(notice.generation)
            else:
                self._table.detokenizer_down()
            self._detokenizer_up = isinstance(notice, actors.Up)
            self._look()

    async def watch_tokenizer(self) -> None:
        async for notice in self._ctx.watch(self._tokenizer.path):
            self._tokenizer.heard(notice)
            self._look()

    def _look(self) -> None:
        if self.ready():
            self._was_ready.set()

    # --- figures

    def _resumed(self) -> None:
        self._values["requests_resumed"] += len(self._table.live)

    def _observe(self, request: Request, delta: Delta) -> None:
        now = anyio.current_time()
        if delta.tokens:
            if not request.first_at:
                request.first_at = now
                self._histograms["time_to_first_token"].observe(now - request.opened_at)
            else:
                self._histograms["inter_token"].observe(now - request.last_at)
            request.last_at = now
        if delta.finish is not None:
            self._values["requests_" + delta.finish] += 1
            self._histograms["request_duration"].observe(now - request.opened_at)
            if not self._table.live:
                self.idle.set()
        self._dirty.set()

    async def report(self, mailbox: LocalMailbox[StepText] | SocketMailbox[StepText]) -> None:
        while True:
            self._dirty = anyio.Event()
            values = {**self._values, "requests_open": float(len(self._table.live))}
            if isinstance(mailbox, SocketMailbox):
                values["garbage_frames"] = float(mailbox.garbage)
            histograms = {name: histogram.report() for name, histogram in self._histograms.items()}
            self._ctx.cast_nowait(METRICS, Report(self._ctx.path, values, histograms))
            await anyio.sleep(REPORT_PERIOD_S)
            await self._dirty.wait()


@asynccontextmanager
async def open_frontend(
    ctx: actors.Context, config: Config, peers: Peers, plane: DataPlane, *, local: bool
) -> AsyncIterator[Frontend]:
    """A frontend under the actor ``ctx``. ``local``: the detokenizer is a task of the same process.

    Leaving the block aborts what still runs.
    """
    sweep(ctx)
    with plane.bind(StepText, local=local) as mailbox:
        front = Frontend(ctx, config, mailbox.address)
        async with (
            open_door(ctx, config),
            ctx.open_supervisor([tokenizer_spec(config)], wait_started=False, **limits(config.supervision)) as helpers,
            anyio.create_task_group() as tasks,
        ):
            front.helped_by(helpers)
            tasks.start_soon(front.listen, mailbox)
            for path in (peers.schedulers[0], *peers.standbys):
                tasks.start_soon(front.watch_engine, path, plane)
            tasks.start_soon(front.watch_detokenizer)
            tasks.start_soon(front.hear_reloads)
            tasks.start_soon(front.watch_tokenizer)
            tasks.start_soon(front.report, mailbox)
            try:
                yield front
            finally:
                front.fail_all("The server has stopped.")
                front.hang_up()
                tasks.cancel_scope.cancel()
