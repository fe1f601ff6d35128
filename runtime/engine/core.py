"""The engine without its loop: requests in, one scheduling round at a time, one message of tokens out per round.

A round plans and launches a step, then collects the oldest step in flight. With a runner of depth 1 that is the same
step. With depth 2 it is the one before: the device computes step N + 1 while this code reads step N's tokens. A token
that has not been read stands as -1 in the slot table, and a request that turns out to have ended has one more row
in flight, whose token is dropped and whose pages wait for it.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.engine.batch import Batch, Runner, SlotTable, StepResult
from runtime.engine.request import Key, Request
from runtime.engine.scheduler import Counts, EngineConfig, Scheduler
from runtime.messages import (
    ErrorCode,
    FinishReason,
    Opened,
    SamplingParams,
    StepTokens,
    Submit,
    TokenLogprobs,
    TokenRow,
)

# How many prompt tokens the detokenizer gets as the left context of the text.
TAIL_TOKENS = 8

_NO_ROWS: npt.NDArray[np.int64] = np.zeros((4, 0), np.int64)


class EngineCore:
    """Not thread-safe; one thread drives it. ``clock`` (None: no deadlines are kept) is asked once a round; what it
    decides is carried out by ``expire``, which ranks that follow another one are told to call instead."""

    def __init__(
        self,
        runner: Runner,
        slots: SlotTable,
        config: EngineConfig,
        eos_token_ids: Iterable[int] = (),
        clock: Callable[[], float] | None = time.monotonic,
    ) -> None:
        self.runner = runner
        self.table = slots
        self.scheduler = Scheduler(slots, runner.num_pages, config)
        self._eos = frozenset(eos_token_ids)
        self._clock = clock
        self._requests: dict[Key, Request] = {}
        self._arrivals = 0
        self._deadlines: list[tuple[float, int, Key]] = []  # (when, arrival, key)
        self._flights: deque[tuple[Batch, Any]] = deque()
        self._opened: list[Opened] = []
        self._news: list[TokenRow] = []
        self._plain = _NO_ROWS
        self._origins: dict[str, int] = {}
        self._watch = _Watch(self._eos)
        self._counts = _Counts()

    # Words from outside

    def submit(self, submit: Submit) -> None:
        """Take a request in. Whatever is wrong with it is told in the next round's message."""
        key = (submit.origin, submit.id)
        older = self._requests.get(key)
        if older is not None:
            if older.attempt >= submit.attempt:
                return
            self._forget(older)
        request = Request.of(submit, self._eos, self.scheduler.max_tokens)
        self._arrivals += 1
        request.arrival = self._arrivals
        refusal, code = self._refusal(submit, request)
        if refusal:
            self._end(request, "error", refusal, code)
            return
        if request.resumed_tokens and self._stops(request, int(request.tokens[-1]), len(request.tokens) - 1):
            self._end(request, "stop", stop_token=True)
            return
        if len(request.tokens) >= request.limit and request.scores is None:
            self._end(request, "length")
            return
        self._requests[key] = request
        self._watch.add(request.stops)
        if self._clock is not None and submit.budget_s is not None:
            heapq.heappush(self._deadlines, (self._clock() + submit.budget_s, request.arrival, key))
        self.scheduler.line.join(request)

    def abort(self, origin: str, id: int, attempt: int) -> None:
        """Forget a request, wherever it is; no answer comes. An unknown or newer one is left alone."""
        request = self._requests.get((origin, id))
        if request is not None and request.attempt <= attempt:
            self._counts.aborted_requests += 1
            self._forget(request)

    def abort_origin(self, origin: str) -> None:
        """Forget all requests of a frontend that is gone."""
        for request in list(self._requests.values()):
            if request.origin == origin:
                self.abort(origin, request.id, request.attempt)

    def expire(self, origin: str, id: int, attempt: int) -> None:
        """End a request whose time is up."""
        request = self._requests.get((origin, id))
        if request is not None and request.attempt == attempt:
            done = self._known_tokens(request) - request.prompt_tokens
            where = "waiting to run" if request.slot < 0 else "running"
            self._forget(request)
            what = f"the request's time was up while it was {where}, after {done} tokens of output"
            self._end(request, "error", what, "deadline")

    def flush(self) -> int:
        """Drop cached prefixes that nobody uses. Returns how many pages that were."""
        return self.scheduler.flush()

    def has_work(self) -> bool:
        return bool(self._requests or self._flights or self._news)

    def warm_up(self) -> None:
        """Run a short request through the empty engine, so that the first client's does not find everything cold."""
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        self.submit(Submit("", 0, 0, np.zeros(min(self.table.page_tokens, 16), np.int32).tobytes(), params))
        while self.has_work():
            self.step()
        self.flush()
        self._counts, self.scheduler.counts = _Counts(), Counts()

    def close(self) -> None:
        """Give the runner's memory back."""
        self.runner.close()

    # A round

    def step(self) -> StepTokens | None:
        """Launch a step if there is one to launch; collect the oldest if it is time for that. None: no news."""
        for late in self.overdue():
            self.expire(late.origin, late.id, late.attempt)
        started = time.perf_counter()
        batch = self.scheduler.plan(busy=bool(self._flights))
        planned = launched = collected = time.perf_counter()
        for request, cached_tokens in self.scheduler.admitted:
            self._open(request, cached_tokens)
        self.scheduler.admitted.clear()
        if batch is not None:
            self._flights.append((batch, self.runner.launch(batch)))
            launched = collected = time.perf_counter()
        if self._flights and (batch is None or len(self._flights) >= self.runner.depth):
            batch, handle = self._flights.popleft()
            result = self.runner.collect(handle)
            collected = time.perf_counter()
            self._read(batch, result)
        message = self._message()
        counts = self._counts
        counts.schedule_s += planned - started
        counts.launch_s += launched - planned
        counts.collect_s += collected - launched
        counts.output_s += time.perf_counter() - collected
        return message

    def overdue(self) -> list[Request]:
        """The requests whose time is up by the clock; the only place that looks at it to decide something."""
        if not self._deadlines or self._clock is None:
            return []
        now, late = self._clock(), []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, arrival, key = heapq.heappop(self._deadlines)
            request = self._requests.get(key)
            if request is not None and request.arrival == arrival:
                late.append(request)
        return late

    def _read(self, batch: Batch, result: StepResult) -> None:
        """Enter a step's tokens, and see who has ended."""
        scheduler, rows = self.scheduler, self.scheduler.rows
        slots, tokens = batch.slots, result.tokens
        ends = batch.cached + batch.extend  # where the sampled tokens stand
        live = rows.live[slots]
        scheduler.collected(batch)
        self._counts.steps += 1
        self._counts.computed_tokens += int(batch.extend.sum())
        took = live & batch.sample
        self.table.tokens[slots[took], ends[took]] = tokens[took]
        self._counts.generated_tokens += int(np.count_nonzero(took))
        notable = self._watch.hits(tokens) | rows.verbose[slots] | (tokens < 0) | (ends + 1 >= rows.limit[slots])
        notable[batch.decodes :] = True
        plain = live & ~notable
        which = slots[plain]
        self._plain = np.stack([rows.origin[which], rows.id[which], rows.attempt[which], tokens[plain]])
        for row in np.flatnonzero(live & notable).tolist():
            request = rows.request[slots[row]]
            assert request is not None
            self._read_row(request, row, batch, result)

    def _read_row(self, request: Request, row: int, batch: Batch, result: StepResult) -> None:
        """A row with more news than one token."""
        token, sampled = int(result.tokens[row]), bool(batch.sample[row])
        end = int(batch.cached[row] + batch.extend[row])
        if sampled and token < 0:
            self._drop(request, poisoned=True)
            what = f"the model's output for token {end - request.prompt_tokens} was not a number (NaN or infinite)"
            self._end(request, "error", f"{what}; this request is lost, others are not concerned", "not_finite")
            return
        if request.scores is not None:
            self._read_scores(request, row, batch, result)
        if row >= batch.decodes:
            self.scheduler.prefilled(request)
        if not sampled:
            if end >= request.limit:  # only its prompt was wanted
                self._drop(request)
                self._end(request, "length")
            return
        stop = self._stops(request, token, end)
        finish: FinishReason | None = "stop" if stop else "length" if end + 1 >= request.limit else None
        logprobs: tuple[TokenLogprobs, ...] = ()
        if row in result.logprobs:
            logprob, ids, values = result.logprobs[row]
            logprobs = (TokenLogprobs(token, logprob, tuple(ids.tolist()), tuple(values.tolist())),)
        if finish is not None:
            self._drop(request)
        self._tell(request, (token,), finish, stop_token=stop, logprobs=logprobs)

    def _read_scores(self, request: Request, row: int, batch: Batch, result: StepResult) -> None:
        """Logprobs of prompt tokens: what position p says about the token at p + 1."""
        first = int(batch.cached[row]) + 1
        last = min(first + int(batch.extend[row]), request.prompt_tokens)
        if request.scores is None or first >= last or row not in result.prompt_logprobs:
            return
        logprobs, ids, values = result.prompt_logprobs[row]
        for token, logprob, top, top_logprobs in zip(
            request.tokens[first:last].tolist(), logprobs.tolist(), ids.tolist(), values.tolist(), strict=False
        ):
            request.scores.append(TokenLogprobs(token, logprob, tuple(top), tuple(top_logprobs)))

    def _stops(self, request: Request, token: int, position: int) -> bool:
        return token in request.stops and position >= request.min_length

    def _known_tokens(self, request: Request) -> int:
        if request.slot < 0:
            return len(request.tokens)
        rows = self.scheduler.rows
        # A collected row that closed its gap has yielded the token at ``computed``.
        return max(len(request.tokens), int(rows.computed[request.slot]) + 1)

    # Leaving

    def _forget(self, request: Request) -> None:
        """Take a request out of everything."""
        self._drop_name(request)
        self.scheduler.forget(request)

    def _drop(self, request: Request, poisoned: bool = False) -> None:
        """Take a running request out of everything."""
        self._drop_name(request)
        self.scheduler.finish(request, poisoned)

    def _drop_name(self, request: Request) -> None:
        del self._requests[request.key]
        self._watch.remove(request.stops)

    # Words to the outside

    def _open(self, request: Request, cached_tokens: int) -> None:
        rows, slot = self.scheduler.rows, request.slot
        if slot >= 0:
            rows.origin[slot] = self._origins.setdefault(request.origin, len(self._origins))
        if request.opened:
            return
        request.opened = True
        prompt, output = request.tokens[: request.prompt_tokens], request.tokens[request.prompt_tokens :]
        self._opened.append(
            Opened(
                origin=request.origin,
                id=request.id,
                attempt=request.attempt,
                prompt_tail=prompt[-TAIL_TOKENS:].tobytes(),
                output=output[: request.resumed_tokens].tobytes(),
                stop=request.params.stop,
                include_stop=request.params.include_stop,
                skip_special_tokens=request.params.skip_special_tokens,
                prompt_tokens=request.prompt_tokens,
                cached_tokens=cached_tokens,
            )
        )

    def _tell(
        self,
        request: Request,
        tokens: tuple[int, ...],
        finish: FinishReason | None = None,
        error: str = "",
        code: ErrorCode = "",
        stop_token: bool = False,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        scores: tuple[TokenLogprobs | None, ...] = ()
        if request.scores is not None:
            scores, request.scores = tuple(request.scores), None
        self._news.append(
            TokenRow(
                request.origin,
                request.id,
                request.attempt,
                tokens,
                finish=finish,
                error=error,
                code=code,
                stop_token=stop_token,
                logprobs=logprobs,
                prompt_logprobs=scores,
            )
        )

    def _end(
        self, request: Request, finish: FinishReason, error: str = "", code: ErrorCode = "", stop_token: bool = False
    ) -> None:
        """The last word of a request that gets no token with it."""
        self._open(request, 0)
        if finish == "error":
            request.scores = None
        self._tell(request, (), finish, error, code, stop_token)

    def _message(self) -> StepTokens | None:
        plain = self._plain
        if not (self._opened or self._news or plain.shape[1]):
            return None
        message = StepTokens(
            opened=tuple(self._opened),
            news=tuple(self._news),
            origins=tuple(self._origins) if plain.shape[1] else (),
            plain=plain.tobytes(),
        )
        self._opened, self._news = [], []
        self._plain = _NO_ROWS
        if not self._requests:
            self._origins = {}
        return message

    def _refusal(self, submit: Submit, request: Request) -> tuple[str, ErrorCode]:
        """Why this request can never run, or not now; empty if it can."""
        prompt, pool_tokens = request.prompt_tokens, self.scheduler.pool.total * self.table.page_tokens
        if not prompt:
            return "the prompt is empty: it must have at least one token", "internal"
        if prompt + min(request.params.max_tokens, 1) > self.table.context_tokens:
            what = f"the context of {self.table.context_tokens} tokens"
            return f"the prompt has {prompt} tokens, which leaves no room for an answer in {what}", "too_long"
        if prompt > pool_tokens:
            what = f"the KV pool holds {pool_tokens}"
            return f"the prompt has {prompt} tokens, but {what}: it can never run here", "too_long"
        # Who comes again after a death that was none of its doing is let in: it had its place.
        if self.scheduler.queue_full and submit.attempt <= 1 and not submit.output:
            return f"the queue is full: {len(self.scheduler.line)} requests wait already; try again later", "queue_full"
        return "", ""

    # Insight

    def stats(self) -> dict[str, float]:
        """Figures for the metrics: gauges of this moment, and counters since the start."""
        scheduler, pool, counts = self.scheduler, self.scheduler.pool, self._counts
        return {
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.line),
            "kv_pages_free": pool.free,
            "kv_pages_cached": pool.cached,
            "kv_pages_used": pool.used,
            "kv_pages_evictable": scheduler.tree.evictable_pages,
            "caution": scheduler.caution,
            "steps": counts.steps,
            "computed_tokens": counts.computed_tokens,
            "generated_tokens": counts.generated_tokens,
            "aborted_requests": counts.aborted_requests,
            "prompt_tokens": scheduler.counts.prompt_tokens,
            "cached_tokens": scheduler.counts.cached_tokens,
            "retractions": scheduler.counts.retractions,
            "evicted_pages": scheduler.counts.evicted_pages,
            "phase_schedule_s": counts.schedule_s,
            "phase_launch_s": counts.launch_s,
            "phase_collect_s": counts.collect_s,
            "phase_output_s": counts.output_s,
        }

    def check(self) -> None:
        """Assert the invariants of everything that owns pages and slots. Walks the whole cache: for idle moments."""
        self.scheduler.check()
        assert len(self._requests) == len(self.scheduler.running) + len(self.scheduler.line)


