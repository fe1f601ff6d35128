"""Every kernel against its float32 reference over ragged shapes: on a CUDA device where there is one, else under
Triton's interpreter (which computes bfloat16 wrongly: float32 and float16 there)."""

from typing import Literal

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton (extra: gpu)")

from runtime.engine.kernels import (
    activation,
    decode_attention,
    extend_attention,
    gemv,
    inputs,
    norm,
    rotary,
    sample,
)
from runtime.engine.sampling import gumbel, row_keys

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
PAGE = 16


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype).to(DEVICE)


def ints(values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)


def close(given: torch.Tensor, wanted: torch.Tensor, nan: Literal["wrong", "missing"] = "wrong") -> None:
    """Relative error of the whole, by the dtype the kernel wrote (dots of float32 may run as tf32 on a GPU). NaN is
    wrong, or says what was never written: then both must have it at the same places."""
    bound = {torch.float32: 2e-3 if DEVICE.type == "cuda" else 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
    given32, wanted = given.float(), wanted.float()
    if nan == "missing":
        there = ~torch.isnan(wanted)
        assert torch.isnan(given32[~there]).all()
        given32, wanted = given32[there], wanted[there]
    assert torch.isfinite(given32).all()
    assert (given32 - wanted).norm() <= bound[given.dtype] * wanted.norm() + 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "add"), [(1, 48, True), (5, 64, False), (3, 1000, True)])
def test_rms_norm(dtype: torch.dtype, rows: int, width: int, add: bool) -> None:
    x, weight = normal(rows, width + 8, dtype=dtype)[:, :width], normal(width, dtype=dtype)
    residual = normal(rows, width, dtype=dtype) if add else None
    wanted, sums = norm.rms_norm_reference(x, weight, 1e-5, residual)
    out = torch.full((rows, width), float("nan"), dtype=dtype, device=DEVICE)
    norm.rms_norm(x, weight, 1e-5, out, residual)
    close(out, wanted)
    if residual is not None and sums is not None:
        close(residual, sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 80), (7, 3000)])
def test_silu_mul(dtype: torch.dtype, rows: int, width: int) -> None:
    gate_up = normal(rows, 2 * width, dtype=dtype)
    out = torch.full((rows, width), float("nan"), dtype=dtype, device=DEVICE)
    activation.silu_mul(gate_up, out)
    close(out, activation.silu_mul_reference(gate_up))


