"""RMSNorm, with the residual addition in front of it where there is one."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.engine.kernels.launch import options


@triton.jit
def _rms_norm(
    x, residual, weight, out, x_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    w = tl.load(weight + i, inside, 0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    h = tl.load(x + row * x_stride + i, inside, 0.0).to(tl.float32)
    if ADD:
        h += tl.load(residual + row * WIDTH + i, inside, 0.0).to(tl.float32)
        tl.store(residual + row * WIDTH + i, h, inside)
    scale = tl.rsqrt(tl.sum(h * h, 0) / WIDTH + eps)
    tl.store(out + row * WIDTH + i, h * scale * w, inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, residual: Tensor | None = None, *, pdl: bool = False
) -> None:
    """``out = norm(x) * weight``; with ``residual`` first ``residual += x`` and the sum is what is normed.

    x, out, residual [tokens, width]; rows of x may be strided, out and residual are contiguous. The sum is normed in
    float32, before it is rounded to the residual's type.
    """
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _rms_norm[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        ADD=residual is not None,
        PDL=pdl,
        **options(min(max(block // 512, 1), 8), pdl=pdl),
    )


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(out, new residual) in float32."""
    h = x.float() if residual is None else x.float() + residual.float()
    normed = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return normed, None if residual is None else h
