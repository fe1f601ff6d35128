"""An engine core over the fake runner, and its client, for the tests of the core and the scheduler."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from runtime.engine.batch import SlotTable
from runtime.engine.core import EngineCore
from runtime.engine.fake import FakeRunner, continuation
from runtime.engine.scheduler import EngineConfig
from runtime.messages import Opened, SamplingParams, StepTokens, Submit, TokenRow

VOCAB = 40
EOS = (7, 11)


def ids(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


@dataclass
class Client:
    """What came out, by (id, attempt)."""

    opened: dict[tuple[int, int], Opened] = field(default_factory=dict)
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    last: dict[tuple[int, int], TokenRow] = field(default_factory=dict)
    rows: list[TokenRow] = field(default_factory=list)

    def read(self, message: StepTokens | None) -> None:
        if message is None:
            return
        for opened in message.opened:
            key = opened.id, opened.attempt
            assert key not in self.opened, "opened twice"
            self.opened[key] = opened
        seen = set()
        for row in message.rows:
            key = row.id, row.attempt
            assert key not in seen, "two rows in one message"
            seen.add(key)
            assert key in self.opened, "a row before its opening"
            assert key not in self.last or self.last[key].finish is None, "a row after the last word"
            self.tokens.setdefault(key, []).extend(row.tokens)
            self.last[key] = row
            self.rows.append(row)


class Bench:
    """An engine over a fake runner, and its client."""

    def __init__(
        self,
        pages: int = 64,
        page_tokens: int = 4,
        slots: int = 8,
        context: int = 128,
        depth: int = 1,
        clock: object = None,
        vocab: int = VOCAB,
        **config: object,
    ) -> None:
        self.table = SlotTable(slots, context, page_tokens)
        self.config = EngineConfig(**{"step_tokens": 64, "mixed_tokens": 32, **config})
        self.runner = FakeRunner(self.table, pages, depth, vocab, self.config.step_tokens)
        self.core = EngineCore(self.runner, self.table, self.config, EOS, clock=clock)
        self.client = Client()
        self.sent: dict[tuple[int, int], tuple[list[int], SamplingParams]] = {}

    def submit(self, id: int, prompt: list[int], attempt: int = 0, output: list[int] | None = None, **more) -> None:
        names = ("priority", "cache_salt", "budget_s")
        extra = {name: more.pop(name) for name in names if name in more}
        params = SamplingParams(**more)
        self.sent[id, attempt] = prompt, params
        self.core.submit(Submit("here", id, attempt, ids(prompt), params, ids(output or []), **extra))

    def step(self) -> StepTokens | None:
        message = self.core.step()
        self.client.read(message)
        return message

    def drain(self, most: int = 20_000) -> None:
        for _ in range(most):
            if not self.core.has_work():
                break
            self.step()
        assert not self.core.has_work(), "the engine does not come to rest"
        self.core.check()
        pool = self.core.scheduler.memory.pool
        assert pool.used == 0 and pool.free + pool.cached == pool.total

    def expected(self, id: int, attempt: int = 0) -> tuple[list[int], str]:
        prompt, params = self.sent[id, attempt]
        return continuation(prompt, params, EOS, self.runner.vocab, self.core.max_tokens)

    def assert_right(self, id: int, attempt: int = 0, had: int = 0) -> None:
        tokens, finish = self.expected(id, attempt)
        assert self.client.tokens.get((id, attempt), []) == tokens[had:]
        assert self.client.last[id, attempt].finish == finish


depths = pytest.mark.parametrize("depth", [1, 2], ids=["strict", "overlap"])
