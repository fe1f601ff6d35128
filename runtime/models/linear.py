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
    """Weight-only int8: few rows are multiplied as int8, many against the matrix expanded to the activations' dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, few_rows: int = 4) -> None:
        self.quantized, self.scale = quantize_int8(weight)
        self.dtype, self.bias, self.few_rows = weight.dtype, bias, few_rows
        self.packed_scale = self.scale.to(weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= self.few_rows:
            y = torch._weight_int8pack_mm(x, self.quantized, self.packed_scale)
            return y if self.bias is None else y.add_(self.bias)
        return F.linear(x, self.expanded(), self.bias)

    def expanded(self) -> torch.Tensor:
        """The matrix as the activations' dtype [out, in]: costs one pass over the weights."""
        return (self.quantized * self.scale[:, None]).to(self.dtype)