class Cache:
    """Rows of random lengths in a paged cache whose free pages hold NaN, as stale memory may."""

    def __init__(self, q_heads: int, kv_heads: int, head_dim: int, lengths: list[int], dtype: torch.dtype) -> None:
        rng = np.random.default_rng(1)
        most = max(lengths)
        self.slots = rng.permutation(len(lengths) + 2)[: len(lengths)].astype(np.int32)
        per_row = -(-most // PAGE) + 1
        total = sum(-(-n // PAGE) for n in lengths) + 3
        free = rng.permutation(total).tolist()
        self.pages = np.full((len(lengths) + 2, per_row), total - 1, np.int32)
        shape = (total, kv_heads, PAGE, head_dim)
        self.k, self.v = (torch.full(shape, float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
        for slot, n in zip(self.slots, lengths, strict=True):
            held = [free.pop() for _ in range(-(-n // PAGE))]
            self.pages[slot, : len(held)] = held
            for i, page in enumerate(held):
                used = min(PAGE, n - i * PAGE)
                self.k[page, :, :used] = normal(kv_heads, used, head_dim, dtype=dtype)
                self.v[page, :, :used] = normal(kv_heads, used, head_dim, dtype=dtype)
        self.q_heads, self.kv_heads, self.head_dim, self.dtype = q_heads, kv_heads, head_dim, dtype
        angles = torch.outer(torch.arange(most + 1).float(), 1.0 / 10000 ** (torch.arange(head_dim // 2) / 8))
        self.cos, self.sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)

    def qkv(self, tokens: int) -> torch.Tensor:
        return normal(tokens, (self.q_heads + 2 * self.kv_heads) * self.head_dim, dtype=self.dtype)


# (q_heads, kv_heads, head_dim), each once in each dtype that is tested
HEADS = [
    pytest.param(torch.float32, 4, 2, 32, id="f32-4-2-32"),
    pytest.param(torch.float16, 7, 1, 16, id="f16-7-1-16"),
    pytest.param(torch.float32, 3, 3, 64, id="f32-3-3-64"),
]
if DEVICE.type == "cuda":
    HEADS.append(pytest.param(torch.bfloat16, 8, 2, 128, id="bf16-8-2-128"))


@pytest.mark.parametrize(("dtype", "q_heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("normed", [False, True])
def test_rotate_store(dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int, normed: bool) -> None:
    """The line behind ``count`` is padding."""
    lengths = [40, 3, 17]
    cache = Cache(q_heads, kv_heads, head_dim, lengths, dtype)
    token_slot, token_position = ints(cache.slots[[0, 0, 1, 2, 0]]), ints([38, 39, 2, 16, 7])
    weights = [normal(head_dim, dtype=dtype) if normed else None for _ in range(2)]
    qkv, pages = cache.qkv(5), ints(cache.pages)
    fixed = (*weights, cache.cos, cache.sin, cache.k, cache.v, pages)
    q, k, v = rotary.rotate_store_reference(
        qkv[:4], *fixed, token_slot[:4], token_position[:4], 1e-6, q_heads=q_heads
    )  # fmt: skip
    padding = qkv[4].clone()
    rotary.rotate_store(qkv, *fixed, token_slot, token_position, 1e-6, q_heads=q_heads, count=ints([4]))
    close(qkv[:4, : q_heads * head_dim], q.reshape(4, -1))
    assert torch.equal(qkv[4], padding)
    close(cache.k, k, "missing")
    close(cache.v, v, "missing")


@pytest.mark.parametrize(("dtype", "q_heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("lengths", [[1], [300], [1, 16, 63, 64, 65, 130], [17] * 3 + [200]])
def test_decode_attention(dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int, lengths: list[int]) -> None:
    """Rows of ``lengths`` keys, then two lines of padding."""
    cache = Cache(q_heads, kv_heads, head_dim, lengths, dtype)
    rows = len(lengths)
    slots, positions = ints([*cache.slots, 0, 0]), ints([*(n - 1 for n in lengths), 5, 5])
    qkv, pages = cache.qkv(rows + 2), ints(cache.pages)
    wanted = decode_attention.decode_attention_reference(
        qkv[:rows], cache.k, cache.v, pages, slots[:rows], positions[:rows], 0.3, q_heads=q_heads
    )
    work = decode_attention.Pieces(rows + 2, q_heads, kv_heads, head_dim, DEVICE, 132 if DEVICE.type == "cuda" else 2)
    out = torch.full((rows + 2, q_heads * head_dim), float("nan"), dtype=dtype, device=DEVICE)
    for _ in range(2):  # the second run finds the counters as the first left them
        decode_attention.cut(slots, positions, ints([rows]), rows + 2, work, PAGE)
        decode_attention.decode_attention(qkv, cache.k, cache.v, pages, work, out, 0.3)
        close(out[:rows], wanted)
        assert torch.isnan(out[rows:]).all()
    assert int(work.total) >= rows


@pytest.mark.parametrize("rows", [[(0, 1)], [(130, 2), (0, 65), (64, 64), (5, 1)], [(150, 40), (0, 3), (63, 70)]])
@pytest.mark.parametrize(("dtype", "q_heads", "kv_heads", "head_dim"), HEADS)
def test_extend_attention(
    dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int, rows: list[tuple[int, int]]
) -> None:
    """Rows are (cached, new) tokens; the cache holds both."""
    cache = Cache(q_heads, kv_heads, head_dim, [sum(row) for row in rows], dtype)
    cached, extend = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    starts = np.concatenate([[0], np.cumsum(extend)]).astype(np.int32)
    tokens = int(starts[-1])
    qkv, pages, slots = cache.qkv(tokens), ints(cache.pages), ints(cache.slots)
    row, index = extend_attention.tiles(cached, extend, q_heads // kv_heads)
    out = torch.full((tokens, q_heads * head_dim), float("nan"), dtype=dtype, device=DEVICE)
    args = (qkv, cache.k, cache.v, pages, slots, ints(cached), ints(starts))
    extend_attention.extend_attention(*args, ints(row), ints(index), out, 0.3)
    close(out, extend_attention.extend_attention_reference(*args, 0.3, q_heads=q_heads))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "gated", "add", "biased"), [(1, 0, 0, 1), (1, 1, 0, 0), (2, 1, 0, 1), (4, 0, 1, 0), (8, 0, 1, 1)]
)
@pytest.mark.parametrize(("width", "outputs"), [(48, 20), (1032, 9)])
def test_gemv(dtype: torch.dtype, rows: int, width: int, outputs: int, gated: int, add: int, biased: int) -> None:
    x = normal(rows, width, dtype=dtype)
    lines = outputs * (2 if gated else 1)
    weight = normal(lines, width, dtype=dtype, scale=width**-0.5)
    options = {"bias": normal(lines, dtype=dtype) if biased else None, "gated": bool(gated)}
    residual = normal(rows, outputs, dtype=dtype)
    wanted = gemv.gemv_reference(x, weight, **options, residual=residual if add else None)
    gemv.gemv(x, weight, residual, gemv.Tile(32, 64, 1, 3), **options, residual=residual if add else None)
    close(residual, wanted)


@pytest.mark.parametrize("lengths", [[1], [5, 1, 1030]])
def test_inputs(lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    context, columns, slots = 1100, 5, 8
    pages_row = -(-context // PAGE)
    at, news, payload = 0, [], []
    chosen = rng.permutation(slots)[: len(lengths)]
    for slot, n in zip(chosen, lengths, strict=True):
        words = rng.integers(0, 1000, columns + pages_row + n)
        news.append((slot, at, n))
        payload.append(words)
        at += len(words)
    table = [torch.full(shape, -7, dtype=torch.int32, device=DEVICE) for shape in ((columns, slots), (slots, context))]
    pages = torch.zeros((slots, pages_row), dtype=torch.int32, device=DEVICE)
    args = (len(lengths), ints(news).reshape(-1), ints(np.concatenate(payload)), *table, pages)
    wanted = inputs.admit_reference(*args)
    inputs.admit(*args)
    for given, want in zip((*table, pages), wanted, strict=True):
        assert torch.equal(given, want)

    updates = ints([(slot, 3 + i, 40 + i) for i in range(2) for slot in chosen]).reshape(-1)
    count = ints([2 * len(lengths)])
    want = inputs.apply_pages_reference(count, updates, pages)
    inputs.apply_pages(count, updates, pages)
    assert torch.equal(pages, want)

    starts = ints(np.concatenate([[0], np.cumsum(lengths)]))
    cached = ints(rng.integers(0, 50, len(lengths)))
    total = sum(lengths)
    token_slot, token_position = (torch.zeros(total, dtype=torch.int32, device=DEVICE) for _ in range(2))
    inputs.expand(len(lengths), ints(chosen), cached, starts, token_slot, token_position)
    want_slot, want_position = inputs.expand_reference(len(lengths), ints(chosen), cached, starts)
    assert torch.equal(token_slot, want_slot)
    assert torch.equal(token_position, want_position)

    weights = normal(300, 24)
    tokens = ints(rng.integers(0, 300, (slots, context + 50)))
    out = torch.full((total, 24), float("nan"), device=DEVICE)
    inputs.embed(tokens, token_slot, token_position, weights, out)
    assert torch.equal(out, inputs.embed_reference(tokens, token_slot, token_position, weights))


class Rows:
    """Sampling state of ``n`` rows in a table of more slots."""

    def __init__(self, n: int, temperatures: list[float]) -> None:
        rng = np.random.default_rng(3)
        self.slots = rng.permutation(n + 3)[:n].astype(np.int32)
        self.seed = rng.integers(0, 2**64, n + 3, dtype=np.uint64)
        self.temperature = np.resize(np.array(temperatures, np.float32), n + 3)
        self.positions = rng.integers(0, 50, n).astype(np.int32)
        halves = self.seed.view(np.int32).reshape(-1, 2)
        self.args = (ints(self.slots), ints(self.positions))
        self.columns = (
            torch.tensor(self.temperature, device=DEVICE), ints(halves[:, 0].copy()), ints(halves[:, 1].copy())
        )  # fmt: skip


def draw(logits: torch.Tensor, rows: Rows, threshold: torch.Tensor | None = None) -> tuple[list[int], torch.Tensor]:
    n = len(logits)
    tokens = torch.full((n + 3, 64), -1, dtype=torch.int32, device=DEVICE)
    sampled = torch.full((n,), -9, dtype=torch.int32, device=DEVICE)
    sample.sample(
        logits, *rows.args, ints([1] * n), ints([n]), *rows.columns, tokens, sampled,
        sample.Scratch(n, logits.shape[1], DEVICE), threshold,
    )  # fmt: skip
    return sampled.tolist(), tokens


@pytest.mark.parametrize("vocab", [50, 5000])
def test_noise_is_the_cpu_samplers(vocab: int) -> None:
    rows = Rows(6, [0.7])
    first, second = row_keys(rows.seed[rows.slots], rows.positions + 1)
    noise = gumbel(first, second, torch.arange(vocab, dtype=torch.int32))
    mine = sample.gumbel_reference(
        torch.from_numpy(rows.seed[rows.slots].view(np.int64)), torch.from_numpy(rows.positions + 1).long(), vocab
    )
    assert torch.equal(noise, mine)
    # Flat logits: the largest noise wins.
    drawn, tokens = draw(torch.zeros((6, vocab), device=DEVICE), rows)
    assert drawn == noise.argmax(1).tolist()
    for i in range(6):
        assert tokens[rows.slots[i], rows.positions[i] + 1] == drawn[i]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sample(dtype: torch.dtype) -> None:
    vocab = 4099
    rows = Rows(5, [0.0, 0.6, 1.5])
    logits = normal(5, vocab, dtype=dtype, scale=3.0)
    heat = rows.columns[0][rows.args[0].long()][:, None].cpu()
    noise = sample.gumbel_reference(
        torch.from_numpy(rows.seed[rows.slots].view(np.int64)), torch.from_numpy(rows.positions + 1).long(), vocab
    )
    x = logits.float().cpu()
    wanted = torch.where(heat > 0, x / heat.clamp(min=1e-3) + noise, x).argmax(1)
    assert draw(logits, rows)[0] == wanted.tolist()


def test_sample_reports_broken_rows_and_masks() -> None:
    rows = Rows(5, [0.0, 0.8])
    logits = normal(5, 9000)
    logits[0, 8000] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    logits[3, ::2] = float("-inf")
    drawn, _ = draw(logits, rows)
    assert drawn[:3] == [-2, -2, -2]
    assert drawn[3] % 2 == 1
    assert drawn[4] >= 0


@pytest.mark.parametrize("vocab", [64, 5001])
def test_thresholds(vocab: int) -> None:
    n = 8
    rows = Rows(n, [1.0, 0.5, 0.9])
    slot = torch.from_numpy(rows.slots).long()
    logits = normal(n, vocab, scale=2.0)
    logits[2] = logits[2].round()  # ties
    logits[5, : vocab // 2] = float("-inf")
    k = np.zeros(n + 3, np.int32)
    p, floor = np.ones(n + 3, np.float32), np.zeros(n + 3, np.float32)
    k[rows.slots[[0, 2, 6]]] = [5, 7, vocab + 9]
    p[rows.slots[[1, 2, 5]]] = [0.9, 0.6, 0.3]
    floor[rows.slots[[3, 2, 7]]] = [0.05, 0.01, 1.0]
    out = torch.full((n,), float("nan"), device=DEVICE)
    columns = (rows.columns[0], ints(k), torch.tensor(p, device=DEVICE), torch.tensor(floor, device=DEVICE))
    sample.thresholds(logits, rows.args[0], *columns, out)
    wanted = sample.thresholds_reference(logits.cpu(), *(column.cpu()[slot] for column in columns))
    kept = (logits.cpu() >= wanted[:, None]).sum(1)
    given = (logits >= out[:, None]).sum(1).cpu()
    assert torch.equal(kept, given)
