"""The whole engine against transformers on the same weights, float32: the same tokens whatever happens around them.

A seeded share of the traffic runs always; all of it with ``--full`` (``make test-full``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from equalitykit import LOGIT_ERROR, Ask, Checkpoint, Got, Judge, Player, Subject, Traffic, english, judged
from modelkit import VOCAB, built_library, save_checkpoint

from runtime.engine.cpu import CpuRunner
from runtime.engine.fake import FakeRunner
from runtime.messages import SamplingParams
from runtime.names import DEFAULT_SOURCE
from runtime.sources import resolve
from runtime.tokenizer import Tokenizer

PAGES, CHUNKS = (1, 16, 64), (16, 256, 2048)
TINY = ("llama3", "qwen2", "qwen3")  # an untied head and llama3's rope scaling; biases; norms of q and k


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["torch", "native"])
def use_native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bool:
    if request.param == "native":
        built_library(tmp_path_factory.mktemp("native"))
    return bool(request.param == "native")


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    """The default model; fetched where the cache has it not."""
    import transformers

    files = resolve(DEFAULT_SOURCE)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(files.folder, dtype=torch.float32)
    return Checkpoint(Path(files.folder), model, Tokenizer(Path(files.tokenizer)).encode(english()[:200_000]))


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folders = {family: tmp_path_factory.mktemp(family) for family in TINY}
    text = np.random.default_rng(0).integers(3, VOCAB, 20_000).tolist()
    return {family: Checkpoint(folder, save_checkpoint(folder, family), text) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def real(smollm2: Checkpoint, use_native: bool) -> Subject:
    return Subject(smollm2, use_native)


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest, families: dict[str, Checkpoint], use_native: bool) -> Subject:
    return Subject(families[request.param], use_native)


def greedy(traffic: Traffic, count: int, tokens: int) -> list[Ask]:
    """Prompts of all lengths, the shortest and the longest among them."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    lengths = np.unique(np.geomspace(1, traffic.longest, count).astype(int)).tolist()
    lengths += [traffic.draw.randint(1, traffic.longest) for _ in range(count - len(lengths))]
    traffic.draw.shuffle(lengths)
    return [Ask(traffic.prompt(length), params) for length in lengths]


def assert_equals_generate(subject: Subject, count: int, longest: int, tokens: int) -> None:
    asks = greedy(subject.traffic(1, longest), count, tokens)
    core = subject.core(subject.runner())
    judge, player = Judge(subject.reference), Player(core)
    alone = player.alone(asks)
    core.flush()
    together = player.play(asks)
    for answers in (alone, together):
        judged(judge, asks, answers)
    near = {(near.prompt_tokens, near.position) for near in judge.near}
    for ask, one, other in zip(asks, alone, together, strict=True):
        expected = subject.reference.generate(ask.prompt, tokens)
        for got in (one, other):
            same = [a == b for a, b in zip(got.tokens, expected, strict=True)]
            assert all(same) or (len(ask.prompt), same.index(False)) in near
    judge.done()


def test_greedy_tokens_are_those_of_generate_on_the_real_model(real: Subject, full: bool) -> None:
    assert_equals_generate(real, *((40, 900, 24) if full else (4, 400, 6)))


def test_greedy_tokens_are_those_of_generate_on_other_families(tiny: Subject, full: bool) -> None:
    assert_equals_generate(tiny, *((40, 900, 24) if full else (20, 900, 12)))


