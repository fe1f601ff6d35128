"""The request table: what a frontend knows of its live requests. No IO: messages in, messages out through an outbox.

The table is what makes the death of anything downstream a pause and not an error. It holds each request's prompt,
parameters and output so far; when a scheduler or a detokenizer comes back as a new generation, every live request is
submitted again as *prompt + output so far* under a new attempt number, and answers to older attempts are dropped.
Sampling is keyed by (seed, position), so what follows is what would have followed anyway.
"""

from array import array
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import anyio
import msgspec

from .mailbox import Outbox
from .messages import Abort, ErrorCode, Flush, SamplingParams, StepText, Submit, TextRow
from .service import Delta, Sink

# A request that was live at so many deaths of its scheduler is taken for their cause, and fails alone.
MAX_DEATHS = 3


class Request:
    """A live request; to its reader, an async iterator of deltas (``service.Generation``)."""

    __slots__ = (
        "_table",
        "attempt",
        "cached_tokens",
        "chars",
        "deadline",
        "deaths",
        "finished",
        "first_at",
        "id",
        "last_at",
        "news",
        "opened_at",
        "output",
        "params",
        "pending",
        "priority",
        "prompt",
        "prompt_tokens",
        "salt",
        "sink",
        "submitted",
    )

    def __init__(
        self,
        table: "RequestTable",
        number: int,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int,
        salt: str,
        deadline: float | None,
        sink: Sink | None,
        now: float,
    ) -> None:
        self._table, self.id, self.params, self.priority, self.salt = table, number, params, priority, salt
        self.prompt, self.prompt_tokens, self.cached_tokens = array("i", prompt).tobytes(), len(prompt), 0
        self.deadline, self.sink = deadline, sink
        self.attempt, self.deaths, self.submitted, self.finished = 0, 0, False, False
        self.output, self.chars = array("i"), 0
        self.pending: Delta | None = None
        self.news = anyio.Event()
        self.opened_at, self.first_at, self.last_at = now, 0.0, 0.0

    @property
    def completion_tokens(self) -> int:
        return len(self.output)

    def deliver(self, delta: Delta) -> None:
        if self.sink is not None:
            self.sink.push(delta)
            return
        if self.pending is None:
            self.pending = delta
            self.news.set()
        else:
            self.pending.merge(delta)

    def abort(self) -> None:
        self._table.abort(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """What came since the last call. Cancelled: nothing is lost, the request runs on."""
        while self.pending is None:
            if self.finished:
                raise StopAsyncIteration
            self.news = anyio.Event()
            await self.news.wait()
        delta, self.pending = self.pending, None
        return delta


class RequestTable:
    """The live requests of one frontend, and their way to the scheduler and back.

    ``origin`` is the address at which this frontend hears; ``observe`` is told of (request, delta) as they pass.
    """

    def __init__(
        self,
        origin: str,
        clock: Callable[[], float],
        observe: Callable[[Request, Delta], None] = lambda request, delta: None,
    ) -> None:
        self.origin = origin
        self.live: dict[int, Request] = {}
        self._clock, self._observe = clock, observe
        self._next = 0
        self._outbox: Outbox | None = None
        self._via = 0  # generation of the detokenizer; 0 = none is up

    # --- the reader's side

    def open(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
        budget_s: float | None = None,
        sink: Sink | None = None,
    ) -> Request:
        now = self._clock()
        self._next += 1
        request = Request(
            self,
            self._next,
            prompt,
            params,
            priority=priority,
            salt=salt,
            deadline=None if budget_s is None else now + budget_s,
            sink=sink,
            now=now,
        )
        self.live[request.id] = request
        self._submit(request)
        return request

    def abort(self, request: Request) -> None:
        """Forget ``request``, here and in the scheduler. Nothing happens where it has ended."""
        if self.live.pop(request.id, None) is None:
            return
        request.finished = True
        request.news.set()
        self._forget(request)

    def flush(self) -> None:
        if self._outbox is not None:
            self._outbox.send_nowait(Flush())

    def fail(self, request: Request, sentence: str, code: ErrorCode) -> None:
        """End one request with an error."""
        if self.live.pop(request.id, None) is not None:
            self._forget(request)
            self._finish(request, Delta(finish="error", error=sentence, code=code))

    def fail_all(self, sentence: str, code: ErrorCode) -> None:
        for request in list(self.live.values()):
            self.fail(request, sentence, code)

    # --- what the tree tells

    def scheduler_up(self, outbox: Outbox) -> None:
        """A (new) scheduler listens."""
        self._outbox = outbox
        self._resubmit()

    def scheduler_down(self) -> None:
        """Requests wait from here on. One that has now seen ``MAX_DEATHS`` deaths is failed: it may be their cause."""
        self._outbox = None
        for request in list(self.live.values()):
            if request.submitted:
                request.submitted = False
                request.deaths += 1
                if request.deaths >= MAX_DEATHS:
                    self.fail(
                        request,
                        f"The engine died {request.deaths} times while it worked on this request, which may be the "
                        "cause. The request was given up; do not send it again unchanged.",
                        "internal",
                    )

    def detokenizer_up(self, generation: int) -> None:
        """A (new) detokenizer is on the way back: what the old one had not passed on is asked for again."""
        self._via = generation
        self._resubmit()

    def detokenizer_down(self) -> None:
        self._via = 0

    # --- what the detokenizer says

    def take(self, message: StepText) -> None:
        for row in message.rows:
            request = self.live.get(row.id)
            if request is not None and row.attempt == request.attempt:
                self._advance(request, row)

    def _advance(self, request: Request, row: TextRow) -> None:
        known = len(request.output) - row.start
        if known < 0 or row.offset > request.chars:
            # A message was lost on the way (its carrier died): ask again from where we are.
            self._forget(request)
            self._submit(request)
            return
        text = row.text[request.chars - row.offset :]
        tokens, logprobs = row.tokens[known:], row.logprobs[known:]
        request.output.extend(tokens)
        request.chars += len(text)
        request.cached_tokens = max(request.cached_tokens, row.cached_tokens)
        delta = Delta(text, tokens, logprobs, row.prompt_logprobs, row.finish, row.error, row.code, row.stop_match)
        if row.finish is None:
            self._observe(request, delta)
            request.deliver(delta)
            return
        del self.live[request.id]
        if isinstance(row.stop_match, str):
            self._forget(request)  # the scheduler does not know that a stop string came
        self._finish(request, delta)

    def _finish(self, request: Request, delta: Delta) -> None:
        request.finished = True
        self._observe(request, delta)
        request.deliver(delta)
        request.news.set()

    # --- towards the scheduler

    def _resubmit(self) -> None:
        for request in list(self.live.values()):
            self._submit(request)

    def _submit(self, request: Request) -> None:
        if self._outbox is None or not self._via:
            return
        budget_s = None if request.deadline is None else request.deadline - self._clock()
        params = request.params
        if request.output and params.prompt_logprobs >= 0:
            params = msgspec.structs.replace(params, prompt_logprobs=-1)  # they came with the first token
        request.attempt += 1
        request.submitted = self._outbox.send_nowait(
            Submit(
                origin=self.origin,
                id=request.id,
                attempt=request.attempt,
                prompt=request.prompt,
                params=params,
                output=request.output.tobytes(),
                priority=request.priority,
                cache_salt=request.salt,
                budget_s=budget_s,
                via=self._via,
            )
        )
        if not request.submitted:
            self.fail(request, "The engine is too far behind to take requests; try again later.", "queue_full")

    def _forget(self, request: Request) -> None:
        if request.submitted and self._outbox is not None:
            self._outbox.send_nowait(Abort(self.origin, request.id, request.attempt))
