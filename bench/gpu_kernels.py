"""GB/s and TFLOP/s of the kernels on the shapes of both models, and variants of those worth tuning.

Every figure is the median over replays of a graph of many launches that rotate through more memory than the L2 holds.
"""

import concurrent.futures
import functools
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gpu_shapes import BYTES_PER_S, FLOPS, SHAPES

from runtime.engine.kernels import activation, decode_attention, extend_attention, gemv, norm, rotary, sample

BF16 = torch.bfloat16
PAGE = 16


@functools.cache
def side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def time_us(launches: list[Callable[[], None]], replays: int = 7) -> float:
    """Microseconds a launch."""
    torch.cuda.synchronize()
    stream = side_stream()
    with torch.cuda.stream(stream):
        launches[0]()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for launch in launches:
            launch()
        graph.capture_end()
        times = []
        for _ in range(replays):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / len(launches))
    return statistics.median(times[2:])


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device="cuda")


class Decoding:
    """A batch of rows of given lengths, in as many caches as make 400 MB or more."""

    def __init__(self, q_heads: int, kv_heads: int, lengths: list[int], normed: bool) -> None:
        rng = np.random.default_rng(0)
        counts = [-(-n // PAGE) for n in lengths]
        table = np.zeros((len(lengths), max(counts)), np.int32)
        order, at = rng.permutation(sum(counts)), 0
        for i, count in enumerate(counts):
            table[i, :count] = order[at : at + count]
            at += count
        self.bytes = sum(lengths) * kv_heads * 128 * 4
        copies = max(2, min(16, -(-400_000_000 // self.bytes)))
        self.caches = [normal(2, sum(counts), kv_heads, PAGE, 128) for _ in range(copies)]
        self.rows = len(lengths)
        self.pages, self.slots, self.positions = ints(table), ints(range(self.rows)), ints([n - 1 for n in lengths])
        self.qkv, self.out = normal(self.rows, (q_heads + 2 * kv_heads) * 128), normal(self.rows, q_heads * 128)
        self.cos = torch.rand((max(lengths), 64), device="cuda")
        self.weight = normal(128) if normed else None
        self.work = decode_attention.Pieces(self.rows, q_heads, kv_heads, 128, torch.device("cuda"))
        self.count = ints([self.rows])

    def us(self, pdl: bool = True, **options: Any) -> float:
        decode_attention.cut(self.slots, self.positions, self.count, self.rows, self.work)

        def launch(cache: torch.Tensor) -> None:
            decode_attention.decode_attention(
                self.qkv, self.weight, self.weight, self.cos, self.cos, cache[0], cache[1], self.pages, self.work,
                self.out, 1e-6, 0.09, pdl=pdl, **options,
            )  # fmt: skip

        times = 64 // len(self.caches) if self.bytes < 30_000_000 else 2
        return time_us([lambda c=cache: launch(c) for cache in self.caches * times])


def lengths(rows: int, context: int) -> list[int]:
    """Ragged around ``context``: from a quarter to seven quarters of it."""
    if rows == 1:
        return [context]
    rng = np.random.default_rng(rows)
    return rng.integers(context // 4, context * 7 // 4, rows).tolist()


class Extending:
    def __init__(self, q_heads: int, kv_heads: int, rows: int, cached: int, extend: int) -> None:
        total = cached + extend
        count = -(-total // PAGE)
        self.pages = ints(np.random.default_rng(0).permutation(rows * count).reshape(rows, count))
        self.k, self.v = normal(rows * count, kv_heads, PAGE, 128), normal(rows * count, kv_heads, PAGE, 128)
        self.q, self.out = normal(rows * extend, (q_heads + 2 * kv_heads) * 128), normal(rows * extend, q_heads * 128)
        self.slots, self.cached = ints(range(rows)), ints([cached] * rows)
        self.starts = ints(np.arange(rows + 1) * extend)
        self.lists = (np.full(rows, cached, np.int32), np.full(rows, extend, np.int32), q_heads // kv_heads)
        self.flops = rows * q_heads * 4 * 128 * (extend * cached + extend * (extend + 1) / 2)

    def us(self, **options: Any) -> float:
        row, index = (ints(part) for part in extend_attention.tiles(*self.lists))

        def launch() -> None:
            extend_attention.extend_attention(
                self.q, self.k, self.v, self.pages, self.slots, self.cached, self.starts, row, index, self.out, 0.09,
                **options,
            )  # fmt: skip

        return time_us([launch] * 4)


def products(model: str) -> Iterator[tuple[str, int, int, dict[str, bool]]]:
    """(name, outputs, width, what is fused)"""
    c = SHAPES[model]
    yield "qkv", c.q_size + 2 * c.kv_size, c.hidden_size, {"norm": True}
    yield "o", c.hidden_size, c.q_size, {"add": True}
    yield "gate_up", c.mlp_size, c.hidden_size, {"norm": True, "gated": True}
    yield "down", c.hidden_size, c.mlp_size, {"add": True}


def few_rows_us(outputs: int, width: int, fused: dict[str, bool], rows: int, **options: Any) -> float:
    lines = outputs * (2 if fused.get("gated") else 1)
    copies = max(2, min(64, -(-300_000_000 // (lines * width * 2))))
    weights = [normal(lines, width) for _ in range(copies)]
    x, out, weight = normal(rows, width), normal(rows, outputs), normal(width)

    def launch(w: torch.Tensor) -> None:
        gemv.gemv(
            x, w, out, norm=weight if fused.get("norm") else None, gated=bool(fused.get("gated")),
            residual=out if fused.get("add") else None, pdl=True, **options,
        )  # fmt: skip

    return time_us([lambda w=w: launch(w) for w in weights])


def cublas_us(outputs: int, width: int, rows: int, add: bool = False) -> float:
    copies = max(2, min(64, -(-300_000_000 // (outputs * width * 2))))
    weights = [normal(outputs, width).t() for _ in range(copies)]
    x, out = normal(rows, width), normal(rows, outputs)
    if add:
        return time_us([lambda w=w: out.addmm_(x, w) for w in weights])
    return time_us([lambda w=w: torch.mm(x, w, out=out) for w in weights])


def kernels() -> None:
    for model, c in SHAPES.items():
        print(f"\n{model}: decode attention with head norm, rotary and store (ragged), TB/s of KV read")
        for rows, context in ((1, 256), (1, 4000), (4, 1000), (32, 1000), (128, 600), (256, 256), (256, 1000)):
            batch = Decoding(c.q_heads, c.kv_heads, lengths(rows, context), c.qk_norm)
            us = batch.us()
            rate = batch.bytes / us / 1e6
            print(f"  {rows:4d} x {context:5d} {us:8.1f} us {rate:6.2f} TB/s {rate * 1e12 / BYTES_PER_S:5.0%}")
            del batch
        cut_batch = Decoding(c.q_heads, c.kv_heads, lengths(256, 500), c.qk_norm)
        cut_us = time_us([
            lambda b=cut_batch: decode_attention.cut(b.slots, b.positions, b.count, b.rows, b.work)
        ] * 20)  # fmt: skip
        print(f"  cut of 256 rows {cut_us:.1f} us")
        del cut_batch
        print(f"{model}: extend attention, TFLOP/s of causal work")
        for rows, cached, extend in ((16, 0, 1024), (4, 0, 4096), (64, 0, 128), (1, 0, 512), (8, 3000, 512)):
            batch2 = Extending(c.q_heads, c.kv_heads, rows, cached, extend)
            us = batch2.us()
            print(f"  {rows:3d} x ({cached} + {extend}) {us:8.1f} us {batch2.flops / us / 1e6:6.0f} TF/s "
                  f"{batch2.flops / us * 1e6 / FLOPS:5.0%}")  # fmt: skip
            del batch2
        torch.cuda.empty_cache()
        print(
            f"{model}: products, us (TB/s of weights): ours fused at 1, 2, 4, 8 rows | cuBLAS at 1, 4, 8, 16, 64, 256"
        )
        for name, outputs, width, fused in products(model):
            lines = outputs * (2 if fused.get("gated") else 1)
            ours = [few_rows_us(outputs, width, fused, rows) for rows in (1, 2, 4, 8)]
            theirs = [cublas_us(lines, width, rows) for rows in (1, 4, 8, 16, 64, 256)]
            added = [cublas_us(lines, width, rows, True) for rows in (16, 256)] if fused.get("add") else []
            text = [f"{us:6.1f} ({lines * width * 2 / us / 1e6:4.2f})" for us in (*ours, *theirs)]
            print(f"  {name:8s} {' '.join(text[:4])} | {' '.join(text[4:])}"
                  f"{' | with += ' + ' '.join(f'{us:.1f}' for us in added) if added else ''}")  # fmt: skip
        head = [cublas_us(c.vocab_size, c.hidden_size, rows) for rows in (1, 16, 256)]
        ours = [few_rows_us(c.vocab_size, c.hidden_size, {"norm": True}, rows) for rows in (1, 4)]
        print(f"  head     ours {ours[0]:.1f} {ours[1]:.1f} | cuBLAS {head[0]:.1f} {head[1]:.1f} {head[2]:.1f}")
        torch.cuda.empty_cache()
        print(f"{model}: the rest, us at 1, 256 and 16384 rows (TB/s)")
        for name, make, each in (
            ("add, norm", norm_launch, 8 * c.hidden_size), ("norm", norm_only_launch, 4 * c.hidden_size),
            ("silu mul", silu_launch, 6 * c.mlp_size), ("rotary, store", rotary_launch, 4 * (c.q_size + 2 * c.kv_size)),
        ):  # fmt: skip
            text = []
            for rows in (1, 256, 16384):
                us = time_us([make(model, rows)] * 10)
                text.append(f"{us:7.1f} ({rows * each / us / 1e6:4.2f})")
            print(f"  {name:14s} {' '.join(text)}")
        for rows in (1, 64, 256):
            us = time_us([sample_launch(model, rows, 0.6)] * 5)
            cold = time_us([sample_launch(model, rows, 0.0)] * 5)
            size = rows * c.vocab_size * 2
            print(f"  sampling {rows:4d} rows {us:7.1f} us ({size / us / 1e6:.2f} TB/s), greedy {cold:.1f}")
        torch.cuda.empty_cache()


def norm_launch(model: str, rows: int) -> Callable[[], None]:
    width = SHAPES[model].hidden_size
    x, residual, out, weight = normal(rows, width), normal(rows, width), normal(rows, width), normal(width)
    return lambda: norm.rms_norm(x, weight, 1e-6, out, residual)


def norm_only_launch(model: str, rows: int) -> Callable[[], None]:
    width = SHAPES[model].hidden_size
    x, out, weight = normal(rows, width), normal(rows, width), normal(width)
    return lambda: norm.rms_norm(x, weight, 1e-6, out)


def silu_launch(model: str, rows: int) -> Callable[[], None]:
    width = SHAPES[model].mlp_size
    gate_up, out = normal(rows, 2 * width), normal(rows, width)
    return lambda: activation.silu_mul(gate_up, out)


def rotary_launch(model: str, rows: int) -> Callable[[], None]:
    c = SHAPES[model]
    qkv = normal(rows, c.q_size + 2 * c.kv_size)
    cache = normal(2, rows // PAGE + 1, c.kv_heads, PAGE, 128)
    pages = ints([range(rows // PAGE + 1)])
    slot, position = ints([0] * rows), ints(range(rows))
    cos = torch.rand((rows, 64), device="cuda")
    weight = normal(128) if c.qk_norm else None
    return lambda: rotary.rotate_store(
        qkv, weight, weight, cos, cos, cache[0], cache[1], pages, slot, position, 1e-6, q_heads=c.q_heads
    )


def sample_launch(model: str, rows: int, heat: float) -> Callable[[], None]:
    vocab = SHAPES[model].vocab_size
    logits, scratch = normal(rows, vocab), sample.Scratch(rows, vocab, torch.device("cuda"))
    tokens, out = ints(np.zeros((rows, 16))), ints([0] * rows)
    slots, position, wants, count = ints(range(rows)), ints([3] * rows), ints([1] * rows), ints([rows])
    temperature = torch.full((rows,), heat, device="cuda")
    return lambda: sample.sample(
        logits, slots, position, wants, count, temperature, slots, slots, tokens, out, scratch, pdl=True
    )


# Variants. Each is compiled beforehand in worker processes, which share Triton's cache on disk.

DECODE = [
    {"keys": keys, "warps": warps, "stages": stages}
    for keys, warps, stages in (
        (64, 4, 3), (64, 4, 5), (32, 4, 5), (32, 2, 5), (64, 2, 5), (64, 8, 3), (64, 8, 5), (128, 4, 3), (128, 8, 3),
        (128, 8, 5), (32, 4, 7), (16, 2, 7),
    )
]  # fmt: skip
EXTEND = [
    {"m": m, "n": n, "warps": warps, "stages": stages}
    for m, n, warps, stages in (
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 5),
        (64, 128, 4, 3), (128, 32, 8, 5), (64, 32, 4, 5),
    )
]  # fmt: skip
GEMV = [
    {"block_n": n, "block_k": k, "warps": warps}
    for n, k, warps in (
        (2, 1024, 4), (4, 512, 4), (4, 1024, 4), (4, 1024, 8), (8, 512, 4), (8, 512, 8), (8, 1024, 8), (16, 256, 4),
        (16, 512, 8), (4, 2048, 8), (2, 2048, 4), (1, 2048, 4),
    )
]  # fmt: skip


def with_keys(keys: int) -> None:
    decode_attention.BLOCK_KEYS = keys


def with_tile(m: int, n: int) -> None:
    extend_attention.BLOCK_M, extend_attention.BLOCK_N = m, n


def compile_variant(kind: str, options: dict[str, int]) -> str:
    """In a worker: run the variant once on something small."""
    try:
        if kind == "decode":
            with_keys(options["keys"])
            for q_heads, normed in ((16, True), (32, False)):
                batch = Decoding(q_heads, 8, [40] * 2, normed)
                batch.us(warps=options["warps"], stages=options["stages"])
        elif kind == "extend":
            with_tile(options["m"], options["n"])
            for q_heads in (16, 32):
                Extending(q_heads, 8, 1, 16, 64).us(warps=options["warps"], stages=options["stages"])
        else:
            for fused in ({"norm": True}, {"add": True}, {"norm": True, "gated": True}):
                for width in (2048, 3072):
                    few_rows_us(64, width, fused, 1, **options)
    except Exception as error:
        return f"{kind} {options}: {type(error).__name__} {str(error)[:120]}"
    return ""


def tune() -> None:
    jobs = [("decode", v) for v in DECODE] + [("extend", v) for v in EXTEND] + [("gemv", v) for v in GEMV]
    with concurrent.futures.ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as pool:
        for trouble in pool.map(compile_variant, *zip(*jobs, strict=True)):
            if trouble:
                print(trouble)
    batches = [(1, 256), (1, 4000), (32, 1000), (256, 300), (256, 1000)]
    print("decode attention, us at", batches, "for 0.6b | 8b; then with 2x and 1/2 the pieces")
    prepared = {
        model: [Decoding(c.q_heads, c.kv_heads, lengths(*shape), c.qk_norm) for shape in batches]
        for model, c in SHAPES.items()
    }
    for v in DECODE:
        with_keys(v["keys"])
        text = []
        for model in SHAPES:
            for batch in prepared[model]:
                try:
                    text.append(f"{batch.us(warps=v['warps'], stages=v['stages']):7.1f}")
                except Exception as error:
                    text.append(type(error).__name__)
            text.append("|")
        print(f"  {v} {' '.join(text)}", flush=True)
    with_keys(64)
    usual = decode_attention.Pieces.room_for
    for name, room in (
        ("1 a multiprocessor", lambda s, r: r + max(s.multiprocessors // s.kv_heads, r // 4)),
        ("2 a multiprocessor", lambda s, r: r + max(2 * s.multiprocessors // s.kv_heads, r // 2)),
        ("4, twice the rows", lambda s, r: r + max(4 * s.multiprocessors // s.kv_heads, 2 * r)),
        ("8, 3 times the rows", lambda s, r: r + max(8 * s.multiprocessors // s.kv_heads, 3 * r)),
    ):
        decode_attention.Pieces.room_for = room  # type: ignore[method-assign, assignment]
        text = []
        for c in SHAPES.values():
            for shape in batches:
                text.append(f"{Decoding(c.q_heads, c.kv_heads, lengths(*shape), c.qk_norm).us():7.1f}")
            text.append("|")
        print(f"  room {name:22s} {' '.join(text)}", flush=True)
    decode_attention.Pieces.room_for = usual  # type: ignore[method-assign]
    for least in (64, 256):
        before, decode_attention.LEAST_PIECE_TOKENS = decode_attention.LEAST_PIECE_TOKENS, least
        text = [f"{prepared[model][i].us():7.1f}" for model in SHAPES for i in (0, 1)]
        print(f"  least piece {least}: batch 1 at 256, 4000: {' '.join(text)}")
        decode_attention.LEAST_PIECE_TOKENS = before
    del prepared
    torch.cuda.empty_cache()
    shapes = [(16, 0, 1024), (4, 0, 4096), (64, 0, 128), (8, 3000, 512)]
    print("extend attention, TF/s at", shapes, "for 0.6b | 8b")
    for v in EXTEND:
        with_tile(v["m"], v["n"])
        text = []
        for c in SHAPES.values():
            for shape in shapes:
                try:
                    e = Extending(c.q_heads, c.kv_heads, *shape)
                    text.append(f"{e.flops / e.us(warps=v['warps'], stages=v['stages']) / 1e6:5.0f}")
                except Exception as error:
                    text.append(type(error).__name__)
            text.append("|")
        print(f"  {v} {' '.join(text)}", flush=True)
    with_tile(128, 64)
    torch.cuda.empty_cache()
    print("few-row product at 1 row, us: qkv o gate_up down for 0.6b | 8b")
    for v in GEMV:
        text = []
        for model in SHAPES:
            for _, outputs, width, fused in products(model):
                try:
                    text.append(f"{few_rows_us(outputs, width, fused, 1, **v):6.1f}")
                except Exception as error:
                    text.append(type(error).__name__)
            text.append("|")
        print(f"  {v} {' '.join(text)}", flush=True)
