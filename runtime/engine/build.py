"""From a configuration and a model's files to an engine that runs: the one place that knows all its parts."""

import time
from collections.abc import Callable

from runtime.config import Config
from runtime.engine.batch import Runner, SlotTable
from runtime.engine.core import EngineCore
from runtime.models.config import ModelConfig
from runtime.service import ModelInfo
from runtime.sources import ModelFiles

Phase = Callable[[str, int | None, int | None], None]

# Requests in the running batch, where the configuration leaves it to the device.
RUNNING_REQUESTS = {"cpu": 32, "cuda": 256}


def build(config: Config, files: ModelFiles, phase: Phase) -> tuple[EngineCore, ModelInfo]:
    """The engine of one replica on one device, ready for its first step. ``phase`` is told (name, done, total) bytes.

    Raises ModelError: one sentence that says what to change.
    """
    import torch

    model = ModelConfig.from_folder(files.folder).with_context(config.model.context_tokens)
    device = config.engine.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    running = config.engine.max_running_requests or RUNNING_REQUESTS[device]
    slots = SlotTable(running, model.context_tokens, config.engine.page_tokens)
    runner = _runner(device, config, files, model, slots, phase)
    core = EngineCore(runner, slots, config.engine, model.eos_token_ids)
    phase("first step", None, None)
    core.warm_up()
    info = ModelInfo(
        name=config.model.name,
        context_tokens=model.context_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        created=int(time.time()),
        max_prompt_tokens=min(model.context_tokens, runner.num_pages * runner.page_tokens),
        dtype=str(runner.dtype).removeprefix("torch."),
        quantization=config.model.quantization,
        device=device,
        kv_tokens=runner.num_pages * runner.page_tokens,
        memory_bytes=runner.memory(),
    )
    return core, info


def _runner(
    device: str, config: Config, files: ModelFiles, model: ModelConfig, slots: SlotTable, phase: Phase
) -> Runner:
    options = {
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "kv_tokens": config.engine.kv_tokens,
        "mem_fraction": config.engine.mem_fraction,
        "dummy_weights": config.model.dummy_weights,
        "progress": phase,
    }
    if device == "cuda":
        from runtime.engine.cuda import CudaRunner

        return CudaRunner(files.folder, model, slots, **options)
    from runtime.engine.cpu import CpuRunner

    return CpuRunner(files.folder, model, slots, threads=config.engine.threads, **options)