@dataclass(frozen=True)
class Storm:
    """Arrivals, aborts and returns at random, in a pool that holds the longest request and hardly more."""

    page_tokens: int
    chunks: Sequence[int]
    count: int
    longest: int
    output: int

    @property
    def pool_tokens(self) -> int:
        return max(self.longest + self.output, 5 * self.page_tokens)

    def blow(
        self, subject: Subject, runner: CpuRunner | FakeRunner, chunk: int, seed: int
    ) -> tuple[list[Ask], list[Got], npt.NDArray[np.float64]]:
        """What was asked, what came, and how often the worst happened."""
        odd = CHUNKS.index(chunk) % 2
        core = subject.core(runner, chunk, policy=("fcfs", "lpm")[odd], eviction=("lru", "lfu")[odd])
        asks = subject.traffic(seed, self.longest).asks(self.count, self.output, temperature=0.7, aborts=0.3)
        answers = Player(core, chunk, careless=True).play(asks, flushes=0.005)
        stats = core.stats()
        names = ("retractions", "evicted_pages", "cached_tokens", "aborted_requests")
        return asks, answers, np.array([stats[name] for name in names])

    def hard_seed(self, subject: Subject) -> int:
        """A seed under which everything happens, found by a runner that computes nothing: who runs when does not
        depend on which tokens come."""
        for seed in range(self.page_tokens, self.page_tokens + 100):
            runner = FakeRunner(subject.table(self.page_tokens), -(-self.pool_tokens // self.page_tokens))
            if np.sum([self.blow(subject, runner, chunk, seed)[2] for chunk in self.chunks], axis=0).all():
                return seed
        raise AssertionError("no such traffic was found")

    def assert_survived(self, subject: Subject) -> None:
        seed, runner = self.hard_seed(subject), subject.runner(self.page_tokens, kv_tokens=self.pool_tokens)
        judge, seen, happened = Judge(subject.reference), dict[int, list[int]](), np.zeros(4)
        for chunk in self.chunks:
            asks, answers, stats = self.blow(subject, runner, chunk, seed)
            judged(judge, asks, answers)
            happened += stats
            if subject.use_native:  # which rounds a row the same way in any batch
                for number, got in enumerate(answers):
                    shorter, longer = sorted((seen.get(number, []), got.tokens), key=len)
                    assert longer[: len(shorter)] == shorter
                    seen[number] = longer
        judge.done()
        assert happened.all()


@pytest.mark.parametrize("page_tokens", PAGES)
def test_any_traffic_on_the_real_model(real: Subject, page_tokens: int, full: bool) -> None:
    if full:
        storm = Storm(page_tokens, CHUNKS, count=200, longest=900, output=40)
    else:
        long = page_tokens == 64
        storm = Storm(
            page_tokens,
            [CHUNKS[PAGES.index(page_tokens)]],
            count=8 if long else 6,
            longest=150 if long else 80,
            output=50 if long else 20,
        )
    storm.assert_survived(real)


@pytest.mark.parametrize("page_tokens", PAGES)
def test_any_traffic_on_other_families(tiny: Subject, page_tokens: int, full: bool) -> None:
    count, longest, output = (200, 600, 120) if full else (14, 150, 60)
    Storm(page_tokens, CHUNKS, count, longest, output).assert_survived(tiny)


def test_the_cache_changes_no_token(tiny: Subject) -> None:
    runner, judge = tiny.runner(), Judge(tiny.reference)
    asks = tiny.traffic(5, 600).asks(60, 20, temperature=0.9)
    answers: list[list[Got]] = []
    for prefix_cache in (True, False):
        core = tiny.core(runner, 64, prefix_cache=prefix_cache)
        answers.append(Player(core, 3).play(asks))
        judged(judge, asks, answers[-1])
        assert bool(core.stats()["cached_tokens"]) == prefix_cache
    judge.done()
    if tiny.use_native or not judge.near:
        assert [got.tokens for got in answers[0]] == [got.tokens for got in answers[1]]


def test_a_seed_draws_the_same_alone_in_a_batch_and_after_retraction(tiny: Subject) -> None:
    roomy, tight = tiny.runner(), tiny.runner(kv_tokens=768)
    asks = tiny.traffic(9, 600).asks(24, 60)
    for ask in asks:  # everything that the sampler can do, at once
        ask.params = SamplingParams(
            max_tokens=ask.params.max_tokens,
            temperature=0.9,
            top_p=0.95,
            top_k=50,
            min_p=0.01,
            repetition_penalty=1.1,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            logit_bias={7: 2.0, 9: -3.0},
            seed=ask.params.seed,
            min_tokens=1,
        )
    alone = [got.tokens for got in Player(tiny.core(roomy)).alone(asks)]
    assert [got.tokens for got in Player(tiny.core(roomy, 100), 1).play(asks)] == alone
    core = tiny.core(tight, 100)
    assert [got.tokens for got in Player(core, 2).play(asks)] == alone
    assert core.stats()["retractions"] > 0


def test_giving_way_to_higher_priorities_changes_no_token(tiny: Subject) -> None:
    runner = tiny.runner()
    asks = tiny.traffic(11, 400).asks(24, 40, temperature=0.9)
    alone = [got.tokens for got in Player(tiny.core(runner)).alone(asks)]
    for number, ask in enumerate(asks):
        ask.priority = number % 4
    core = tiny.core(runner, 64, max_running_requests=2)
    assert [got.tokens for got in Player(core, 1).play(asks)] == alone
    assert core.stats()["retractions"] > 0


def assert_logprobs(subject: Subject, count: int, longest: int) -> None:
    """Through chunks, cached prefixes (which such a request does not use) and neighbours that want none."""
    asks = subject.traffic(11, longest).asks(count, 8)
    for number, ask in enumerate(asks):
        if number % 3:
            ask.params = SamplingParams(
                max_tokens=ask.params.max_tokens, temperature=0, ignore_eos=True, logprobs=3, prompt_logprobs=number % 3
            )
    answers = Player(subject.core(subject.runner(), 37), 4).play(asks, at_once=4)
    for ask, got in zip(asks, answers, strict=True):
        if ask.params.logprobs < 0:
            assert not got.logprobs and not got.prompt_logprobs
            continue
        assert len(got.logprobs) == len(got.tokens) and len(got.prompt_logprobs) == len(ask.prompt)
        assert got.prompt_logprobs[0] is None
        tokens = ask.prompt + got.tokens
        expected = subject.reference.logprobs(tokens)
        for at, entry in enumerate([*got.prompt_logprobs, *got.logprobs][1:]):
            assert entry is not None and entry.token == tokens[at + 1]
            top = ask.params.prompt_logprobs if at + 1 < len(ask.prompt) else ask.params.logprobs
            row = expected[at]
            assert entry.logprob == pytest.approx(row[entry.token], abs=LOGIT_ERROR)
            np.testing.assert_allclose(entry.top_logprobs, np.sort(row)[::-1][:top], atol=LOGIT_ERROR)
            np.testing.assert_allclose(row[list(entry.top_tokens)], entry.top_logprobs, atol=LOGIT_ERROR)


def test_logprobs_on_the_real_model(real: Subject, full: bool) -> None:
    assert_logprobs(real, *((30, 900) if full else (4, 80)))


def test_logprobs_on_other_families(tiny: Subject) -> None:
    assert_logprobs(tiny, 15, 300)
