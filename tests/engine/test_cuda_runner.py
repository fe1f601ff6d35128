"""The GPU runner against the CPU runner, through the engine, kernels interpreted: same requests, same tokens."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton (extra: gpu)")

from devicekit import InterpretedDevice

from runtime.engine.batch import Runner, SlotTable
from runtime.engine.build import mixed_tokens
from runtime.engine.core import EngineCore
from runtime.engine.cpu import CpuRunner
from runtime.engine.cuda import CudaRunner
from runtime.engine.scheduler import EngineConfig
from runtime.messages import SamplingParams, Submit, TokenRow
from runtime.models.config import ModelConfig, ModelError

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "layers": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "mlp_size": 40,
    "context_tokens": 128,
}  # fmt: skip
MODELS = {
    "llama": ModelConfig("llama", **(SHAPE | {"layers": 2})),
    "qwen3": ModelConfig("qwen3", **SHAPE, qk_norm=True, tied_head=True),
    "qwen2": ModelConfig("qwen2", **(SHAPE | {"q_heads": 3, "kv_heads": 1}), qkv_bias=True, o_bias=True, mlp_bias=True),
}
SLOTS = 4


def cuda_runner(config: ModelConfig, slots: SlotTable, **options: Any) -> CudaRunner:
    given = {"dtype": "float32", "dummy_weights": True, "step_tokens": 32, "device": InterpretedDevice()}
    return CudaRunner(None, config, slots, **(given | options))


def serve(runner: Runner, slots: SlotTable, submits: Iterable[Submit], **options: Any) -> dict[int, list[TokenRow]]:
    core = EngineCore(runner, slots, EngineConfig(step_tokens=32, mixed_tokens=12, **options))
    rows: dict[int, list[TokenRow]] = {}
    waiting = list(submits)
    while waiting or core.has_work():
        for submit in waiting[:2]:  # two more each round: extends and decodes mix
            core.submit(submit)
        waiting = waiting[2:]
        message = core.step()
        for row in message.rows if message else ():
            rows.setdefault(row.id, []).append(row)
    core.check()
    return rows


def tokens(rows: list[TokenRow]) -> list[int]:
    assert not rows[-1].error
    return [token for row in rows for token in row.tokens]


def submits(params: list[dict[str, Any]], seed: int = 0) -> list[Submit]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 97, 18).astype(np.int32)
    out = []
    for i, given in enumerate(params):
        prompt = rng.integers(0, 97, int(rng.integers(1, 24))).astype(np.int32)
        if i % 3 == 0:
            prompt = np.concatenate([shared, prompt[:6]])
        asked = SamplingParams(**({"max_tokens": 3 + i % 3, "temperature": 0.0, "seed": i * 2**40 + i} | given))
        out.append(Submit("test", i, 0, prompt.tobytes(), asked))
    return out


def both(config: ModelConfig, asked: list[Submit]) -> tuple[dict[int, list[TokenRow]], dict[int, list[TokenRow]]]:
    results = []
    for make in (lambda slots: CpuRunner(None, config, slots, dtype="float32", dummy_weights=True, kv_tokens=1024),
                 lambda slots: cuda_runner(config, slots, kv_tokens=1024)):  # fmt: skip
        slots = SlotTable(SLOTS, config.context_tokens, 16)
        results.append(serve(make(slots), slots, asked))
    return results[0], results[1]


@pytest.mark.parametrize("name", MODELS)
def test_same_tokens_as_on_the_cpu(name: str) -> None:
    wanted, given = both(MODELS[name], submits([{}, {"temperature": 0.8}, {}, {"temperature": 1.3}, {}]))
    assert {i: tokens(rows) for i, rows in given.items()} == {i: tokens(rows) for i, rows in wanted.items()}


def test_same_choices_as_on_the_cpu() -> None:
    params = [
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.6, "repetition_penalty": 1.3},
        {"temperature": 1.0, "min_p": 0.1, "logit_bias": {3: 4.0, 9: -50.0}},
        {"frequency_penalty": 0.5, "presence_penalty": 0.4},
        {"stop_token_ids": tuple(range(0, 97, 2)), "min_tokens": 3},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
        {},
    ]
    wanted, given = both(MODELS["llama"], submits(params, 1))
    assert {i: tokens(rows) for i, rows in given.items()} == {i: tokens(rows) for i, rows in wanted.items()}


def test_same_logprobs_as_on_the_cpu() -> None:
    wanted, given = both(
        MODELS["qwen3"], submits([{"logprobs": 3}, {"prompt_logprobs": 2}, {"logprobs": 0, "prompt_logprobs": 0}, {}])
    )
    for i in range(4):
        for mine, theirs in zip(given[i], wanted[i], strict=True):
            for a, b in zip(
                mine.logprobs + mine.prompt_logprobs, theirs.logprobs + theirs.prompt_logprobs, strict=True
            ):
                if a is None or b is None:
                    assert a is b
                    continue
                assert (a.token, a.top_tokens) == (b.token, b.top_tokens)
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
                assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy, and NaN is meant
def test_broken_logits_end_their_request_alone() -> None:
    config = MODELS["llama"]
    slots = SlotTable(SLOTS, config.context_tokens, 16)
    runner = cuda_runner(config, slots, kv_tokens=1024)
    with torch.inference_mode():
        runner.forward.embedding[96] = float("nan")
    asked = [s for s in submits([{}] * 2) if 96 not in np.frombuffer(s.prompt, np.int32)]
    broken = Submit("test", 9, 0, np.array([5, 96, 7], np.int32).tobytes(), SamplingParams(max_tokens=3, temperature=0))
    rows = serve(runner, slots, [*asked, broken])
    assert rows[9][-1].code == "not_finite"
    for submit in asked:
        assert rows[submit.id][-1].finish == "length"


def test_memory_is_accounted_for_and_bounded() -> None:
    config = MODELS["llama"]
    slots = SlotTable(SLOTS, config.context_tokens, 16)
    runner = cuda_runner(config, slots)
    assert runner.num_pages == SLOTS * 8
    memory = runner.memory()
    assert set(memory) == {"weights", "kv", "graphs", "activations", "other"}
    assert memory["kv"] == runner.num_pages * 2 * 2 * 2 * 16 * 16 * 4
    device = InterpretedDevice()
    device.free = 1000
    with pytest.raises(ModelError, match=r"engine\.step_tokens"):
        cuda_runner(config, slots, device=device)
    device.free = 100 << 20
    with pytest.raises(ModelError, match=r"engine\.mem_fraction = 0\.85"):
        cuda_runner(config, slots, device=device)
    with pytest.raises(ModelError, match=r"supervision\.standby = 1"):
        cuda_runner(config, slots, engines=2)
    with pytest.raises(ModelError, match=r"engine\.kv_tokens"):
        cuda_runner(config, slots, kv_tokens=1 << 40)


def test_engines_that_share_a_gpu_take_equal_parts() -> None:
    """Whatever the others have taken by then."""
    config = dataclasses.replace(MODELS["llama"], context_tokens=1 << 16)
    slots = SlotTable(2, config.context_tokens, 16)
    device = InterpretedDevice()
    device.free = device.total = 3700 << 20
    first = cuda_runner(config, slots, engines=2, device=device)
    device.free -= sum(first.memory().values())
    second = cuda_runner(config, slots, engines=2, device=device)
    assert 0 < first.num_pages == second.num_pages < 2 * slots.context_pages


def test_what_prompts_may_add_to_a_step_depends_on_the_model() -> None:
    small = dataclasses.replace(MODELS["llama"], hidden_size=1024, layers=28, q_heads=16, head_dim=64, mlp_size=3072)
    wide = {"hidden_size": 4096, "layers": 32, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "mlp_size": 14336}
    large = dataclasses.replace(small, **wide)
    giant = dataclasses.replace(large, hidden_size=8192, layers=80, q_heads=64, mlp_size=28672)
    assert [mixed_tokens(model, "cuda") for model in (small, large, giant)] == [8192, 1536, 512]
    assert {mixed_tokens(model, "cpu") for model in (small, large, giant)} == {256}


def test_graphs_are_captured_once_a_size() -> None:
    config = MODELS["llama"]
    slots = SlotTable(SLOTS, config.context_tokens, 16)
    device = InterpretedDevice()
    runner = cuda_runner(config, slots, kv_tokens=1024, device=device)
    at_start = device.captured
    serve(runner, slots, submits([{}] * 3))
    after = device.captured
    serve(runner, slots, submits([{}] * 3, 2))
    assert at_start == 2
    assert device.captured == after <= 3


def test_unknown_dtype_and_shape_are_told() -> None:
    slots = SlotTable(2, 128, 16)
    with pytest.raises(ModelError, match="float8"):
        cuda_runner(MODELS["llama"], slots, dtype="float8")
    odd = ModelConfig("llama", **(SHAPE | {"head_dim": 10}))
    with pytest.raises(ModelError, match="head_dim = 10"):
        cuda_runner(odd, slots)
    assert torch.get_default_dtype() == torch.float32
