"""The engine without its loop: requests in, one scheduling round at a time, one message of tokens out per round.

A round plans and launches a step, then collects the oldest step in flight. With a runner of depth 1 that is the same
step. With depth 2 it is the one before: the device computes step N + 1 while this code reads step N's tokens. A token
that has not been read stands as -1 in the slot table, and a request that turns out to have ended has one more row
in flight, whose token is dropped and whose pages wait for it.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from runtime.engine.batch import Batch, Runner, SlotTable, StepResult
from runtime.engine.news import News
from runtime.engine.request import Key, Request
from runtime.engine.scheduler import Counts, EngineConfig, Scheduler
from runtime.engine.stops import StopIds
from runtime.messages import ErrorCode, FinishReason, SamplingParams, StepTokens, Submit, TokenLogprobs


class WarmUp(NamedTuple):
    """Requests that run before any client's: prompts of ``prompt_tokens``, one more, two more..."""

    requests: int = 1
    prompt_tokens: int = 16
    params: SamplingParams = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)


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
        # The longest a request can become: its row and the pool hold it. The last token needs no KV.
        self.max_tokens = min(slots.context_tokens, runner.num_pages * slots.page_tokens + 1)
        self._requests: dict[Key, Request] = {}
        self._arrivals = 0
        self._deadlines: list[tuple[float, int, Key]] = []  # (when, arrival, key)
        self._flights: deque[tuple[Batch, Any]] = deque()
        self._news = News(self.scheduler.rows)
        self._stops = StopIds(self._eos)
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
        request = Request.of(submit, self._eos, self.max_tokens)
        self._arrivals += 1
        request.arrival = self._arrivals
        refusal, code = self._refusal(submit, request)
        if refusal:
            self._news.error(request, code, refusal)
            return
        if request.resumed_tokens and request.ends_with(int(request.tokens[-1]), len(request.tokens) - 1):
            self._news.row(request, (), "stop", stop_token=True)
            return
        if len(request.tokens) >= request.limit and request.scores is None:
            self._news.row(request, (), "length")
            return
        self._requests[key] = request
        self._stops.add(request.stops)
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
            self._news.error(request, "deadline", what)

    def flush(self) -> int:
        """Drop cached prefixes that nobody uses. Returns how many pages that were."""
        return self.scheduler.memory.flush()

    def has_work(self) -> bool:
        return bool(self._requests or self._flights or self._news)

    def warm_up(self, waves: Sequence[WarmUp] = (WarmUp(),)) -> None:
        """Run short requests through the empty engine, so that the first client's does not find everything cold.

        Each wave is admitted while those before it decode: steps of prompts alone, of prompts and decodes, of decodes.
        """
        number = 0
        for wave in waves:
            for i in range(min(wave.requests, self.table.slots)):
                tokens = max(min(wave.prompt_tokens + i, self.max_tokens - wave.params.max_tokens), 1)
                self.submit(Submit("", number, 0, np.zeros(tokens, np.int32).tobytes(), wave.params))
                number += 1
            self.step()
            self.step()
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
            self._news.open(request, cached_tokens)
        self.scheduler.admitted.clear()
        if batch is not None:
            self._flights.append((batch, self.runner.launch(batch)))
            launched = collected = time.perf_counter()
        if self._flights and (batch is None or len(self._flights) >= self.runner.depth):
            batch, handle = self._flights.popleft()
            result = self.runner.collect(handle)
            collected = time.perf_counter()
            self._read(batch, result)
        message = self._news.message()
        if not self._requests:
            self._news.forget_origins()
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
        notable = self._stops.hits(tokens) | rows.verbose[slots] | (tokens < 0) | (ends + 1 >= rows.limit[slots])
        notable[batch.decodes :] = True
        plain = live & ~notable
        self._news.plain(slots[plain], tokens[plain])
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
            self._news.error(request, "not_finite", f"{what}; this request is lost, others are not concerned")
            return
        if request.scores is not None:
            self._read_scores(request, row, batch, result)
        if row >= batch.decodes:
            self.scheduler.prefilled(request)
        if not sampled:
            if end >= request.limit:  # only its prompt was wanted
                self._drop(request)
                self._news.row(request, (), "length")
            return
        stop = request.ends_with(token, end)
        finish: FinishReason | None = "stop" if stop else "length" if end + 1 >= request.limit else None
        logprobs: tuple[TokenLogprobs, ...] = ()
        if row in result.logprobs:
            logprob, ids, values = result.logprobs[row]
            logprobs = (TokenLogprobs(token, logprob, tuple(ids.tolist()), tuple(values.tolist())),)
        if finish is not None:
            self._drop(request)
        self._news.row(request, (token,), finish, stop_token=stop, logprobs=logprobs)

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
        self._stops.remove(request.stops)

    def _refusal(self, submit: Submit, request: Request) -> tuple[str, ErrorCode]:
        """Why this request can never run, or not now; empty if it can."""
        prompt, pool_tokens = request.prompt_tokens, self.scheduler.memory.pool.total * self.table.page_tokens
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
        scheduler, memory, counts = self.scheduler, self.scheduler.memory, self._counts
        return {
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.line),
            "kv_pages_free": memory.pool.free,
            "kv_pages_cached": memory.pool.cached,
            "kv_pages_used": memory.pool.used,
            "kv_pages_evictable": memory.tree.evictable_pages,
            "caution": scheduler.caution,
            "steps": counts.steps,
            "computed_tokens": counts.computed_tokens,
            "generated_tokens": counts.generated_tokens,
            "aborted_requests": counts.aborted_requests,
            "prompt_tokens": scheduler.counts.prompt_tokens,
            "cached_tokens": scheduler.counts.cached_tokens,
            "retractions": scheduler.counts.retractions,
            "evicted_pages": memory.evicted_pages,
            "phase_schedule_s": counts.schedule_s,
            "phase_launch_s": counts.launch_s,
            "phase_collect_s": counts.collect_s,
            "phase_output_s": counts.output_s,
        }

    def check(self) -> None:
        """Assert the invariants of everything that owns pages and slots. Walks the whole cache: for idle moments."""
        self.scheduler.check()
        assert len(self._requests) == len(self.scheduler.running) + len(self.scheduler.line)
