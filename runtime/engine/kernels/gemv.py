"""Matrix times few vectors (1 to 8), where all that counts is how fast the weights stream in.

The tensor cores do it, with the weights as the tile of 16 lines and the vectors as the 8 columns. For fewer than 8
vectors the inner dimension is folded: with one vector a line of the tile is an eighth of a row of weights, a column an
eighth of the vector, and the products wanted stand where the two eighths are the same. So every byte of the weights is
loaded once, in long runs, at a handful of instructions for 512 bytes. What surrounds the projection is done on the way:

- ``gated``: the matrix is [gate; up] and the result is silu(gate) * up.
- ``residual``: the result is added to it, in place.

With programmatic dependent launch a program asks for all of its weights (into the L2 cache) before it waits for its
predecessor, so memory stays busy in between; only where the whole matrix fits into that cache.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.engine.kernels.launch import options

MOST_ROWS = 8
PREFETCHED_BYTES = 24 << 20  # more would push one another out of the L2 cache before they are used


class Tile(NamedTuple):
    """What a program takes: ``lines`` of ``block_k`` weights at a time, with so many warps and stages in flight."""

    lines: int
    block_k: int
    warps: int
    stages: int


@triton.jit
def _prefetch(at, count):
    """Ask for ``count`` bytes (a multiple of 16) from each of the addresses ``at`` on into the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [at.to(tl.int64), count],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _tile(at, k, k_end, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at + k)
    return tl.load(at + k, k < k_end, 0.0)


@triton.jit
def _unfolded(acc, line, column, M: tl.constexpr, FOLDS: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N * FOLDS, M * FOLDS] -> [BLOCK_N, M]: of each pair of folds only equal ones count."""
    same = (line % FOLDS)[:, None] == (column % FOLDS)[None, :]
    return tl.sum(tl.sum(tl.reshape(tl.where(same, acc, 0.0), [BLOCK_N, FOLDS, M, FOLDS]), 3), 1)


@triton.jit
def _gemv(
    x, weight, bias, residual, out, part, outputs,
    M: tl.constexpr, FOLDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ASKERS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    width = part * FOLDS
    n0 = tl.program_id(0) * BLOCK_N
    if PDL:
        gdc_launch_dependents()
        if ASKERS > 0:
            share = BLOCK_N * width // ASKERS
            asker = tl.arange(0, ASKERS)
            mine = weight + n0.to(tl.int64) * width + asker * share
            _prefetch(mine, asker * 0 + share * 2)
            if GATED:
                _prefetch(mine + outputs.to(tl.int64) * width, asker * 0 + share * 2)
        gdc_wait()
    line = tl.arange(0, BLOCK_N * FOLDS)
    column = tl.arange(0, M * FOLDS)
    k = tl.arange(0, BLOCK_K)
    n = tl.minimum(n0 + line // FOLDS, outputs - 1).to(tl.int64)
    at = (weight + n * width + (line % FOLDS) * part)[:, None]
    at_up = at + outputs.to(tl.int64) * width
    at_x = (x + (column // FOLDS) * width + (column % FOLDS) * part)[None, :]
    acc = tl.zeros([BLOCK_N * FOLDS, M * FOLDS], tl.float32)
    acc_up = tl.zeros([BLOCK_N * FOLDS, M * FOLDS], tl.float32)
    for k0 in tl.range(0, part, BLOCK_K, num_stages=STAGES):
        xs = _tile(at_x, (k0 + k)[:, None], part, EVEN)  # [BLOCK_K, 8]
        acc = tl.dot(_tile(at, (k0 + k)[None, :], part, EVEN), xs, acc, input_precision="ieee")
        if GATED:
            acc_up = tl.dot(_tile(at_up, (k0 + k)[None, :], part, EVEN), xs, acc_up, input_precision="ieee")
    nn = n0 + tl.arange(0, BLOCK_N)
    m = tl.arange(0, M)
    real = nn < outputs
    y = _unfolded(acc, line, column, M, FOLDS, BLOCK_N)
    if BIAS:
        y += tl.load(bias + nn, real, 0.0).to(tl.float32)[:, None]
    if GATED:
        up = _unfolded(acc_up, line, column, M, FOLDS, BLOCK_N)
        if BIAS:
            up += tl.load(bias + outputs + nn, real, 0.0).to(tl.float32)[:, None]
        y = y / (1.0 + tl.exp(-y)) * up
    to = m[None, :] * outputs + nn[:, None]
    if ADD:
        y += tl.load(residual + to, real[:, None], 0.0).to(tl.float32)
    tl.store(out + to, y, real[:, None])


def tile_for(rows: int, outputs: int, width: int, gated: bool) -> Tile:
    """The tile that is fastest for a product of 1, 2 or 4 rows on an H200."""
    if weight_bytes(outputs, width, gated) <= PREFETCHED_BYTES:
        return Tile(32, 128 if width * rows > 1024 else 64, 1, 5)
    if rows == 1:
        return Tile(64, 128, 2, 4) if width >= outputs else Tile(32, 128, 1, 5)
    if width > outputs:
        return Tile(64, 128, 2, 4)
    return Tile(32, 128, 1, 5) if gated else Tile(16, 128, 1, 4)


def weight_bytes(outputs: int, width: int, gated: bool) -> int:
    """Of a product's matrix in 16 bits."""
    return outputs * width * (4 if gated else 2)


def gemv(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tile: Tile,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """out = f(x @ weight.T + bias) + residual.

    x [1, 2, 4 or 8, width] contiguous, width a multiple of 8; weight [outputs, width], or [2 * outputs, width] when
    ``gated``; bias of as many outputs; out and residual [rows, outputs], possibly the same tensor.
    """
    rows, width = x.shape
    outputs = out.shape[1]
    folds = MOST_ROWS // rows
    block_n, part = tile.lines // folds, width // folds
    askers = 32 * tile.warps
    ask = pdl and weight.nbytes <= PREFETCHED_BYTES
    ask = ask and outputs % block_n == 0 and block_n * width * weight.element_size() % (16 * askers) == 0
    block_k = min(tile.block_k, max(triton.next_power_of_2(part), 16))
    _gemv[(triton.cdiv(outputs, block_n),)](
        x, weight, weight if bias is None else bias, out if residual is None else residual, out, part, outputs,
        M=rows, FOLDS=folds, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=tile.stages, EVEN=part % block_k == 0,
        GATED=gated, BIAS=bias is not None, ADD=residual is not None, ASKERS=askers if ask else 0, PDL=pdl,
        **options(tile.warps, pdl=pdl),
    )  # fmt: skip


def gemv_reference(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """float32 [rows, outputs]"""
    y = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.float()
