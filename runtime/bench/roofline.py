"""The physical limit of a workload on this machine: measured bandwidth and arithmetic, and what a model must move.

Whatever an engine does, it reads each weight once a step and each running request's KV once a token, and multiplies
each token with each weight. The larger of the two times is the limit. Both are generous to the machine, so that no
engine can reach them: activations, sampling, attention's arithmetic and the order of things cost nothing here.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..models.config import ModelConfig
from ..models.loader import Shard, plan
from ..service import ModelInfo

_INT8_BYTES = 1 + 4 / 64  # of a quantized weight, with its share of a scale
_RUNS = 5


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured, the best of some runs."""

    bytes_per_s: float
    flops_per_s: float  # of matrix products in the model's dtype


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model costs, from its shape alone."""

    weight_bytes: float  # read once a step; the embedding only where it is the head as well
    kv_bytes: float  # of one token
    layer_flops: float  # for one token, without the head
    head_flops: float

    @classmethod
    def of(cls, config: ModelConfig, info: ModelInfo) -> "Costs":
        each = _INT8_BYTES if info.quantization == "int8" else 4 if info.dtype == "float32" else 2
        head = config.vocab_size * config.hidden_size
        layers = sum(param.numel(Shard()) for param in plan(config) if param.matrix and param.name != "head")
        return cls((layers + head) * each, info.memory_bytes["kv"] / info.kv_tokens, 2 * layers, 2 * head)


@dataclass(frozen=True, slots=True)
class Work:
    prompt_tokens: int
    output_tokens: int
    steps: int  # at least
    context_reads: int  # sum over output tokens of the context that each looks at

    @classmethod
    def of(cls, lengths: list[tuple[int, int]], running: int) -> "Work":
        """``lengths``: (prompt, output) of each request; at most ``running`` of them are computed at a time."""
        outputs = [output for _, output in lengths]
        steps = max(max(outputs), -(-sum(outputs) // running))
        reads = sum(prompt * output + output * (output - 1) // 2 for prompt, output in lengths)
        return cls(sum(prompt for prompt, _ in lengths), sum(outputs), steps, reads)


@dataclass(frozen=True, slots=True)
class Limit:
    """The least seconds, by what bounds them."""

    memory_s: float
    arithmetic_s: float

    @classmethod
    def of(cls, work: Work, costs: Costs, machine: Machine) -> "Limit":
        moved = work.steps * costs.weight_bytes + work.context_reads * costs.kv_bytes
        tokens = work.prompt_tokens + work.output_tokens - 1  # the last one is computed no further
        computed = tokens * costs.layer_flops + work.output_tokens * costs.head_flops
        return cls(moved / machine.bytes_per_s, computed / machine.flops_per_s)

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.arithmetic_s)

    @property
    def bound(self) -> str:
        return "memory" if self.memory_s >= self.arithmetic_s else "arithmetic"


def measure(device: str, dtype: str, threads: int) -> Machine:
    """Takes a second or two. On CPU with ``threads`` (0: torch's number), of which the former number is restored."""
    import torch

    def best(work: Callable[[], object]) -> float:
        least = float("inf")
        for _ in range(_RUNS):
            began = time.perf_counter()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
            least = min(least, time.perf_counter() - began)
        return least

    before = torch.get_num_threads()
    if threads:
        torch.set_num_threads(threads)
    try:
        side, rows = (8192, 8192) if device == "cuda" else (2048, 1024)
        kind: torch.dtype = getattr(torch, dtype, torch.float32)
        left, right = (torch.ones(n, side, dtype=kind, device=device) for n in (rows, side))
        flops = 2 * rows * side * side / best(lambda: torch.nn.functional.linear(left, right))
        if device == "cuda":  # a copy reads and writes
            source = torch.ones(2**30, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            return Machine(2 * source.nbytes / best(lambda: target.copy_(source)), flops)
        matrix, vector = torch.ones(8192, 16384), torch.ones(16384)
        return Machine(matrix.nbytes / best(lambda: torch.mv(matrix, vector)), flops)
    finally:
        torch.set_num_threads(before)
