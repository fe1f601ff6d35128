"""Sampling by the Gumbel-max trick: token = argmax(logit / temperature + noise(seed, position, token)).

The noise is a counter-based hash in 32-bit arithmetic, the same formula as in ``runtime.engine.sampling``: who restarts
a request elsewhere, or runs it on the CPU, draws the same. Filters (top-k, top-p, min-p) are thresholds on the logits,
found by ``thresholds`` before; a row without filters has -inf there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.engine.kernels.launch import options

BLOCK_V = 4096


@triton.jit
def mix(x):
    """``runtime.engine.sampling.mix`` on uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_keys(seed_low, seed_high, position):
    first = mix(mix(mix(seed_low + 0x9E3779B9) ^ seed_high) ^ position)
    return first, mix(first + 0x85EBCA6B)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """FAST: the hardware's, within 2**-22 (tl.log2 is exact to the last bits, in 20 instructions)."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def gumbel(token, first, second, FAST: tl.constexpr):
    """-log(-log(u)) of the token's uniform u = ((bits >> 9) + 0.5) / 2**23."""
    bits = mix(mix(token ^ first) + second)
    below = (0x3F800000 | (bits >> 9)).to(tl.float32, bitcast=True) - 1.0  # u less half a step, exactly
    rest = 0.99999994039535522 - below  # 1 - u, exactly: winners have u near 1, where log2(u) is not precise enough
    near = rest * (1.0 + rest * (0.5 + rest * (0.33333333 + rest * (0.25 + rest * (0.2 + rest * 0.16666667)))))
    far = _log2(below + 5.9604644775390625e-08, FAST) * -0.69314718055994531
    return _log2(tl.where(rest < 0.125, near, far), FAST) * -0.69314718055994531


@triton.jit
def _best_in_block(
    logits, threshold, slots, positions, temperature, seed_low, seed_high, best, best_id, logits_stride, vocab,
    BLOCKS: tl.constexpr, BLOCK_V: tl.constexpr, FILTER: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(slots + row).to(tl.int64)
    position = (tl.load(positions + row) + 1).to(tl.uint32, bitcast=True)  # where the sampled token will stand
    heat = tl.load(temperature + slot)
    low = tl.load(seed_low + slot).to(tl.uint32, bitcast=True)
    high = tl.load(seed_high + slot).to(tl.uint32, bitcast=True)
    first, second = row_keys(low, high, position)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = v < vocab
    if PDL:
        gdc_wait()
    x = tl.load(logits + row.to(tl.int64) * logits_stride + v, inside, float("-inf")).to(tl.float32)
    score = x
    if FILTER:
        score = tl.where(x >= tl.load(threshold + row), x, float("-inf"))
    if heat > 0:
        score = score * (1.0 / heat) + gumbel(v.to(tl.uint32, bitcast=True), first, second, FAST)
    score = tl.where(x < float("inf"), score, float("inf"))  # NaN and +inf win, and tell that the row is broken
    top, at = tl.max(score, 0, return_indices=True)
    tl.store(best + row * BLOCKS + block, top)
    tl.store(best_id + row * BLOCKS + block, block * BLOCK_V + at)


@triton.jit
def _best_of_blocks(
    best, best_id, slots, positions, sample, rows_count, tokens, sampled, tokens_stride,
    BLOCKS: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.arange(0, BLOCK_B)
    x = tl.load(best + row * BLOCKS + b, b < BLOCKS, float("-inf"))
    top, at = tl.max(x, 0, return_indices=True)
    token = tl.load(best_id + row * BLOCKS + at)
    token = tl.where((top == float("inf")) | (top == float("-inf")), -2, token)
    real = (row < tl.load(rows_count)) & (tl.load(sample + row) != 0)
    tl.store(sampled + row, tl.where(real, token, -1))
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row) + 1
    # A row whose logits broke ends when the host sees it; until then it must not read outside the embedding.
    tl.store(tokens + slot * tokens_stride + position, tl.maximum(token, 0), real & (position < tokens_stride))


class Scratch:
    """Block winners of up to ``rows`` rows."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        blocks = triton.cdiv(vocab, BLOCK_V)
        self.best = torch.empty((rows, blocks), dtype=torch.float32, device=device)
        self.best_id = torch.empty((rows, blocks), dtype=torch.int32, device=device)


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    wants: Tensor,
    rows_count: Tensor,
    temperature: Tensor,
    seed_low: Tensor,
    seed_high: Tensor,
    tokens: Tensor,
    sampled: Tensor,
    scratch: Scratch,
    threshold: Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """Draw one token a row, write it to ``sampled`` [rows] and to tokens[slot, position + 1].

    logits [rows, vocab]; slots, positions (of the last computed token), wants int32 [rows]: rows with wants == 0 and
    rows from ``rows_count`` (on the device) on yield -1 and write nothing else. temperature float32, seed halves int32
    [slots]; tokens int32 [slots, context_tokens]. A row with NaN or +inf yields -2, and so does one all of
    whose logits are -inf. With ``threshold`` float32 [rows] only logits >= it count.
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK_V)
    _best_in_block[(blocks, rows)](
        logits, logits if threshold is None else threshold, slots, positions, temperature, seed_low, seed_high,
        scratch.best, scratch.best_id, logits.stride(0), vocab,
        BLOCKS=blocks, BLOCK_V=BLOCK_V, FILTER=threshold is not None, FAST=logits.is_cuda, PDL=pdl,
        **options(4, pdl=pdl),
    )  # fmt: skip
    _best_of_blocks[(rows,)](
        scratch.best, scratch.best_id, slots, positions, wants, rows_count, tokens, sampled, tokens.stride(0),
        BLOCKS=blocks, BLOCK_B=triton.next_power_of_2(blocks), PDL=pdl, **options(1, pdl=pdl),
    )  # fmt: skip


