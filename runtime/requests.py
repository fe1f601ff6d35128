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

# A request that was live at so many deaths in a row, and at so many of them the only one that can have been their
# cause, is given up.
MAX_DEATHS = 3
MAX_DEATHS_ALONE = 2
SUSPECT_DEATHS = 2  # from here on it is tried alone
# A request that has come so far since a death has no part in it: what is computed is fixed by the position alone.
CLEARED_TOKENS = 8


class Request:
    """A live request; to its reader, an async iterator of deltas (``service.Generation``)."""

    __slots__ = (
        "_table",
        "alone",
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
        "stood",
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
        self.attempt, self.submitted, self.finished = 0, False, False
        # Deaths of the scheduler in a row without progress, those of them with nobody else to blame, and the output
        # tokens at the last one.
        self.deaths, self.alone, self.stood = 0, 0, 0
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
        self._suspects: list[Request] = []  # to be tried alone, one after the other
        self._trial: Request | None = None

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
        if not self.quarantine:
            self._submit(request)
        return request

    def abort(self, request: Request) -> None:
        """Forget ``request``, here and in the scheduler. Nothing happens where it has ended."""
        if self.live.pop(request.id, None) is None:
            return
        request.finished = True
        request.news.set()
        self._observe(request, Delta(finish="abort"))
        self._forget(request)
        self._left(request)

    def flush(self) -> None:
        if self._outbox is not None:
            self._outbox.send_nowait(Flush())

    def fail(self, request: Request, sentence: str, code: ErrorCode) -> None:
        """End one request with an error."""
        if self.live.pop(request.id, None) is not None:
            self._forget(request)
            self._finish(request, Delta(finish="error", error=sentence, code=code))
            self._left(request)

    def fail_all(self, sentence: str, code: ErrorCode) -> None:
        for request in list(self.live.values()):
            self.fail(request, sentence, code)

    # --- what the tree tells

    def scheduler_up(self, outbox: Outbox) -> None:
        """A (new) scheduler listens."""
        self._outbox = outbox
        self._resubmit()

    def scheduler_down(self) -> None:
        """Requests wait from here on. Those that may be the cause are tried alone, and given up if they are."""
        self._outbox = None
        self._blame()
        for request in list(self.live.values()):
            if request.deaths >= MAX_DEATHS and request.alone >= MAX_DEATHS_ALONE:
                self.fail(
                    request,
                    f"The engine died {request.deaths} times in a row at this point of this request, {request.alone} "
                    "of them with nothing else to do: the request is taken for the cause and given up. Do not send "
                    "it again unchanged.",
                    "internal",
                )
                for other in self.live.values():  # the cause is found; should there be another, it takes one death
                    other.deaths = min(other.deaths, SUSPECT_DEATHS - 1)
        # Who died alone already first, then those that have yet to show that they run, then by what they have shown.
        suspects = [request for request in self.live.values() if request.deaths >= SUSPECT_DEATHS]
        self._suspects = sorted(suspects, key=lambda request: (-request.alone, len(request.output)))

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
            if request is self._trial and len(request.output) - request.stood >= CLEARED_TOKENS:
                request.deaths = request.alone = 0
                self._trial = None
                self._go_on()
            return
        del self.live[request.id]
        if isinstance(row.stop_match, str):
            self._forget(request)  # the scheduler does not know that a stop string came
        self._finish(request, delta)
        self._left(request)

    def _finish(self, request: Request, delta: Delta) -> None:
        request.finished = True
        self._observe(request, delta)
        request.deliver(delta)
        request.news.set()

    # --- who is the cause

    @property
    def quarantine(self) -> bool:
        """Whether requests are being tried alone; all others wait."""
        return self._trial is not None or bool(self._suspects)

    def _blame(self) -> None:
        """The scheduler has died. The request on trial is the cause, else any that was there may be."""
        trial, self._trial = self._trial, None
        there = [request for request in self.live.values() if request.submitted]
        for request in there:
            request.submitted = False
        suspected = there if trial is None else [trial]
        for request in suspected:
            if len(request.output) - request.stood >= CLEARED_TOKENS:
                request.deaths = request.alone = 0
            request.deaths += 1
            request.alone += len(suspected) == 1
            request.stood = len(request.output)

    def _left(self, request: Request) -> None:
        """``request`` has ended; if it was on trial, the next one is."""
        if request is self._trial:
            self._trial = None
            self._go_on()

    def _go_on(self) -> None:
        """Try the next suspect, or let everyone run."""
        if self._outbox is None or not self._via:
            return
        while self._suspects:
            request = self._suspects.pop(0)
            if request.id in self.live:
                self._trial = request
                self._submit(request)
                return
        for request in list(self.live.values()):
            if not request.submitted:
                self._submit(request)

    # --- towards the scheduler

    def _resubmit(self) -> None:
        for request in list(self.live.values()):
            if request.submitted:
                self._submit(request)
        if self._trial is None:
            self._go_on()

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
