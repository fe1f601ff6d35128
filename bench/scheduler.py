"""What the scheduler costs: microseconds of one core per step, with a runner that computes nothing.

    python bench/scheduler.py [--steps 400] [--quick]

*decode*: so many requests run, all of them decode, nobody comes or goes. *churn*: outputs of 64 to 320 tokens, and
whoever ends is replaced by a request with a 128-token prompt, half of them with a prefix that is cached. *cached*: as
churn, with 100,000 other prefixes in the cache, on a pool so full that every new page is an evicted one. The runner's
time is taken off; *message* is the step's message to the detokenizer, encoded, not part of the step's figure.
"""

import argparse
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from runtime.engine.batch import Batch, SlotTable, StepResult
from runtime.engine.core import EngineCore
from runtime.engine.scheduler import EngineConfig
from runtime.messages import SamplingParams, StepTokens, Submit

PAGE_TOKENS = 16
CONTEXT_TOKENS = 2048
BAR_US = 300  # at 256 running requests


class NullRunner:
    """Any token but an end token, at once. Notes the time that is not the scheduler's."""

    def __init__(self, num_pages: int, depth: int) -> None:
        self.num_pages, self.depth, self.page_tokens = num_pages, depth, PAGE_TOKENS
        self._tokens = np.random.default_rng(0).integers(10, 32_000, 1 << 16, dtype=np.int32)
        self.seconds = 0.0

    def launch(self, batch: Batch) -> Batch:
        return batch

    def collect(self, batch: Batch) -> StepResult:
        started = time.perf_counter()
        first = batch.step * 97 % 1000
        result = StepResult(np.where(batch.sample, self._tokens[first : first + len(batch.slots)], -1), {}, {})
        self.seconds += time.perf_counter() - started
        return result

    def memory(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


@dataclass
class Result:
    name: str
    running: int
    depth: int
    median_us: float
    p99_us: float
    message_us: float
    phases_us: dict[str, float]


class Load:
    """An engine with ``running`` requests on it."""

    def __init__(self, running: int, depth: int, cached_prefixes: int = 0) -> None:
        self.rng = np.random.default_rng(1)
        pages = running * 40 + cached_prefixes * 2
        self.runner = NullRunner(pages, depth)
        table = SlotTable(running, CONTEXT_TOKENS, PAGE_TOKENS)
        config = EngineConfig(step_tokens=running + 8192, mixed_tokens=8192, max_queued_requests=1 << 30)
        self.core = EngineCore(self.runner, table, config, eos_token_ids=(2,))
        self.running = running
        self.next = 0
        for _ in range(cached_prefixes):
            self._cache(self.rng.integers(10, 32_000, 2 * PAGE_TOKENS, dtype=np.int32))
        if cached_prefixes:  # and fill what is left, so that every page that is taken must be evicted first
            left = self.core.scheduler.memory.pool.free // 2
            for _ in range(left):
                self._cache(self.rng.integers(10, 32_000, 2 * PAGE_TOKENS, dtype=np.int32))
        self.shared = self.rng.integers(10, 32_000, 96, dtype=np.int32)

    def _cache(self, tokens: "np.ndarray[Any, np.dtype[np.int32]]") -> None:
        memory = self.core.scheduler.memory
        tree, pages = memory.tree, memory.pool.take(2)
        tree.lock(tree.root)
        node, known = tree.extend(tree.root, tokens, pages)
        memory.pool.keep(2 - len(known))
        tree.unlock(node)

    def submit(self, max_tokens: int) -> None:
        self.next += 1
        prompt = self.rng.integers(10, 32_000, 128, dtype=np.int32)
        if self.next % 2:
            prompt[:96] = self.shared
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.core.submit(Submit("ipc:///run/frontend-0", self.next, 1, prompt.tobytes(), params))

    def churn(self, message: StepTokens | None) -> None:
        for row in message.news if message is not None else ():
            if row.finish is not None:
                self.submit(int(self.rng.integers(64, 320)))

    def run(self, name: str, steps: int, churn: bool) -> Result:
        for _ in range(self.running):
            self.submit(int(self.rng.integers(64, 320)) if churn else CONTEXT_TOKENS)
        for _ in range(64):
            message = self.core.step()
            if churn:
                self.churn(message)
        encoder = msgspec.msgpack.Encoder()
        before, taken, messages = self.core.stats(), [], []
        for _ in range(steps):
            self.runner.seconds = 0.0
            started = time.perf_counter()
            message = self.core.step()
            ended = time.perf_counter()
            taken.append(ended - started - self.runner.seconds)
            encoder.encode(message)
            messages.append(time.perf_counter() - ended)
            if churn:
                self.churn(message)
        after = self.core.stats()
        phases = {
            phase: (after[f"phase_{phase}_s"] - before[f"phase_{phase}_s"]) / steps * 1e6
            for phase in ("schedule", "launch", "output")
        }
        us, message_us = np.array(taken) * 1e6, float(np.median(messages)) * 1e6
        median, p99 = float(np.median(us)), float(np.percentile(us, 99))
        return Result(name, self.running, self.runner.depth, median, p99, message_us, phases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--quick", action="store_true", help="256 requests only")
    options = parser.parse_args()
    sizes = [256] if options.quick else [1, 16, 64, 256, 1024, 4096]
    print("load     running depth  step us   p99 us  message us   schedule / launch / output us (mean)")
    for name, churn, prefixes in (("decode", False, 0), ("churn", True, 0), ("cached", True, 100_000)):
        for running in sizes:
            for depth in (1, 2):
                result = Load(running, depth, prefixes).run(name, options.steps, churn)
                phases = " / ".join(f"{us:.0f}" for us in result.phases_us.values())
                bar = f"   bar {BAR_US}: {'met' if result.median_us <= BAR_US else 'MISSED'}" if running == 256 else ""
                print(
                    f"{name:<8}{running:>8}{depth:>6}{result.median_us:>9.0f}{result.p99_us:>9.0f}"
                    f"{result.message_us:>12.0f}   {phases}{bar}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
