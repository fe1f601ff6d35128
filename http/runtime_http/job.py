"""One request being answered: its choices take the engine's news, its dialect says how they read."""

import re
import time
from typing import Protocol

import anyio
import msgspec
from quart.wrappers.response import Response

from runtime.messages import FinishReason, SamplingParams
from runtime.service import Delta, Generation, ServiceError
from runtime_http.errors import ApiError, from_engine, from_service
from runtime_http.exchange import Exchange
from runtime_http.front import Front, log
from runtime_http.outlet import Outlet
from runtime_http.params import SEED_BITS

EVENT_STREAM = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
SANE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")  # fit for a header
LOGPROB_BYTES = 100  # what one position's logprobs weigh in a stream's backlog, roughly


class Prompt:
    """What one or more choices continue."""

    __slots__ = ("text", "tokens")

    def __init__(self, tokens: list[int], text: str = "") -> None:
        self.tokens = tokens
        self.text = text  # only where the answer repeats it


class Choice:
    """One generation of a job, and the sink of its news."""

    __slots__ = ("finish", "generation", "index", "job", "opened", "prompt", "stop_match", "waiting")

    generation: Generation

    def __init__(self, job: "Job", index: int, prompt: Prompt) -> None:
        self.job = job
        self.index = index
        self.prompt = prompt
        self.waiting: list[Delta] = []  # not rendered yet
        self.opened = False  # the dialect's opening is rendered
        self.finish: FinishReason | None = None
        self.stop_match: str | int | None = None

    def push(self, delta: Delta) -> None:
        """From the task that reads the engine's answers."""
        try:
            self.job.take(self, delta)
        except Exception:
            log.exception("rendering an answer failed")
            self.job.fail(ApiError(500, "The answer could not be rendered."))

    def whole(self) -> Delta:
        """Everything that waits, as one delta."""
        waiting, self.waiting = self.waiting, []
        return merge(waiting)


class Dialect(Protocol):
    """How one answer reads. All methods are cheap: they run for every token of every stream."""

    def opening(self, choice: Choice) -> bytes:
        """Events that come before a choice's first text."""
        ...

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        """The event for some news, or nothing."""
        ...

    def closing(self, job: "Job") -> bytes:
        """Events after the last text."""
        ...

    def error(self, error: ApiError) -> bytes: ...

    def body(self, job: "Job") -> bytes:
        """The whole answer, unstreamed."""
        ...


