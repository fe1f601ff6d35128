"""``runtime bench``: what the engine does on this machine, without clients, and how far from the physical limit it is.

- throughput: many requests at once. By default the workload that small engines are compared by: 256 requests of seed 0
  with 100 to 1024 random prompt tokens, and as many to generate.
- latency: one request at a time: the time to its first token, and between tokens.
- startup: what each phase of the engine's start took, and how long ``runtime serve`` takes to its first answer.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ..config import Config
from ..names import derive_name, kind_of
from ..sources import ModelFiles, SourceError, resolve
from .report import BenchError, Figure, Report, progress
from .startup import start_server

BENCHES = ("throughput", "latency", "startup")


@dataclass(frozen=True, slots=True)
class Options:
    benches: tuple[str, ...] = BENCHES
    requests: int = 256
    input: int = 0  # tokens of every prompt; 0 = 100 to 1024 at random, in latency 512
    output: int = 0  # tokens of every answer; 0 = 100 to 1024 at random, in latency 128
    as_json: bool = False


def main(config: Config, options: Options) -> int:
    """Run the benches and print what they found. Returns the exit code."""
    # ModelError and BenchError are this; its module imports torch, whose import is part of what is measured.
    try:
        report = _run(config, options)
    except (BenchError, SourceError) as error:
        print(f"runtime: {error}", file=sys.stderr)
        return 1
    if options.as_json:
        print(report.json())
    else:
        report.print()
    return 0


def _run(config: Config, options: Options) -> Report:
    if config.engine.tensor_parallel > 1:
        raise BenchError("bench drives one device: set engine.tensor_parallel = 1")
    files = _files(config)
    phases: dict[str, float] = {}
    began = time.perf_counter()
    from .engine import Bench, ModelError

    phases["import torch"] = time.perf_counter() - began
    try:
        bench = Bench(config, files, phases)
    except ModelError as error:
        raise BenchError(str(error)) from None
    report = Report(bench.title)
    try:
        if "throughput" in options.benches:
            report.benches["throughput"] = bench.throughput(options.requests, options.input, options.output)
        if "latency" in options.benches:
            report.benches["latency"] = bench.latency(options.input, options.output)
        if {"throughput", "latency"} & set(options.benches):
            report.notes.append(bench.limit_in_words())
    finally:
        bench.close()
    if "startup" in options.benches:
        report.benches["startup"] = [Figure(f"engine: {phase}", seconds, "s") for phase, seconds in phases.items()]
        report.benches["startup"].append(Figure("engine: all of this", sum(phases.values()), "s"))
        if files.tokenizer:
            report.benches["startup"] += start_server(config)
        else:
            report.notes.append("runtime serve was not started: the model has no tokenizer.")
    return report


def _files(config: Config) -> ModelFiles:
    """The model's files. With dummy weights config.json is enough; the engine needs no tokenizer."""
    section = config.model
    folder = Path(section.source).expanduser().resolve()
    alone = kind_of(section.source) == "folder" and (folder / "config.json").is_file()
    if section.dummy_weights and alone and not section.tokenizer and not (folder / "tokenizer.json").is_file():
        return ModelFiles(section.source, derive_name(section.source), str(folder), "", (), 0)
    with progress("model") as show:
        return resolve(section.source, show, tokenizer=section.tokenizer, weights=not section.dummy_weights)
