"""GB/s and TFLOP/s of the kernels on the shapes of both models.

Every figure is the median over replays of a graph of many launches that rotate through more memory than the L2 holds.
"""

import functools
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

    def __init__(self, q_heads: int, kv_heads: int, lengths: list[int]) -> None:
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
        self.rows, self.heads = len(lengths), (q_heads, kv_heads)
        self.pages, self.slots, self.positions = ints(table), ints(range(self.rows)), ints([n - 1 for n in lengths])
        self.q, self.out = normal(self.rows, (q_heads + 2 * kv_heads) * 128), normal(self.rows, q_heads * 128)
        self.count = ints([self.rows])

    def us(self, pdl: bool = True) -> float:
        work = decode_attention.Pieces(self.rows, *self.heads, 128, torch.device("cuda"))
        decode_attention.cut(self.slots, self.positions, self.count, self.rows, work, PAGE)

        def launch(cache: torch.Tensor) -> None:
            decode_attention.decode_attention(self.q, cache[0], cache[1], self.pages, work, self.out, 0.09, pdl=pdl)

        times = 64 // len(self.caches) if self.bytes < 30_000_000 else 2
        return time_us([lambda c=cache: launch(c) for cache in self.caches * times])


def cutting_us(q_heads: int, kv_heads: int) -> float:
    batch = Decoding(q_heads, kv_heads, lengths(256, 500))
    work = decode_attention.Pieces(256, q_heads, kv_heads, 128, torch.device("cuda"))
    return time_us(
        [lambda: decode_attention.cut(batch.slots, batch.positions, batch.count, batch.rows, work, PAGE)] * 20
    )


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

    def us(self) -> float:
        row, index = (ints(part) for part in extend_attention.tiles(*self.lists))

        def launch() -> None:
            extend_attention.extend_attention(
                self.q, self.k, self.v, self.pages, self.slots, self.cached, self.starts, row, index, self.out, 0.09
            )

        return time_us([launch] * 4)


def products(model: str) -> Iterator[tuple[str, int, int, dict[str, bool]]]:
    """(name, outputs, width, what is fused)"""
    c = SHAPES[model]
    yield "qkv", c.q_size + 2 * c.kv_size, c.hidden_size, {}
    yield "o", c.hidden_size, c.q_size, {"add": True}
    yield "gate_up", c.mlp_size, c.hidden_size, {"gated": True}
    yield "down", c.hidden_size, c.mlp_size, {"add": True}


def copies_of(lines: int, width: int) -> list[torch.Tensor]:
    return [normal(lines, width) for _ in range(max(2, min(48, -(-250_000_000 // (lines * width * 2)))))]


def few_rows_us(weights: list[torch.Tensor], fused: dict[str, bool], rows: int, tile: gemv.Tile) -> float:
    lines, width = weights[0].shape
    outputs = lines // 2 if fused.get("gated") else lines
    x, out = normal(rows, width), normal(rows, outputs)

    def launch(w: torch.Tensor) -> None:
        gemv.gemv(x, w, out, tile, gated=bool(fused.get("gated")), residual=out if fused.get("add") else None, pdl=True)

    return time_us([lambda w=w: launch(w) for w in weights])


def cublas_us(weights: list[torch.Tensor], rows: int, fused: dict[str, bool]) -> float:
    """The product, with the addition it takes along; gate and up without what follows."""
    lines, width = weights[0].shape
    x, out = normal(rows, width), normal(rows, lines)
    if fused.get("add"):
        return time_us([lambda w=w: out.addmm_(x, w.t()) for w in weights])
    return time_us([lambda w=w: torch.mm(x, w.t(), out=out) for w in weights])


def kernels() -> None:
    for model, c in SHAPES.items():
        print(f"\n{model}: decode attention (ragged), TB/s of KV read")
        for rows, context in ((1, 256), (1, 4000), (4, 1000), (32, 1000), (128, 600), (256, 256), (256, 1000)):
            batch = Decoding(c.q_heads, c.kv_heads, lengths(rows, context))
            us = batch.us()
            rate = batch.bytes / us / 1e6
            print(f"  {rows:4d} x {context:5d} {us:8.1f} us {rate:6.2f} TB/s {rate * 1e12 / BYTES_PER_S:5.0%}")
            del batch
        cut_us = cutting_us(c.q_heads, c.kv_heads)
        print(f"  cut of 256 rows {cut_us:.1f} us")
        print(f"{model}: extend attention, TFLOP/s of causal work")
        for rows, cached, extend in ((16, 0, 1024), (4, 0, 4096), (64, 0, 128), (1, 0, 512), (8, 3000, 512)):
            batch2 = Extending(c.q_heads, c.kv_heads, rows, cached, extend)
            us = batch2.us()
            print(f"  {rows:3d} x ({cached} + {extend}) {us:8.1f} us {batch2.flops / us / 1e6:6.0f} TF/s "
                  f"{batch2.flops / us * 1e6 / FLOPS:5.0%}")  # fmt: skip
            del batch2
        torch.cuda.empty_cache()
        print(f"{model}: products, us (TB/s of weights): ours at 1, 2, 4 rows | cuBLAS at 1, 2, 4, 8, 16, 64, 256")
        for name, outputs, width, fused in products(model):
            weights = copies_of(outputs * (2 if fused.get("gated") else 1), width)
            tiles = [gemv.tile_for(m, outputs, width, bool(fused.get("gated"))) for m in (1, 2, 4)]
            ours = [few_rows_us(weights, fused, m, t) for m, t in zip((1, 2, 4), tiles, strict=True)]
            theirs = [cublas_us(weights, rows, fused) for rows in (1, 2, 4, 8, 16, 64, 256)]
            text = [f"{us:6.1f} ({weights[0].nbytes / us / 1e6:4.2f})" for us in (*ours, *theirs)]
            print(f"  {name:8s} {' '.join(text[:3])} | {' '.join(text[3:])}")
            del weights
        torch.cuda.empty_cache()
        rest(model)


def rest(model: str) -> None:
    c = SHAPES[model]
    print(f"{model}: the rest, us at 1, 256 and 16384 rows (TB/s)")
    for name, make, each in (
        ("norm", norm_only_launch, 4 * c.hidden_size), ("silu mul", silu_launch, 6 * c.mlp_size),
        ("rotary, store", rotary_launch, 4 * (c.q_size + 2 * c.kv_size)),
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


def sizes() -> None:
    """cuBLAS over the batch sizes of the graphs: are there sizes that are better padded?"""
    for model in SHAPES:
        print(f"{model}: cuBLAS, us at 8, 16 ... 256 rows")
        for name, outputs, width, fused in products(model):
            weights = copies_of(outputs * (2 if fused.get("gated") else 1), width)[:24]
            times = [cublas_us(weights, rows, fused) for rows in range(8, 257, 8)]
            print(f"  {name:8s} {' '.join(f'{us:.1f}' for us in times)}", flush=True)
            del weights
            torch.cuda.empty_cache()
