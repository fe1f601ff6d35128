"""A runner without a model, for tests and benches of the scheduler: exact about memory, cheap about everything else.

The KV of a position is a number that depends on all tokens up to it, and the next token is a function of the last
position's KV, the position and the seed. So a row that reads a page that is not its own, or not written, or written
by another text, can't get the right token; and it is told at once, because each step verifies all the KV it reads.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.engine.batch import F32, I32, Batch, SlotTable, StepResult
from runtime.messages import FinishReason, SamplingParams

U64 = npt.NDArray[np.uint64]

# A text whose last token is this one makes the fake's logits not finite.
POISON = 666_666

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def kv_of(tokens: I32) -> U64:
    """[n] -> [n]: a number for each position that depends on the tokens up to it."""
    with np.errstate(over="ignore"):
        places = (2 * np.arange(len(tokens), dtype=np.uint64) + np.uint64(1)) * _ODD
        sums: U64 = np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * places, dtype=np.uint64)
        return sums


def next_tokens(kv: U64, positions: I32, seeds: U64, vocab: int) -> I32:
    """The token at each of ``positions`` [n], from the KV of the position before it."""
    with np.errstate(over="ignore"):
        bits = (kv ^ seeds) * _MIX + positions.astype(np.uint64) * _ODD
        bits = (bits ^ (bits >> np.uint64(31))) * _MIX
        tokens: I32 = ((bits >> np.uint64(33)) % np.uint64(vocab)).astype(np.int32)
        return tokens


def continuation(
    prompt: Iterable[int], params: SamplingParams, eos: Iterable[int], vocab: int, most_tokens: int
) -> tuple[list[int], FinishReason]:
    """What a request that runs alone, uncached, in one piece must yield: its tokens and why it ends."""
    tokens = list(prompt)
    prompt_tokens = len(tokens)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    held_back = stops if params.min_tokens else set()
    while len(tokens) < min(prompt_tokens + params.max_tokens, most_tokens):
        kv = kv_of(np.array(tokens, np.int32))[-1:]
        place = np.array([len(tokens)], np.int32)
        token = int(next_tokens(kv, place, np.array([params.seed], np.uint64), vocab)[0])
        while len(tokens) < prompt_tokens + params.min_tokens and token in held_back:
            token = (token + 1) % vocab
        tokens.append(token)
        if token in stops:
            return tokens[prompt_tokens:], "stop"
    return tokens[prompt_tokens:], "length"


@dataclass(slots=True)
class _Flight:
    batch: Batch
    pages: I32  # [n, context_pages], as they were at launch


class FakeRunner:
    """Computes a step when it is collected, the latest moment; so what a step in flight uses must stay untouched."""

    def __init__(self, table: SlotTable, num_pages: int, depth: int = 1, vocab: int = 64, step_tokens: int = 0) -> None:
        self.depth, self.num_pages, self.page_tokens = depth, num_pages, table.page_tokens
        self.vocab, self.step_tokens = vocab, step_tokens
        self.slots = table
        self._tokens = np.full_like(table.tokens, -7)  # the device's copies
        self._pages = np.full_like(table.pages, -7)
        self._kv: U64 = np.zeros((num_pages, table.page_tokens), np.uint64)
        self._flights: deque[_Flight] = deque()
        self.computed_tokens = 0
        self.largest_prefill = 0  # prompt tokens in a step that also decoded

    def launch(self, batch: Batch) -> _Flight:
        table = self.slots
        self._tokens[batch.new_slots] = table.tokens[batch.new_slots]
        self._pages[batch.new_slots] = table.pages[batch.new_slots]
        self._pages[batch.page_slots, batch.page_indices] = batch.page_values
        flight = _Flight(batch, self._pages[batch.slots])
        self._check(flight)
        self._flights.append(flight)
        assert len(self._flights) <= self.depth, "more steps in flight than the runner said"
        return flight

    def _check(self, flight: _Flight) -> None:
        batch, decodes = flight.batch, flight.batch.decodes
        assert len(np.unique(batch.slots)) == len(batch.slots) > 0
        assert (batch.extend >= 1).all() and (batch.extend[:decodes] == 1).all() and batch.sample[:decodes].all()
        total = int(batch.extend.sum())
        assert not self.step_tokens or total <= self.step_tokens, "over the token budget"
        if decodes:
            self.largest_prefill = max(self.largest_prefill, total - decodes)
        for row, slot in enumerate(batch.slots.tolist()):
            if batch.sample[row] and slot in batch.new_slots:
                end = int(batch.cached[row] + batch.extend[row])
                assert (self._tokens[slot, end:] == -1).all(), "tokens of another request beyond the known ones"
        writes = np.concatenate([self._touched(flight, row, int(batch.cached[row])) for row in range(len(batch.slots))])
        assert len(np.unique(writes)) == len(writes), "two rows write one page"
        for earlier in self._flights:
            for row, slot in enumerate(earlier.batch.slots.tolist()):
                others = np.flatnonzero(batch.slots != slot).tolist()
                read, written = (
                    self._touched(earlier, row, 0),
                    self._touched(earlier, row, int(earlier.batch.cached[row])),
                )
                for other in others:
                    writes = self._touched(flight, other, int(batch.cached[other]))
                    assert not np.isin(writes, read).any(), "a page that a step in flight reads was given away"
                    reads = self._touched(flight, other, 0)
                    assert not np.isin(reads, written).any(), "a page that a step in flight writes is shared already"

    def _touched(self, flight: _Flight, row: int, first: int) -> I32:
        """The pages that a row uses from position ``first`` to its end."""
        end = int(flight.batch.cached[row] + flight.batch.extend[row])
        pages: I32 = flight.pages[row, first // self.page_tokens : -(-end // self.page_tokens)]
        return pages

    def collect(self, handle: _Flight) -> StepResult:
        assert self._flights.popleft() is handle, "steps are collected in order"
        batch, table = handle.batch, self.slots
        sampled = np.full(len(batch.slots), -1, np.int32)
        result = StepResult(sampled, {}, {})
        ends = batch.cached + batch.extend
        texts = [self._tokens[slot, :end] for slot, end in zip(batch.slots, ends.tolist(), strict=True)]
        kvs = [kv_of(text) for text in texts]
        for row, (text, kv) in enumerate(zip(texts, kvs, strict=True)):
            assert (text >= 0).all(), "a row computes a token that nobody has sampled yet"
            cached, end = int(batch.cached[row]), int(ends[row])
            places = np.arange(end)
            where = handle.pages[row, places // self.page_tokens], places % self.page_tokens
            assert np.array_equal(self._kv[where][:cached], kv[:cached]), "a row's cached KV is not its own"
            self._kv[where[0][cached:], where[1][cached:]] = kv[cached:]
        self.computed_tokens += int(batch.extend.sum())
        for row, slot in enumerate(batch.slots.tolist()):
            end, text, kv = int(ends[row]), texts[row], kvs[row]
            asked = int(table.prompt_logprobs[slot])
            if asked >= 0 and row >= batch.decodes:
                result.prompt_logprobs[row] = self._scores(kv[batch.cached[row] :], asked)
            if not batch.sample[row]:
                continue
            seeds = table.seed[slot : slot + 1]
            token = int(next_tokens(kv[-1:], np.array([end], np.int32), seeds, self.vocab)[0])
            while end < table.min_length[slot] and token in table.held_back[slot]:
                token = (token + 1) % self.vocab
            sampled[row] = -2 if text[-1] == POISON else token
            self._tokens[slot, end] = token
            if table.logprobs[slot] >= 0:
                logprobs, ids, values = self._scores(kv[-1:], int(table.logprobs[slot]))
                result.logprobs[row] = float(logprobs[0]), ids[0], values[0]
        return result

    def _scores(self, kv: U64, top: int) -> tuple[F32, I32, F32]:
        logprobs: F32 = -(kv % np.uint64(1000)).astype(np.float32) / np.float32(100)
        ids = np.tile(np.arange(top, dtype=np.int32), (len(kv), 1))
        return logprobs, ids, -ids.astype(np.float32)

    def memory(self) -> dict[str, int]:
        return {"kv": self._kv.nbytes}

    def close(self) -> None:
        pass
