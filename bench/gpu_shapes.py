"""Model shapes and workloads of the GPU bench; the token lists are those of nano-vllm's bench.py and of vLLM's runs."""

import random
from dataclasses import dataclass

from runtime.models.config import ModelConfig, RopeScaling

SHAPES = {
    "0.6b": ModelConfig(
        "qwen3", vocab_size=151936, hidden_size=1024, layers=28, q_heads=16, kv_heads=8, head_dim=128, mlp_size=3072,
        context_tokens=4096, rope_theta=1e6, tied_head=True, qk_norm=True,
    ),
    "8b": ModelConfig(
        "llama", vocab_size=128256, hidden_size=4096, layers=32, q_heads=32, kv_heads=8, head_dim=128, mlp_size=14336,
        context_tokens=4096, rms_eps=1e-5, rope_theta=5e5, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
    ),
}  # fmt: skip

# What one H200 moves and computes, measured: bytes/s read, bf16 FLOP/s.
BYTES_PER_S, FLOPS = 4.2e12, 780e12


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    model: str
    prompts: list[list[int]]
    outputs: list[int]
    temperature: float
    figure: str  # "output" or "input" tokens per second, or "decode": 1 / (time per token at batch 1)
    vllm: float
    limit: float
    bar: float
    stretch: float


def nano(model: str, vllm: float, limit: float, bar: float, stretch: float) -> Workload:
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    outputs = [rng.randint(100, 1024) for _ in range(256)]
    assert (sum(map(len, prompts)), sum(outputs)) == (142827, 133966)
    return Workload("nano-vllm bench", model, prompts, outputs, 0.6, "output", vllm, limit, bar, stretch)


def even(
    name: str, model: str, count: int, prompt: int, output: int, figure: str, numbers: tuple[float, float, float, float]
) -> Workload:
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(prompt)] for _ in range(count)]
    return Workload(name, model, prompts, [output] * count, 0.0, figure, *numbers)


def workloads() -> list[Workload]:
    return [
        nano("0.6b", 20319, 35700, 24000, 28000),
        nano("8b", 9736, 13400, 10500, 11500),
        even("256 x (1024 in, 256 out)", "8b", 256, 1024, 256, "output", (6225, 8100, 6600, 7200)),
        even("batch 1 decode", "0.6b", 1, 128, 257, "decode", (443, 3520, 800, 1300)),
        even("batch 1 decode", "8b", 1, 128, 257, "decode", (205, 280, 220, 250)),
        even("prefill 128 x 1024", "8b", 128, 1024, 1, "input", (43800, 55000, 44000, 48000)),
        even("prefill 128 x 1024", "0.6b", 128, 1024, 1, "input", (414000, 791000, 414000, 500000)),
        even("batch 256 decode", "0.6b", 256, 128, 257, "decode", (256 / 9.2e-3, 72300, 50000, 60000)),
        even("batch 256 decode", "8b", 256, 128, 257, "decode", (256 / 11.1e-3, 41200, 24000, 26000)),
    ]
