"""``runtime serve`` on one GPU, with random weights: tokens/s, time to first token, gaps, a killed engine.

    python bench/gpu_serve.py [0.6b] [8b] [--frontends 4] [--clients 4]
    python bench/gpu_serve.py --device cpu --tiny          the same steps in small, without a GPU

One start per model: 1, 32 and 256 concurrent streams of 512 tokens in and 256 out (token ids, greedy, no end of text),
256 in three waves, then ``kill -9`` of the scheduler under 32 streams; at last the same engine without a server around
it. With a spare engine: ``--kill-only --set supervision.standby=1``. Clients are processes of their own with raw
sockets (bench/serve.py).
"""

import argparse
import asyncio
import concurrent.futures
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "serve"), str(ROOT / "bench")]

from gpu_shapes import SHAPES  # noqa: E402
from serve import Answer, Load, ask, percentile  # noqa: E402
from servekit import Server, alive, descendants  # noqa: E402

from runtime.models.config import ModelConfig  # noqa: E402

SCHEDULER = "replica0/scheduler0"
TINY = ModelConfig(
    "llama", vocab_size=2048, hidden_size=64, layers=2, q_heads=4, kv_heads=2, head_dim=16, mlp_size=128,
    context_tokens=4096,
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    prompt: int = 512
    output: int = 256
    streams: tuple[int, ...] = (1, 32, 256)
    killed_streams: int = 32
    killed_output: int = 2048
    kill_after_s: float = 1.5


SMALL = Sizes(32, 16, (1, 4, 8), 4, 3500, 0.3)


# The model's folder


def write_model(folder: Path, config: ModelConfig) -> None:
    """config.json and a tokenizer of as many tokens: every byte, then made-up words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    data: dict[str, Any] = {
        "model_type": config.architecture, "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers, "num_attention_heads": config.q_heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "intermediate_size": config.mlp_size,
        "max_position_embeddings": config.context_tokens, "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta, "tie_word_embeddings": config.tied_head, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "eos_token_id": config.vocab_size - 1,
    }  # fmt: skip
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        data["rope_scaling"] = {
            "rope_type": scaling.kind, "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context_tokens,
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(data))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"\u0120w{i}" for i in range(config.vocab_size - len(alphabet)))]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


# Clients


def bodies(sizes: Sizes, count: int, seed: int, output: int, vocab: int) -> list[dict[str, object]]:
    draw = random.Random(seed)
    return [
        {
            "model": "bench",
            "prompt": [draw.randrange(min(vocab - 1, 10000)) for _ in range(sizes.prompt)],
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(count)
    ]


def client(url: str, streams: int, requests: list[dict[str, object]], start: float) -> list[Answer]:
    """In a process of its own: ``requests`` over ``streams`` connections at a time, from the moment ``start`` on."""
    answers: list[Answer] = []
    left = iter(requests)

    async def stream() -> None:
        for body in left:
            try:
                answers.append(await ask(urlsplit(url), "/v1/completions", body))
            except OSError as error:
                answers.append(Answer(time.perf_counter(), failure=f"{type(error).__name__}: {error}"))

    async def run() -> None:
        await asyncio.sleep(max(0.0, start - time.perf_counter()))
        await asyncio.gather(*(stream() for _ in range(streams)))

    asyncio.run(run())
    return answers


class Clients:
    def __init__(self, url: str, processes: int) -> None:
        self.url, self.processes = url, processes
        self.pool = concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
        for future in [self.pool.submit(time.sleep, 0.2) for _ in range(processes)]:
            future.result()

    def send(self, streams: int, requests: list[dict[str, object]]) -> list[concurrent.futures.Future[list[Answer]]]:
        used = min(self.processes, streams)
        start = time.perf_counter() + 0.3
        return [
            self.pool.submit(client, self.url, len(range(i, streams, used)), requests[i::used], start)
            for i in range(used)
        ]

    def load(self, streams: int, requests: list[dict[str, object]]) -> Load:
        answers = [answer for future in self.send(streams, requests) for answer in future.result()]
        ends = [answer.chunks[-1] for answer in answers if answer.chunks]
        return Load(max(ends, default=float("nan")) - min(answer.sent for answer in answers), answers)


# What is measured


def measure(name: str, config: ModelConfig, sizes: Sizes, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder, config)
        settings = settings_of(options)
        begun, idle = time.perf_counter(), gpu_memory()
        with Server(folder, str(folder), settings=settings, small=False) as server:
            server.wait_ready()
            print(f"\n{name}: ready {time.perf_counter() - begun:.1f} s after the start, {options.frontends} frontends")
            clients = Clients(f"http://127.0.0.1:{server.port}", options.clients)
            with clients.pool:
                if options.kill_only:
                    for spare in (path for path in server.actors() if path.startswith("standby") and "/" in path):
                        server.wait_phase(spare, lambda actor: actor["state"] == "running")
                    kill(name, server, clients, sizes, config)
                    kill_root(name, server, idle)
                    return
                # Once before: connections, tokenizers and the like are there afterwards.
                clients.load(options.clients, bodies(sizes, options.clients, 99, 8, config.vocab_size))
                best = 0.0
                for streams, requests in plans(sizes):
                    before = cpu_seconds(server)
                    load = clients.load(streams, bodies(sizes, requests, requests, sizes.output, config.vocab_size))
                    print(f"{name} {streams:4d} streams, {requests:4d} requests: {load.line()}", flush=True)
                    shares = {who: (now - before[who]) / load.wall_s for who, now in cpu_seconds(server).items()}
                    print(
                        "     of a core:", ", ".join(f"{who} {share:.0%}" for who, share in shares.items()), flush=True
                    )
                    best = load.tokens / load.wall_s
                kill(name, server, clients, sizes, config)
        offline(name, folder, settings, sizes, config, best)


def cpu_seconds(server: Server) -> dict[str, float]:
    """Processor time that the server's processes have used, by the path of an actor in each."""
    pids = {actor["pid"]: path for path, actor in server.actors().items() if actor.get("pid")}
    pids.setdefault(server.process.pid, "root")
    found = {}
    for pid, path in pids.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[path] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def settings_of(options: argparse.Namespace) -> tuple[str, ...]:
    chosen = [
        "model.name=bench", "model.dummy_weights=true", "model.dtype=bfloat16", f"engine.device={options.device}",
        "engine.prefix_cache=false", "supervision.placement.frontend=process",
        "supervision.placement.detokenizer=process", f"http.frontends={options.frontends}", *options.set,
    ]  # fmt: skip
    if options.tiny:
        chosen += ["model.dtype=float32", "engine.threads=1", "engine.kv_tokens=32768"]
    return tuple(chosen)


def plans(sizes: Sizes) -> Iterator[tuple[int, int]]:
    """(streams, requests)"""
    for streams in sizes.streams:
        yield streams, 3 if streams == 1 else streams
    yield sizes.streams[-1], 3 * sizes.streams[-1]


def kill(name: str, server: Server, clients: Clients, sizes: Sizes, config: ModelConfig) -> None:
    """kill -9 of the scheduler under streams: until every stream goes on, and how many were lost."""
    streams, pid = sizes.killed_streams, server.actors()[SCHEDULER]["pid"]
    futures = clients.send(streams, bodies(sizes, streams, 7, sizes.killed_output, config.vocab_size))
    time.sleep(0.3 + sizes.kill_after_s)
    killed = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    answers = [answer for future in futures for answer in future.result()]
    open_then = [a for a in answers if not a.chunks or a.chunks[-1] > killed + 0.05 or a.failure]
    # What was on its way already is read within 50 ms.
    resumed = [next((at for at in a.chunks if at > killed + 0.05), None) for a in open_then]
    seconds = [at - killed for at in resumed if at is not None]
    failed = [a for a in answers if a.failure or a.usage.get("completion_tokens") != sizes.killed_output]
    print(
        f"{name} kill -9 of the scheduler under {streams} streams ({len(open_then)} open): next token after "
        f"{percentile(seconds, 0.5) / 1e3:.2f} s (median), {max(seconds, default=float('nan')):.2f} s (last); "
        f"failed {len(failed)}" + (f": {failed[0].failure[:200]}" if failed else ""),
        flush=True,
    )


def kill_root(name: str, server: Server, idle: float) -> None:
    """kill -9 of the root: until every process has gone, and until the GPU's memory is what it was before the start."""
    left, begun, gone = descendants(server.process.pid), time.perf_counter(), 0.0
    os.kill(server.process.pid, signal.SIGKILL)
    while (used := gpu_memory()) > idle + 64 or not gone:
        if not gone and not any(map(alive, left)):
            gone = time.perf_counter() - begun
        if time.perf_counter() - begun > 30:
            break
    print(
        f"{name} kill -9 of the root: {len(left)} processes gone after {gone:.2f} s, GPU memory back after "
        f"{time.perf_counter() - begun:.2f} s: {used:.0f} MiB used, {idle:.0f} before the start",
        flush=True,
    )


def gpu_memory() -> float:
    """MiB in use by anybody; 0 without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return 0.0
    query = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


def offline(
    name: str, folder: Path, settings: tuple[str, ...], sizes: Sizes, config: ModelConfig, served: float
) -> None:
    """The same engine and the last load's first wave, in this process."""
    import numpy as np

    from runtime.config import load_config
    from runtime.engine.build import build
    from runtime.messages import SamplingParams, Submit
    from runtime.sources import resolve

    files = resolve(str(folder), weights=False)
    chosen = load_config(None, [f"model.source={folder}", *settings])
    core, _ = build(chosen, files, lambda phase, done, total: None)
    for count in (sizes.streams[-1], 3 * sizes.streams[-1]):
        begun = time.perf_counter()
        for i, body in enumerate(bodies(sizes, count, count, sizes.output, config.vocab_size)):
            params = SamplingParams(max_tokens=sizes.output, temperature=0, ignore_eos=True)
            core.submit(Submit("bench", i, 0, np.asarray(body["prompt"], np.int32).tobytes(), params))
        while core.has_work():
            core.step()
        rate = count * sizes.output / (time.perf_counter() - begun)
        print(f"{name} without a server, {count} requests: {rate:.1f} tok/s", flush=True)
    print(f"{name} served / without a server, three waves: {served / rate:.2f}", flush=True)
    core.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(SHAPES)}; default all")
    parser.add_argument("--frontends", type=int, default=4)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a very small model and few streams, to try the steps")
    parser.add_argument("--kill-only", action="store_true", help="only kill -9, of scheduler and root")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    if options.tiny:
        measure("tiny", TINY, SMALL, options)
        return
    unknown = set(options.models) - set(SHAPES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for model in options.models or SHAPES:
        measure(model, SHAPES[model], Sizes(), options)


if __name__ == "__main__":
    main()