class Job:
    """One request from its admission to the last byte of its answer."""

    def __init__(self, front: Front, exchange: Exchange, dialect: Dialect, *, id: str, stream: bool) -> None:
        self.front = front
        self.exchange = exchange
        self.dialect = dialect
        self.id = id
        self.created = int(time.time())
        self.started_s = anyio.current_time()
        self.choices: list[Choice] = []
        self._generations: list[Generation] = []
        self.failure: ApiError | None = None
        self._running = 0
        self._behind_bytes = 0
        self._ended = False
        self._closing_due = True
        self._first = anyio.Event()
        self._done = anyio.Event()
        self._outlet: Outlet | None = None
        if stream:
            self._outlet = Outlet(exchange, front.stats, front.options, self._pull)

    async def run(
        self, prompts: list[Prompt], params: list[SamplingParams], *, n: int, priority: int, cache_salt: str
    ) -> Response:
        """Start ``n`` choices for each prompt and make the answer.

        A stream's answer begins with the first news, so that what fails before is still an error with its own status;
        or after ``ping_s``, for a proxy on the way may give up on a silent server.
        Raises ApiError. Cancelled (the client left), it aborts what runs.
        """
        front = self.front
        deadline_s = front.options.request_timeout_s or None
        self._running = len(prompts) * n
        front.jobs.add(self)
        self.exchange.closing.callback(front.job_done, self)
        try:
            for prompt, prompt_params in zip(prompts, params, strict=True):
                for k in range(n):
                    choice = Choice(self, len(self.choices), prompt)
                    self.choices.append(choice)
                    choice.generation = front.service.open(
                        prompt.tokens,
                        seeded(prompt_params, k),
                        priority=priority,
                        cache_salt=cache_salt,
                        deadline_s=deadline_s,
                        sink=choice,
                    )
                    self._generations.append(choice.generation)
                    self.exchange.closing.callback(choice.generation.abort)
                    if self.failure is not None:
                        raise self.failure
        except ServiceError as error:
            raise from_service(error) from error
        headers = {"X-Request-Id": self.id} if SANE_ID.fullmatch(self.id) else {}
        if self._outlet is None:
            await self._done.wait()
            if self.failure is not None:
                raise self.failure
            response = Response(self.dialect.body(self), headers=headers, content_type="application/json")
        else:
            with anyio.move_on_after(front.options.ping_s):
                await self._first.wait()
            if self.failure is not None:
                raise self.failure
            response = Response(
                self._outlet, headers=headers | EVENT_STREAM, content_type="text/event-stream; charset=utf-8"
            )
        response.timeout = None
        return response

    def take(self, choice: Choice, delta: Delta) -> None:
        """News of one choice."""
        if self._ended:
            return
        if delta.finish == "error" or delta.finish == "abort":
            self.fail(from_engine(delta))
            return
        if delta.finish is not None:
            choice.finish = delta.finish
            choice.stop_match = delta.stop_match
            self._running -= 1
            self._ended = self._running == 0
        outlet = self._outlet
        if outlet is None:
            choice.waiting.append(delta)
        elif outlet.can_write():
            data = self._render(choice, delta)
            if self._ended:
                data += self._close()
            if data:
                outlet.write(data)
        else:
            choice.waiting.append(delta)
            self._behind_bytes += len(delta.text) + LOGPROB_BYTES * len(delta.logprobs)
            if self._behind_bytes > self.front.options.max_behind_bytes:
                self._give_up()
            outlet.wake()
        self._first.set()
        if self._ended:
            self._end()

    def answers_to(self, id: str) -> bool:
        """Whether the client knows this job, or one of its choices, by this id."""
        return id == self.id or id in getattr(self.dialect, "ids", ())

    def fail(self, error: ApiError) -> None:
        """End with an error: an event if the answer has begun, else a status."""
        if self._ended:
            return
        self._stop(error)
        if self._outlet is not None and self._outlet.can_write():
            self._outlet.write(self._close())
        self._end()

    def _end(self) -> None:
        if self._outlet is not None:
            self._outlet.ended = True
            self._outlet.wake()
        self._first.set()
        self._done.set()

    def _stop(self, error: ApiError) -> None:
        """Take no more news, and ask for none."""
        self._ended = True
        self.failure = error
        for generation in self._generations:
            generation.abort()

    def _give_up(self) -> None:
        """The client takes its stream too slowly: nothing that we could send would reach it."""
        self.front.stats.slow_readers += 1
        self._stop(ApiError(500, "The client did not read its stream."))
        if self.exchange.link is not None:
            self.exchange.link.drop()

    def _render(self, choice: Choice, delta: Delta) -> bytes:
        if choice.opened:
            return self.dialect.delta(choice, delta)
        choice.opened = True
        return self.dialect.opening(choice) + self.dialect.delta(choice, delta)

    def _close(self) -> bytes:
        if not self._closing_due:
            return b""
        self._closing_due = False
        return self.dialect.closing(self) if self.failure is None else self.dialect.error(self.failure)

    def _pull(self) -> bytes:
        """Everything that waits, rendered."""
        self._behind_bytes = 0
        data = b"".join(self._render(choice, choice.whole()) for choice in self.choices if choice.waiting)
        return data + self._close() if self._ended else data


def merge(deltas: list[Delta]) -> Delta:
    """One delta that says what all of them say."""
    if len(deltas) == 1:
        return deltas[0]
    if not deltas:
        return Delta()
    last = deltas[-1]
    return Delta(
        text="".join([delta.text for delta in deltas]),
        tokens=tuple([token for delta in deltas for token in delta.tokens]),
        logprobs=tuple([entry for delta in deltas for entry in delta.logprobs]),
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), ()),
        finish=last.finish,
        error=last.error,
        stop_match=last.stop_match,
    )


def seeded(params: SamplingParams, k: int) -> SamplingParams:
    """The parameters for the k-th choice of a prompt: the client's seed for the first, seeds derived from it after."""
    if k == 0:
        return params
    mixed = (params.seed + k * 0x9E3779B97F4A7C15) & ((1 << SEED_BITS) - 1)
    return msgspec.structs.replace(params, seed=mixed)
