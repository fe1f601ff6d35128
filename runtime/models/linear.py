"""Linear layers as plain callables, and the weight formats they come in."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

Linear = Callable[[torch.Tensor], torch.Tensor]  # [tokens, in] -> [tokens, out]


def dense(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """``x @ weight.T + bias`` in the weight's dtype."""
    return partial(F.linear, weight=weight, bias=bias)


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 by output row: (int8 [out, in], float32 scale [out]) with ``weight ~ int8 * scale``."""
    rows = weight.float()
    scale = (rows.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (rows / scale[:, None]).round_().to(torch.int8), scale


class Int8Linear:
    """Weight-only int8: few rows are multiplied as int8, many by the weights widened to the activations' dtype.

    Whole numbers up to 127 are exact in any float; the scale is applied to the products.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, few_rows: int = 24) -> None:
        self.quantized, scale = quantize_int8(weight)
        self.scale, self.bias, self.few_rows = scale.to(weight.dtype), bias, few_rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= self.few_rows:
            y = torch._weight_int8pack_mm(x, self.quantized, self.scale)
        else:
            y = F.linear(x, self.quantized.to(x.dtype)).mul_(self.scale)
        return y if self.bias is None else y.add_(self.bias)