@triton.jit
def _ordered(x):
    """float32 -> int32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _unordered(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _threshold(
    logits, slots, temperature, top_k, top_p, min_p, threshold, logits_stride, vocab, BLOCK_V: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    heat = tl.load(temperature + slot)
    k = tl.load(top_k + slot)
    p = tl.load(top_p + slot)
    floor = tl.load(min_p + slot)
    x_row = logits + row * logits_stride
    i = tl.arange(0, BLOCK_V)
    most = tl.full([BLOCK_V], float("-inf"), tl.float32)
    least = tl.full([BLOCK_V], float("inf"), tl.float32)
    for v0 in range(0, vocab, BLOCK_V):
        inside = v0 + i < vocab
        x = tl.load(x_row + v0 + i, inside, float("-inf")).to(tl.float32)
        most = tl.maximum(most, x)
        least = tl.minimum(least, tl.where(inside & (x > float("-inf")), x, float("inf")))
    top = tl.max(most, 0)
    bottom = tl.min(least, 0)
    kept = bottom
    if heat > 0:
        if (k > 0) & (k < vocab):  # the largest key with at least k logits at or above it
            low = _ordered(kept)
            high = _ordered(top)
            while low < high:
                middle = _middle(low, high) + 1
                count = tl.zeros([BLOCK_V], tl.int32)
                at_least = _unordered(middle)
                for v0 in range(0, vocab, BLOCK_V):
                    x = tl.load(x_row + v0 + i, v0 + i < vocab, float("-inf")).to(tl.float32)
                    count += (x >= at_least).to(tl.int32)
                enough = tl.sum(count, 0) >= k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
            kept = _unordered(low)
        if p < 1.0:  # the largest key with at least the share p of the kept mass at or above it
            mass = tl.zeros([BLOCK_V], tl.float32)
            for v0 in range(0, vocab, BLOCK_V):
                x = tl.load(x_row + v0 + i, v0 + i < vocab, float("-inf")).to(tl.float32)
                mass += tl.where(x >= kept, tl.exp((x - top) / heat), 0.0)
            wanted = tl.sum(mass, 0) * p
            low = _ordered(kept)
            high = _ordered(top)
            while low < high:
                middle = _middle(low, high) + 1
                mass = tl.zeros([BLOCK_V], tl.float32)
                at_least = _unordered(middle)
                for v0 in range(0, vocab, BLOCK_V):
                    x = tl.load(x_row + v0 + i, v0 + i < vocab, float("-inf")).to(tl.float32)
                    mass += tl.where(x >= at_least, tl.exp((x - top) / heat), 0.0)
                enough = tl.sum(mass, 0) >= wanted
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
            kept = _unordered(low)
        if floor > 0.0:
            kept = tl.maximum(kept, tl.minimum(top, top + heat * tl.log(floor)))
    tl.store(threshold + row, kept)


def thresholds(
    logits: Tensor, slots: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, out: Tensor
) -> None:
    """out [rows] = the smallest logit that top-k, then top-p of what is left, then min-p keep; ties stay.

    logits [rows, vocab], -inf = masked; slots int32 [rows]; parameters per slot. By bisection over the floats' order,
    at most 32 passes over a row; nothing is sorted.
    """
    rows, vocab = logits.shape
    _threshold[(rows,)](
        logits, slots, temperature, top_k, top_p, min_p, out, logits.stride(0), vocab, BLOCK_V=BLOCK_V, **options(16)
    )


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def gumbel_reference(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """float32 [rows, vocab]; seed (uint64 bits) and position int64 [rows]; 32-bit arithmetic kept in int64."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    first = _mix(_mix(_mix((low + 0x9E3779B9) & 0xFFFFFFFF) ^ high) ^ position)
    second = _mix((first + 0x85EBCA6B) & 0xFFFFFFFF)
    token = torch.arange(vocab, dtype=torch.int64, device=seed.device)
    bits = _mix((_mix(token[None, :] ^ first[:, None]) + second[:, None]) & 0xFFFFFFFF)
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def thresholds_reference(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """float32 [rows], by sorting; the parameters are per row here."""
    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    for r in range(len(logits)):
        ranked = logits[r].float().sort(descending=True).values
        ranked = ranked[ranked > float("-inf")]
        t, k, p, floor = temperature[r].item(), int(top_k[r]), top_p[r].item(), min_p[r].item()
        if t == 0:
            out[r] = ranked[-1]
            continue
        if 0 < k < len(ranked):
            ranked = ranked[ranked >= ranked[k - 1]]
        if p < 1:
            share = torch.softmax(ranked.double() / t, 0).cumsum(0)
            ranked = ranked[: int((share < p).sum()) + 1]
        kept = ranked[-1]
        if floor > 0:
            kept = torch.maximum(kept, ranked[0] + t * torch.log(torch.tensor(floor)))
        out[r] = kept
    return out
