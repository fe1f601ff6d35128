"""The engine on one GPU: workloads through the scheduler with random weights, kernels, profiles, start-up.

python bench/gpu.py check              kernels and engine against float32 references; with real FOLDER: the engine
                                       with the weights in FOLDER alone
python bench/gpu.py kernels            GB/s and TFLOP/s of every kernel on the shapes of both models
python bench/gpu.py sizes              cuBLAS over all batch sizes
python bench/gpu.py engine [0.6b|8b]   the workloads, with the share of the limit
python bench/gpu.py profile [0.6b|8b]  kernels of one decoding step at batch 1 and 256, and of a prefill step
python bench/gpu.py startup            loading rate and seconds from process start to ready
several of them in one go: python bench/gpu.py check engine ...; --out FOLDER keeps the full numbers as JSON

Run with the repository (or the installed package) on the path: PYTHONPATH=. python bench/gpu.py ...
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_shapes import BYTES_PER_S, SHAPES, Workload, workloads

from runtime.engine.batch import SlotTable
from runtime.engine.build import WARM_UP
from runtime.engine.core import EngineCore
from runtime.engine.cuda import CudaRunner
from runtime.engine.scheduler import EngineConfig
from runtime.messages import SamplingParams, Submit

RESULTS: dict[str, Any] = {}


def make_engine(model: str, **options: Any) -> tuple[EngineCore, CudaRunner, SlotTable]:
    slots = SlotTable(256, SHAPES[model].context_tokens, 16)
    given: dict[str, Any] = {"dummy_weights": True, "mem_fraction": 0.9}
    runner = CudaRunner(None, SHAPES[model], slots, **(given | options))
    return new_core(runner, slots), runner, slots


def new_core(runner: CudaRunner, slots: SlotTable) -> EngineCore:
    return EngineCore(runner, slots, EngineConfig(step_tokens=8192, mixed_tokens=8192, prefix_cache=False), clock=None)


def run(core: EngineCore, prompts: list[list[int]], outputs: list[int], temperature: float) -> float:
    """Seconds from the first submit to the last token."""
    encoded = [np.asarray(prompt, np.int32).tobytes() for prompt in prompts]
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i, (prompt, tokens) in enumerate(zip(encoded, outputs, strict=True)):
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=i, ignore_eos=True)
        core.submit(Submit("bench", i, 0, prompt, params))
    ended = 0
    while core.has_work():
        message = core.step()
        if message is not None:
            for row in message.news:
                assert not row.error, row.error
                ended += row.finish is not None
    assert ended == len(prompts)
    return time.perf_counter() - start


def figure(core: EngineCore, work: Workload) -> tuple[float, float]:
    """(tokens per second, seconds of the whole run)"""
    seconds = run(core, work.prompts, work.outputs, work.temperature)
    if work.figure == "output":
        return sum(work.outputs) / seconds, seconds
    if work.figure == "input":
        return sum(map(len, work.prompts)) / seconds, seconds
    first = min(run(core, work.prompts, [1] * len(work.prompts), work.temperature) for _ in range(2))
    return len(work.prompts) * (work.outputs[0] - 1) / (seconds - first), seconds


def warm_up(core: EngineCore) -> None:
    """What compiles or loads at first use is there afterwards: what a server does before it is ready, then batches of
    ragged prompts that are more than a step, so that many rows decode beside prompts, by both ways to sample."""
    begun = time.perf_counter()
    core.warm_up(WARM_UP["cuda"])
    first = time.perf_counter() - begun
    for temperature in (0.6, 0.0):
        prompts = [[1] * (100 + i * 37 % 924) for i in range(64)]
        run(core, prompts, [3 + i * 7 % 40 for i in range(64)], temperature)
    print(f"warmed up in {first:.1f} s as a server, then {time.perf_counter() - begun - first:.1f} s more", flush=True)


def engine(models: list[str]) -> None:
    rows = []
    for model in models:
        begun = time.perf_counter()
        core, runner, slots = make_engine(model)
        made = time.perf_counter() - begun
        gib = {name: f"{size / 2**30:.2f}" for name, size in runner.memory().items()}
        print(f"\n{model}: runner made in {made:.1f} s; GiB {gib}; {runner.num_pages * 16} KV tokens", flush=True)
        begun = time.perf_counter()
        runner.capture_all()
        torch.cuda.synchronize()
        print(f"all graphs captured in {time.perf_counter() - begun:.1f} s", flush=True)
        warm_up(core)
        gc.collect()
        gc.freeze()
        for work in (w for w in workloads() if w.model == model):
            core = new_core(runner, slots)
            tokens, seconds = figure(core, work)
            stats = core.stats()
            steps = max(stats["steps"], 1)
            phases = {k[6:-2]: round(stats[k] / steps * 1e6) for k in stats if k.startswith("phase_")}
            rows.append((work, tokens))
            print(
                f"{work.model:5s} {work.name:26s} {tokens:9.0f} tok/s {tokens / work.limit:6.1%} of limit, "
                f"{tokens / work.vllm:4.2f} x vLLM, {tokens / work.bar:4.2f} of bar, {tokens / work.stretch:4.2f} of "
                f"stretch, {seconds:6.2f} s, {int(steps)} steps, us a step {phases}",
                flush=True,
            )
        del core
        runner.close()
        del runner
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
    RESULTS["engine"] = [(work.model, work.name, tokens) for work, tokens in rows]


def profile(models: list[str]) -> None:
    """One step by kernels, and how long the device idles between decoding steps when the engine drives it."""
    for model in models:
        core, runner, slots = make_engine(model)
        for rows, prompt in ((1, 256), (32, 1000), (256, 512)):
            core = new_core(runner, slots)
            submit_all(core, rows, prompt, 400)
            for _ in range(20):
                core.step()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(100):
                core.step()
            torch.cuda.synchronize()
            step_us = (time.perf_counter() - begun) * 1e4
            spans = traced(core, 20)
            with torch.inference_mode():
                graph = runner.graphs.ready(rows, True)
            times = []
            for _ in range(5):
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                with runner.device.stream():
                    a.record()
                    for _ in range(10):
                        graph()
                    b.record()
                torch.cuda.synchronize()
                times.append(a.elapsed_time(b) * 100)
            graph_us = float(np.median(times))
            idle = tell(f"{model} batch {rows}, context {prompt}+: step {step_us:.0f} us, graph alone {graph_us:.0f}",
                        spans, 20)  # fmt: skip
            RESULTS.setdefault("profile", []).append((model, rows, step_us, graph_us, idle))
            while core.has_work():
                core.step()
        core = new_core(runner, slots)
        submit_all(core, 64, 1024, 1)
        tell(f"{model} prefill of 3 x 16 x 1024", traced(core, 3), 3)
        while core.has_work():
            core.step()
        runner.close()
        del core, runner, graph
        gc.collect()
        torch.cuda.empty_cache()


def submit_all(core: EngineCore, rows: int, prompt: int, output: int) -> None:
    rng = np.random.default_rng(0)
    for i in range(rows):
        params = SamplingParams(max_tokens=output, temperature=0.6, seed=i, ignore_eos=True)
        core.submit(Submit("bench", i, 0, rng.integers(0, 10000, prompt).astype(np.int32).tobytes(), params))


def traced(core: EngineCore, steps: int) -> list[tuple[float, float, str]]:
    """(start, end, name) of every kernel and copy of some steps."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            core.step()
        torch.cuda.synchronize()
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )


