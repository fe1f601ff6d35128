"""Random traffic through a whole engine, and transformers on the same weights to judge every token of it."""

import pydoc_data.topics
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from corekit import Client, ids

from runtime.engine.batch import SlotTable
from runtime.engine.core import EngineCore
from runtime.engine.cpu import CpuRunner
from runtime.engine.fake import FakeRunner
from runtime.engine.sampling import gumbel, row_keys
from runtime.engine.scheduler import EngineConfig
from runtime.messages import Opened, SamplingParams, Submit, TokenLogprobs
from runtime.models.config import ModelConfig

# Both sides compute logits in float32, in another order. Each may be off by this much.
LOGIT_ERROR = 5e-4
# So two scores that are nearer than this may stand in either order: the only excuse for another token.
NEAR_TIE = 2 * LOGIT_ERROR
# And a rare one.
NEAR_TIE_SHARE = 0.01


class Near(NamedTuple):
    """A token that transformers would not have chosen."""

    prompt_tokens: int
    position: int  # in the output
    gap: float  # how much better the best one scores


class Reference:
    """A transformers model, float32 on CPU."""

    def __init__(self, model: Any, vocab: int) -> None:
        self.model, self.vocab = model.eval(), vocab
        self._judged: dict[Any, list[tuple[list[int], npt.NDArray[np.float32]]]] = {}
        self._generated: dict[tuple[int, ...], list[int]] = {}

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        """Greedy, by transformers' own ``generate``, to the full length."""
        known = self._generated.get(tuple(prompt), [])
        if len(known) >= tokens:
            return known[:tokens]
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        self._generated[tuple(prompt)] = generated = [int(token) for token in out[0, len(prompt) :]]
        return generated

    def logits(self, tokens: Sequence[int], last: int) -> torch.Tensor:
        """Of the ``last`` positions: float32 [last, vocab]."""
        with torch.inference_mode():
            whole: torch.Tensor = self.model(torch.tensor([list(tokens)]), logits_to_keep=last).logits[0].float()
        return whole[-last:]

    def logprobs(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """[tokens, vocab]: what each position says about the next token."""
        logprobs: npt.NDArray[np.float32] = self.logits(tokens, len(tokens)).log_softmax(-1).numpy()
        return logprobs

    def gaps(self, prompt: list[int], tokens: list[int], params: SamplingParams) -> npt.NDArray[np.float32]:
        """For each output token, how much better transformers' choice scores, given what came before: 0 = the same one.

        One pass over prompt and output. If every gap is 0, then by induction ``tokens`` is what generating step by step
        would have yielded. A score is the logit; with a temperature, logit / temperature + the documented noise.
        """
        temperature, seed = params.temperature, params.seed
        known = self._judged.setdefault((tuple(prompt), temperature, seed if temperature else 0), [])
        for longer, gaps in known:
            if longer[: len(tokens)] == tokens:
                return gaps[: len(tokens)]
        if not tokens:
            return np.zeros(0, np.float32)
        scores = self.logits([*prompt, *tokens[:-1]], len(tokens))
        if temperature:
            positions = np.arange(len(prompt), len(prompt) + len(tokens), dtype=np.int32)
            first, second = row_keys(np.full(len(tokens), seed, np.uint64), positions)
            scores = scores / temperature + gumbel(first, second, torch.arange(self.vocab, dtype=torch.int32))
        chosen = scores[torch.arange(len(tokens)), torch.tensor(tokens)]
        gaps = (scores.max(-1).values - chosen).numpy()
        known.append((tokens, gaps))
        return gaps


class Judge:
    """Collects the tokens that differ from transformers' choice, and fails unless each is a near-tie, and rare."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.near: list[Near] = []
        self.tokens = 0

    def __call__(self, prompt: list[int], tokens: list[int], params: SamplingParams) -> None:
        gaps = self.reference.gaps(prompt, tokens, params)
        self.tokens += len(tokens)
        bound = NEAR_TIE / (params.temperature or 1)
        for position in np.flatnonzero(gaps > 0).tolist():
            near = Near(len(prompt), position, float(gaps[position]))
            assert near.gap <= bound, f"another token than transformers': {near}, but a near-tie is at most {bound}"
            self.near.append(near)

    def done(self) -> None:
        assert self.tokens, "nothing was judged"
        assert len(self.near) <= max(2, NEAR_TIE_SHARE * self.tokens), f"too many near-ties: {self.near}"


@cache
def english() -> str:
    """A long text that every Python brings along."""
    return "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


@dataclass
class Ask:
    prompt: list[int]
    params: SamplingParams
    aborts_after: int = -1  # tokens of output (0: also while it waits); -1 = never
    comes_back: bool = False  # after the abort, with what it has, as the frontend does after a death
    priority: int = 0


@dataclass
class Got:
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    cached_tokens: int = 0


class Traffic:
    """Seeded random requests. ``text`` is what prompts are cut from."""

    def __init__(self, seed: int, text: Sequence[int], longest: int) -> None:
        self.draw, self.text, self.longest = random.Random(seed), text, longest

    def prompt(self, tokens: int = 0) -> list[int]:
        """Most are short, some as long as allowed."""
        tokens = tokens or int(self.longest ** self.draw.random())
        start = self.draw.randrange(max(1, len(self.text) - tokens))
        return list(self.text[start : start + tokens])

    def asks(self, count: int, output: int, temperature: float = 0.0, aborts: float = 0.0) -> list[Ask]:
        """Of the prompts a third begins as an earlier one does, or is the same one again."""
        asks: list[Ask] = []
        for _ in range(count):
            prompt = self.prompt()
            if asks and self.draw.random() < 0.35:
                head = self.draw.choice(asks).prompt
                kept = self.draw.choice([len(head), self.draw.randint(1, len(head))])
                prompt = (head[:kept] + prompt)[: self.longest] if self.draw.random() < 0.8 else head
            warm = temperature if self.draw.random() < 0.5 else 0.0
            params = SamplingParams(
                max_tokens=self.draw.randint(1, output),
                temperature=warm,
                seed=self.draw.getrandbits(63),
                ignore_eos=True,
            )
            after = self.draw.randint(0, params.max_tokens - 1) if self.draw.random() < aborts else -1
            asks.append(Ask(prompt, params, after, self.draw.random() < 0.5))
        return asks


class Player:
    """One engine and the clients of all its requests. ``careless``: it promises memory that it will not have."""

    def __init__(self, core: EngineCore, seed: int = 0, careless: bool = False) -> None:
        self.core, self.draw, self.careless = core, random.Random(seed), careless

    def alone(self, asks: list[Ask]) -> list[Got]:
        return [self.play([ask], at_once=1)[0] for ask in asks]

    def play(self, asks: list[Ask], at_once: int = 16, flushes: float = 0.0) -> list[Got]:
        """All of ``asks`` with staggered arrivals, at most ``at_once`` alive; aborted ones as far as they came."""
        client, had = Client(), [0] * len(asks)  # had: tokens of output before the present attempt
        waiting, alive = list(range(len(asks))), dict[int, int]()  # id -> attempt
        attempts: dict[int, list[int]] = {number: [] for number in waiting}

        def submit(number: int, attempt: int, output: list[int]) -> None:
            ask, had[number] = asks[number], len(output)
            alive[number] = attempt
            attempts[number].append(attempt)
            text, before = ids(ask.prompt), ids(output)
            self.core.submit(Submit("test", number, attempt, text, ask.params, before, priority=ask.priority))

        def output(number: int) -> list[int]:
            return [token for attempt in attempts[number] for token in client.tokens.get((number, attempt), [])]

        rounds = 0
        while waiting or self.core.has_work():
            rounds += 1
            assert rounds < 100_000, "the engine does not come to rest"
            while waiting and len(alive) < at_once and (not alive or self.draw.random() < 0.4):
                submit(waiting.pop(0), 1, [])
            if self.careless:
                self.core.scheduler.caution = 0.0
            client.read(self.core.step())
            if self.draw.random() < flushes:
                self.core.flush()
            for number, attempt in list(alive.items()):
                ask, row = asks[number], client.last.get((number, attempt))
                if row is not None and row.finish is not None:
                    assert row.finish != "error", row.error
                    del alive[number]
                elif attempt == 1 and 0 <= ask.aborts_after <= len(output(number)) and self.draw.random() < 0.5:
                    self.core.abort("test", number, attempt)
                    del alive[number]
                    if ask.comes_back:
                        submit(number, 2, output(number))
        self.core.check()
        pool = self.core.scheduler.memory.pool
        assert pool.used == 0 and pool.free + pool.cached == pool.total
        return [self._got(client, number, attempts[number], output(number)) for number in range(len(asks))]

    def _got(self, client: Client, number: int, attempts: list[int], tokens: list[int]) -> Got:
        last = client.last.get((number, attempts[-1]))
        opened: Opened | None = client.opened.get((number, attempts[-1]))
        rows = [row for row in client.rows if row.id == number]
        return Got(
            tokens,
            last.finish if last else None,
            [entry for row in rows for entry in row.logprobs],
            [entry for row in rows for entry in row.prompt_logprobs],
            opened.cached_tokens if opened else 0,
        )


def judged(judge: Judge, asks: list[Ask], answers: list[Got]) -> None:
    """Every answer is whole, or aborted on the way, and right as far as it goes."""
    for ask, got in zip(asks, answers, strict=True):
        gone = ask.aborts_after >= 0 and not ask.comes_back
        assert got.finish == "length" or (gone and got.finish is None)
        assert len(got.tokens) == ask.params.max_tokens or got.finish is None
        judge(ask.prompt, got.tokens, ask.params)


class Checkpoint:
    """A model's files, and its reference with what that has judged already."""

    def __init__(self, folder: Path, model: Any, text: Sequence[int]) -> None:
        self.folder, self.text = folder, text
        self.config = ModelConfig.from_folder(folder)
        self.reference = Reference(model, self.config.vocab_size)


class Subject:
    """The engines on a checkpoint, by torch or by the native kernels."""

    def __init__(self, checkpoint: Checkpoint, use_native: bool) -> None:
        self.folder, self.config, self.text = checkpoint.folder, checkpoint.config, checkpoint.text
        self.reference, self.use_native = checkpoint.reference, use_native

    def traffic(self, seed: int, longest: int) -> Traffic:
        return Traffic(seed, self.text, longest)

    def table(self, page_tokens: int = 16, slots: int = 16) -> SlotTable:
        return SlotTable(slots, min(self.config.context_tokens, 2048), page_tokens)

    def runner(self, page_tokens: int = 16, kv_tokens: int = 16384) -> CpuRunner:
        return CpuRunner(
            self.folder,
            self.config,
            self.table(page_tokens),
            dtype="float32",
            threads=1,
            kv_tokens=kv_tokens,
            use_native=self.use_native,
        )

    @staticmethod
    def core(runner: CpuRunner | FakeRunner, chunk: int = 2048, **options: Any) -> EngineCore:
        """A fresh engine on a runner that is at rest. ``chunk``: the most tokens of a prompt in one step."""
        config = EngineConfig(step_tokens=max(chunk, runner.slots.slots), mixed_tokens=chunk, **options)
        return EngineCore(runner, runner.slots, config)
