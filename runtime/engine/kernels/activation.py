"""silu(gate) * up, from the joint projection's output."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.engine.kernels.launch import options


@triton.jit
def _silu_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + row * 2 * WIDTH + i, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + i, inside, 0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, gate / (1.0 + tl.exp(-gate)) * up, inside)


def silu_mul(gate_up: Tensor, out: Tensor, *, pdl: bool = False) -> None:
    """gate_up [tokens, 2 * width] contiguous -> out [tokens, width] contiguous."""
    rows, width = out.shape
    block = min(triton.next_power_of_2(width), 2048)
    _silu_mul[(rows, triton.cdiv(width, block))](
        gate_up, out, WIDTH=width, BLOCK=block, PDL=pdl, **options(max(1, min(8, block // 256)), pdl=pdl)
    )


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