def tell(what: str, spans: list[tuple[float, float, str]], steps: int) -> float:
    """Print the kernels of a step; returns the share of the time in which none ran."""
    busy, covered = 0.0, spans[0][0]
    by_name: dict[str, list[float]] = {}
    for start, end, name in spans:
        # With overlapped launches a kernel is resident while it waits for the one before: only what it adds counts.
        own = max(0.0, end - max(start, covered))
        by_name.setdefault(name, []).append(own)
        busy += own
        covered = max(covered, end)
    whole = covered - spans[0][0]
    print(f"\n{what}; under the profiler {whole / steps:.0f} us, idle {1 - busy / whole:.1%}", flush=True)
    for name, each in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:14]:
        if sum(each) > 0.002 * whole:
            print(f"  {sum(each) / whole:6.1%} {sum(each) / steps:9.1f} us a step {len(each) / steps:5.0f} x "
                  f"{np.median(each):7.2f} us  {name[:70]}")  # fmt: skip
    return 1 - busy / whole


_START = """
import time, sys
begun = float(sys.argv[1])
sys.path[:0] = sys.argv[2:4]
import torch
imported = time.time()
from gpu_shapes import SHAPES
from runtime.engine.batch import SlotTable
from runtime.engine.cuda import CudaRunner
from runtime.engine.build import WARM_UP
from runtime.engine.core import EngineCore
from runtime.engine.scheduler import EngineConfig
modules = time.time()
slots = SlotTable(256, 4096, 16)
marks = {}
folder = sys.argv[5] if len(sys.argv) > 5 else None
runner = CudaRunner(folder, SHAPES[sys.argv[4]], slots, dummy_weights=folder is None, mem_fraction=0.9,
                    progress=lambda phase, done, total: marks.setdefault(f"{phase} {done >= total}", time.time()))
made = time.time()
core = EngineCore(runner, slots, EngineConfig(step_tokens=16384, mixed_tokens=16384), clock=None)
runner.capture_all()
captured = time.time()
core.warm_up(WARM_UP["cuda"])
ready = time.time()
print(f"{sys.argv[4]}: torch {imported - begun:.1f} s, our modules {modules - imported:.1f}, weights at "
      f"{marks.get('weights True', 0) - begun:.1f}, KV at {marks.get('kv False', 0) - begun:.1f}, runner "
      f"{made - begun:.1f}, graphs {captured - made:.1f}, first requests "
      f"{ready - captured:.1f}, ready after {ready - begun:.1f} s", flush=True)
"""