@dataclass(slots=True)
class _Counts:
    """Since the start. Seconds by phase: scheduling, launching, waiting for the runner, reading its tokens."""

    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    aborted_requests: int = 0
    schedule_s: float = 0.0
    launch_s: float = 0.0
    collect_s: float = 0.0
    output_s: float = 0.0


class _Watch:
    """Which token ids may end some request: one look-up for a whole step, the exact question only for the hits."""

    # Ids beyond this are no token of any vocabulary.
    MOST = 1 << 24

    def __init__(self, always: frozenset[int]) -> None:
        self._users = np.zeros(2, np.int32)  # by token id; the last entry stands for all ids beyond
        self.add(always)

    def add(self, ids: frozenset[int]) -> None:
        if not ids:
            return
        known = [id for id in ids if 0 <= id < self.MOST]
        if known and max(known) >= len(self._users) - 1:
            grown = np.zeros(max(known) + 2, np.int32)
            grown[: len(self._users)] = self._users
            self._users = grown
        for id in known:
            self._users[id] += 1

    def remove(self, ids: frozenset[int]) -> None:
        for id in ids:
            if 0 <= id < self.MOST:
                self._users[id] -= 1

    def hits(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        users = self._users[np.clip(tokens, 0, len(self._users) - 1)]
        return users > 0
