"""An engine in this process and its load: throughput and latency, next to what the machine could do at best."""

import gc
import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property

from ..config import Config
from ..engine.build import build
from ..engine.cpu_info import usable_cores
from ..messages import SamplingParams, Submit
from ..models.config import ModelConfig, ModelError
from ..sources import ModelFiles
from .report import BenchError, Figure, progress
from .roofline import Costs, Limit, Machine, Work, measure

__all__ = ["Bench", "ModelError"]

LEAST, MOST = 100, 1024  # tokens of prompts and answers, where no length is given
LATENCY_INPUT, LATENCY_OUTPUT, LATENCY_RUNS = 512, 128, 3
PROMPT_IDS = 10_000  # prompts are drawn from the ids up to here
TEMPERATURE = 0.6
_PLAIN_BYTES = 4 * 8  # of a row in StepTokens.plain


class Bench:
    """Raises ModelError where the engine can't be built. ``phases`` is told what its parts took, in seconds."""

    def __init__(self, config: Config, files: ModelFiles, phases: dict[str, float]) -> None:
        with progress("start") as show:
            began, last = time.perf_counter(), "configuration"

            def phase(name: str, done: int | None, total: int | None) -> None:
                nonlocal began, last
                now = time.perf_counter()
                if name != last:
                    phases[last] = phases.get(last, 0.0) + now - began
                    began, last = now, name
                show(name, done, total)

            self.model = ModelConfig.from_folder(files.folder).with_context(config.model.context_tokens)
            self.core, self.info = build(config, files, phase, streams=False)
            phase("", None, None)
        self.threads = config.engine.threads or usable_cores()
        self._ids = 0
        gc.collect()
        gc.freeze()  # as the serving process does

    @property
    def title(self) -> str:
        info = self.info
        where = f"cpu, {self.threads} thread{'' if self.threads == 1 else 's'}" if info.device == "cpu" else info.device
        return f"{info.name}: {info.numbers} on {where}"

    @cached_property
    def machine(self) -> Machine:
        return measure(self.info.device, self.info.dtype, self.threads)

    @cached_property
    def costs(self) -> Costs:
        return Costs.of(self.model, self.info)

    def limit_in_words(self) -> str:
        machine, costs = self.machine, self.costs
        weights, kv, rate = costs.weight_bytes / 1e6, costs.kv_bytes / 1e3, machine.bytes_per_s / 1e9
        layers, head, flops = costs.layer_flops / 1e9, costs.head_flops / 1e9, machine.flops_per_s / 1e12
        return (
            f"The limit is the larger of two times: reading {weights:,.0f} MB of weights a step and {kv:.1f} kB of KV "
            f"a token looked at, at {rate:,.1f} GB/s; computing {layers:.2f} GFLOP a token and {head:.2f} for its "
            f"logits, at {flops:,.2f} TFLOP/s. Both rates were measured just now, with torch."
        )

    # --- benches

    def throughput(self, requests: int, input: int, output: int) -> list[Figure]:
        """All requests are there from the start."""
        draw = random.Random(0)
        room = self.info.context_tokens
        most_input = min(MOST, room // 2, self.info.max_prompt_tokens)
        most_output = min(MOST, room - most_input)
        if most_input < LEAST and not (input and output):
            raise BenchError(f"a context of {room} tokens is too short for this workload: give --input and --output")
        prompts = [self._prompt(draw, input or draw.randint(LEAST, most_input)) for _ in range(requests)]
        outputs = [output or draw.randint(LEAST, most_output) for _ in range(requests)]
        total, done = sum(outputs), 0
        before = self.core.stats()
        with progress("throughput") as show:

            def count(tokens: int) -> None:
                nonlocal done
                done += tokens
                show(f"{done:,} of {total:,} tokens", done, total)

            began = time.perf_counter()
            self._run(prompts, outputs, count)
            seconds = time.perf_counter() - began
        after = self.core.stats()
        lengths = [len(prompt) for prompt in prompts]
        running = self.core.scheduler.most_running
        limit = Limit.of(Work.of(list(zip(lengths, outputs, strict=True)), running), self.costs, self.machine)
        share = f"{limit.seconds / seconds:.0%} of {total / limit.seconds:,.0f} ({limit.bound})"
        return [
            Figure("requests", requests, ""),
            Figure("prompt tokens", sum(lengths), ""),
            Figure("output tokens", total, ""),
            Figure("time", seconds, "s"),
            Figure("output", total / seconds, "tokens/s", share),
            Figure("prompt and output", (sum(lengths) + total) / seconds, "tokens/s"),
            Figure("steps", after["steps"] - before["steps"], ""),
            Figure("retractions", after["retractions"] - before["retractions"], ""),
            Figure("scheduling", (_own_s(after) - _own_s(before)) / seconds * 100, "% of the time"),
        ]

    def latency(self, input: int, output: int) -> list[Figure]:
        """One request at a time, each with a prompt of its own; the median of some runs."""
        room = self.info.context_tokens
        input = input or min(LATENCY_INPUT, room // 2, self.info.max_prompt_tokens)
        output = output or min(LATENCY_OUTPUT, room - input)
        draw, firsts, betweens = random.Random(1), list[float](), list[float]()
        with progress("latency") as show:
            for run in range(LATENCY_RUNS):
                show(f"run {run + 1} of {LATENCY_RUNS}", run, LATENCY_RUNS)
                times = list[float]()

                def note(tokens: int, times: list[float] = times) -> None:
                    times.append(time.perf_counter())

                prompt, began = self._prompt(draw, input), time.perf_counter()
                self._run([prompt], [output], note)
                firsts.append(times[0] - began)
                if output > 1:
                    betweens.append((times[-1] - times[0]) / (output - 1))
        to_first = Limit.of(Work(input, 1, 1, input), self.costs, self.machine)
        ttft = statistics.median(firsts)
        figures = [
            Figure("prompt tokens", input, ""),
            Figure("output tokens", output, ""),
            Figure("time to first token", ttft * 1e3, "ms", _share(to_first, ttft)),
        ]
        if betweens:
            between, reads = statistics.median(betweens), input + output // 2
            limit = Limit.of(Work(0, 1, 1, reads), self.costs, self.machine)
            figures.append(Figure("time per token", between * 1e3, "ms", _share(limit, between)))
            figures.append(Figure("output", 1 / between, "tokens/s"))
        return figures

    def _prompt(self, draw: random.Random, tokens: int) -> list[int]:
        return [draw.randint(0, PROMPT_IDS) % self.model.vocab_size for _ in range(tokens)]

    def _run(self, prompts: Sequence[list[int]], outputs: Sequence[int], hear: Callable[[int], None]) -> None:
        """``hear`` is told after each step how many tokens it yielded. Raises BenchError where a request fails."""
        for prompt, output in zip(prompts, outputs, strict=True):
            if len(prompt) + output > self.info.context_tokens:
                what = f"{len(prompt)} + {output} tokens are more than the context of {self.info.context_tokens} holds"
                raise BenchError(what)
        for prompt, output in zip(prompts, outputs, strict=True):
            self._ids += 1
            params = SamplingParams(max_tokens=output, temperature=TEMPERATURE, ignore_eos=True, seed=self._ids)
            # The second attempt of a request finds no queue full.
            self.core.submit(Submit("bench", self._ids, 2, array("i", prompt).tobytes(), params))
        while self.core.has_work():
            step = self.core.step()
            if step is None:
                continue
            for row in step.news:
                if row.finish == "error":
                    raise BenchError(f"request {row.id} failed: {row.error}")
            tokens = len(step.plain) // _PLAIN_BYTES + sum(len(row.tokens) for row in step.news)
            if tokens:
                hear(tokens)

    def close(self) -> None:
        self.core.close()


def _own_s(stats: dict[str, float]) -> float:
    """The engine's own time, between the runner's."""
    return stats["phase_schedule_s"] + stats["phase_output_s"]


def _share(limit: Limit, seconds: float) -> str:
    return f"{limit.seconds / seconds:.0%}: {limit.seconds * 1e3:.3g} ms ({limit.bound})"
