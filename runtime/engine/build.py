"""From a configuration and a model's files to an engine that runs: the one place that knows all its parts."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from runtime.config import Config
from runtime.engine import native
from runtime.engine.batch import Runner, SlotTable
from runtime.engine.core import EngineCore, WarmUp
from runtime.engine.scheduler import EngineConfig
from runtime.messages import SamplingParams
from runtime.models.config import ModelConfig
from runtime.models.loader import Shard, plan
from runtime.service import ModelInfo
from runtime.sources import ModelFiles

Phase = Callable[[str, int | None, int | None], None]


class Defaults(NamedTuple):
    """What the configuration leaves to the device."""

    running_requests: int
    step_tokens: int
    mixed_tokens: int
    weight_tokens: int
    context_unit: int
    context_read: int


# The CPU's costs: bench/fairness.py shows what streams feel of a long prompt.
DEFAULTS = {"cpu": Defaults(32, 1024, 256, 14, 1536, 160), "cuda": Defaults(256, 16384, 8192, 0, 0, 0)}
# What prompts may add to a step that others wait for, in multiplications and additions: some 40 ms of an H200.
MIXED_FLOPS = 2.2e13


def mixed_tokens(model: ModelConfig, device: str) -> int:
    """Prompt tokens in a step that also decodes: on a GPU fewer the larger the model is, 8,192 (0.6B) to 1,536 (8B).
    Few at a time would cost a small model more in launches than in arithmetic, a large one more in reading weights."""
    most = DEFAULTS[device].mixed_tokens
    if device == "cpu":
        return most
    flops = 2 * sum(param.numel(Shard()) for param in plan(model) if param.matrix and param.name != "head")
    return min(most, max(int(MIXED_FLOPS / flops) // 128 * 128, 512))


def choose_quantization(config: Config, files: ModelFiles, device: str) -> str:
    """What ``auto`` means here: int8 where our kernels multiply it and a model, coming from a file of 8 bits or fewer,
    loses next to nothing by it. Who asks for a dtype gets the numbers that it holds."""
    if config.model.quantization != "auto":
        return config.model.quantization
    ours = device == "cpu" and native.library() is not None
    return "int8" if ours and files.quantized and config.model.dtype == "auto" else "none"


def _params(tokens: int, temperature: float, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True, **more)


# What is compiled or loaded at its first use is met here: prompts alone and with few and with many decoding rows beside
# them, products of several sizes, and every way to sample.
WARM_UP = {
    "cpu": (WarmUp(),),
    "cuda": (
        WarmUp(4, 16, _params(12, 0.0)),
        WarmUp(12, 40, _params(12, 0.6)),
        WarmUp(2, 300, _params(2, 0.0)),
        WarmUp(1, 3000, _params(2, 0.6)),
        WarmUp(2, 30, _params(3, 0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=2)),
        WarmUp(1, 8192, _params(2, 0.0)),
    ),
}


def build(config: Config, files: ModelFiles, phase: Phase, *, streams: bool = True) -> tuple[EngineCore, ModelInfo]:
    """The engine of one replica on one device, ready for its first step. ``phase`` is told (name, done, total) bytes.
    ``streams``: somebody waits for each next token, so that prompts must not hold up those who generate.

    Raises ModelError: one sentence that says what to change.
    """
    import torch

    model = ModelConfig.from_folder(files.folder).with_context(config.model.context_tokens)
    device = config.engine.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    quantization = choose_quantization(config, files, device)
    engine, defaults = config.engine, DEFAULTS[device]
    running = engine.max_running_requests or defaults.running_requests
    slots = SlotTable(running, model.context_tokens, engine.page_tokens)
    runner = _runner(device, quantization, config, files, model, slots, phase)
    step_tokens = engine.step_tokens or defaults.step_tokens
    # Nobody waits for the next token: prompts may take whole steps. A number of the user's own counts as it stands.
    fair = streams and not engine.mixed_tokens
    limits = EngineConfig(
        step_tokens=step_tokens,
        mixed_tokens=engine.mixed_tokens or (mixed_tokens(model, device) if fair else step_tokens),
        weight_tokens=defaults.weight_tokens if fair else 0,
        context_unit=defaults.context_unit if fair else 0,
        context_read=defaults.context_read if fair else 0,
        max_running_requests=running,
        max_queued_requests=engine.max_queued_requests,
        policy=engine.policy,
        prefix_cache=engine.prefix_cache,
        eviction=engine.eviction,
    )
    core = EngineCore(runner, slots, limits, model.eos_token_ids)
    phase("first step", None, None)
    core.warm_up(WARM_UP[device])
    info = ModelInfo(
        name=config.model.name,
        context_tokens=model.context_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        created=int(time.time()),
        max_prompt_tokens=min(model.context_tokens, runner.num_pages * runner.page_tokens),
        dtype=str(getattr(runner, "dtype", "")).removeprefix("torch."),
        quantization=quantization,
        device=device,
        kv_tokens=runner.num_pages * runner.page_tokens,
        memory_bytes=runner.memory(),
    )
    return core, info


def _runner(
    device: str,
    quantization: str,
    config: Config,
    files: ModelFiles,
    model: ModelConfig,
    slots: SlotTable,
    phase: Phase,
) -> Runner:
    more: dict[str, Any] = {}
    if device == "cuda":
        from runtime.engine.cuda import CudaRunner

        make: Any = CudaRunner
        more["engines"] = 1 + config.supervision.standby
    else:
        from runtime.engine.cpu import CpuRunner

        make = CpuRunner

        more["threads"] = config.engine.threads
    runner: Runner = make(
        files.folder,
        model,
        slots,
        dtype=config.model.dtype,
        quantization=quantization,
        kv_tokens=config.engine.kv_tokens,
        mem_fraction=config.engine.mem_fraction,
        dummy_weights=config.model.dummy_weights,
        progress=phase,
        **more,
    )
    if device == "cuda":
        runner.capture_all(lambda done, total: phase("graphs", done, total))  # type: ignore[attr-defined]
    return runner
