"""Matrix times few vectors (1 to 8), where all that counts is how fast the weights stream in.

cuBLAS reaches the memory's rate on large matrices only. Here a program takes a few output rows over the whole inner
dimension, so nothing is left to reduce across programs, and what surrounds the projection is done on the way:

- ``norm``: the input is RMS-normed. The norm's weight is applied to x when it is read, its scale to the result.
- ``gated``: the matrix is [gate; up] and the result is silu(gate) * up.
- ``residual``: the result is added to it, in place.

The first weights are requested before the predecessor is waited for (programmatic dependent launch).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.engine.kernels.launch import options

MOST_ROWS = 8


@triton.jit
def _gemv(
    x, weight, norm, bias, residual, out, width, outputs, eps,
    M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m = tl.arange(0, M)
    rows = weight + (n % outputs).to(tl.int64)[:, None] * width
    rows_up = rows + outputs.to(tl.int64) * width
    inside = k < width
    if EVEN:
        w = tl.load(rows + k[None, :])
        w_up = tl.load(rows_up + k[None, :]) if GATED else w
    else:
        w = tl.load(rows + k[None, :], inside[None, :], 0.0)
        w_up = tl.load(rows_up + k[None, :], inside[None, :], 0.0) if GATED else w
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([M, BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([M, BLOCK_N, BLOCK_K] if GATED else [1, 1, 1], tl.float32)
    squares = tl.zeros([M, BLOCK_K], tl.float32)
    for k0 in range(0, width, BLOCK_K):
        at = k0 + k
        now, now_up = w, w_up
        following = at + BLOCK_K
        if k0 + BLOCK_K < width:
            if EVEN:
                w = tl.load(rows + following[None, :])
                w_up = tl.load(rows_up + following[None, :]) if GATED else w
            else:
                w = tl.load(rows + following[None, :], (following < width)[None, :], 0.0)
                w_up = tl.load(rows_up + following[None, :], (following < width)[None, :], 0.0) if GATED else w
        xs = tl.load(x + m[:, None] * width + at[None, :], (at < width)[None, :], 0.0).to(tl.float32)
        if NORM:
            squares += xs * xs
            xs *= tl.load(norm + at, at < width, 0.0).to(tl.float32)[None, :]
        acc += now.to(tl.float32)[None, :, :] * xs[:, None, :]
        if GATED:
            acc_up += now_up.to(tl.float32)[None, :, :] * xs[:, None, :]
    y = tl.sum(acc, 2)  # [M, BLOCK_N]
    scale = tl.full([M, 1], 1.0, tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 1) / width + eps)[:, None]
        y *= scale
    if BIAS:
        y += tl.load(bias + n, n < outputs, 0.0).to(tl.float32)[None, :]
    if GATED:
        up = tl.sum(acc_up, 2) * scale
        if BIAS:
            up += tl.load(bias + outputs + n, n < outputs, 0.0).to(tl.float32)[None, :]
        y = y / (1.0 + tl.exp(-y)) * up
    to = m[:, None] * outputs + n[None, :]
    if ADD:
        y += tl.load(residual + to, (n < outputs)[None, :], 0.0).to(tl.float32)
    tl.store(out + to, y, (n < outputs)[None, :])


def gemv(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    pdl: bool = False,
    block_n: int = 0,
    block_k: int = 0,
    warps: int = 8,
) -> None:
    """out = f(norm(x) @ weight.T + bias) + residual.

    x [1, 2, 4 or 8, width] contiguous; weight [outputs, width], or [2 * outputs, width] when ``gated``; bias of as many
    outputs; out and residual [rows, outputs], possibly the same tensor; norm [width].
    """
    rows, width = x.shape
    outputs = out.shape[1]
    if not block_n:
        block_n, block_k = tile_for(rows * (2 if gated else 1))
    block_k = min(block_k, triton.next_power_of_2(width))
    _gemv[(triton.cdiv(outputs, block_n),)](
        x, weight, weight if norm is None else norm, weight if bias is None else bias,
        out if residual is None else residual, out, width, outputs, eps,
        M=rows, BLOCK_N=block_n, BLOCK_K=block_k, EVEN=width % block_k == 0,
        NORM=norm is not None, GATED=gated, BIAS=bias is not None, ADD=residual is not None, PDL=pdl,
        **options(warps, pdl=pdl),
    )  # fmt: skip


def tile_for(sums: int) -> tuple[int, int]:
    """(rows of weights, columns) of a program whose threads keep ``sums`` running sums for each weight in flight."""
    elements = 8192 // sums
    block_n = max(2, elements // 1024)
    return block_n, elements // block_n


def gemv_reference(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """float32 [rows, outputs]"""
    h = x.float()
    if norm is not None:
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * norm.float()
    y = torch.nn.functional.linear(h, weight.float(), None if bias is None else bias.float())
    if gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.float()