def startup(models: list[str]) -> None:
    """Process start to ready, from safetensors in the page cache; twice, the second with Triton's cache filled."""
    from gpu_check import write_checkpoint

    from runtime.engine.upload import upload
    from runtime.models.loader import dummy, weight_bytes

    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            weights = dict(dummy(SHAPES[model], torch.bfloat16, device="cuda"))
            write_checkpoint(Path(folder), SHAPES[model], weights, shards=4)
            del weights
            torch.cuda.empty_cache()
            size = weight_bytes(SHAPES[model], torch.bfloat16)
            for _ in range(2):
                begun = time.perf_counter()
                upload(folder, SHAPES[model], torch.bfloat16, device=torch.device("cuda", 0))
                torch.cuda.synchronize()
                seconds = time.perf_counter() - begun
                torch.cuda.empty_cache()
                print(f"{model}: {size / 1e9:.2f} GB loaded in {seconds:.2f} s = {size / seconds / 1e9:.1f} GB/s")
            for _ in range(2):
                here = Path(__file__).resolve().parent
                arguments = [str(time.time()), str(here.parent), str(here), model, folder]
                subprocess.run([sys.executable, "-c", _START, *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    models = [word for word in given.what if word in SHAPES] or list(SHAPES)
    real = ""
    if "real" in given.what:
        at = given.what.index("real")
        if at + 1 == len(given.what):
            parser.error("real needs a folder with a model's files")
        real = given.what[at + 1]
        del given.what[at : at + 2]
    import gpu_check
    import gpu_kernels

    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)

    parts: dict[str, Callable[[], Any]] = {
        "check": lambda: gpu_check.check_real(real) if real else gpu_check.check(),
        "kernels": gpu_kernels.kernels,
        "sizes": gpu_kernels.sizes,
        "engine": lambda: engine(models),
        "profile": lambda: profile(models),
        "startup": lambda: startup(models),
    }
    unknown = [word for word in given.what if word not in parts and word not in SHAPES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; limits at {BYTES_PER_S / 1e12} TB/s", flush=True)
    for word in given.what:
        if word not in parts:
            continue
        begun = time.perf_counter()
        try:
            RESULTS[word] = parts[word]() or RESULTS.get(word)
        except Exception:  # the other parts' numbers are worth having
            import traceback

            traceback.print_exc()
        print(f"-- {word}: {time.perf_counter() - begun:.0f} s", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    if given.out is not None:
        file = given.out / "gpu.json"
        before = json.loads(file.read_text()) if file.exists() else []
        file.write_text(json.dumps([*before, {key: value for key, value in RESULTS.items() if value}], default=str))


if __name__ == "__main__":
    main()
