"""One decoder for all supported architectures: tensors in, tensors out, no modules, no state.

Attention is the caller's: it owns the KV memory. That makes the same code the CPU runner's forward pass and the
reference that GPU kernels are tested against.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from runtime.models.config import ModelConfig
from runtime.models.linear import Linear, dense

# (layer, q [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim]) -> [tokens, q_heads, head_dim].
# Stores k and v and attends causally, each token within its own request.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]


@dataclass(slots=True)
class Layer:
    attn_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """RoPE's frequencies, scaled as the config says: float32 [head_dim / 2]."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inverse = 1.0 / config.rope_theta**steps
    scaling = config.rope_scaling
    if scaling is None:
        return inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    wavelength = 2 * math.pi / inverse
    turns = scaling.original_context_tokens / wavelength
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((turns - low) / (high - low)).clamp(0, 1)  # 0: stretched in full, 1: as trained
    return (1 - blend) * inverse / scaling.factor + blend * inverse


def rope_table(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of all positions: float32 [context_tokens, head_dim / 2] each."""
    angles = torch.outer(torch.arange(config.context_tokens).float(), inverse_frequencies(config))
    return angles.cos(), angles.sin()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension; the norm in float32, the product in x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on x [tokens, heads, head_dim] with cos and sin [tokens, 1, head_dim / 2]; computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Decoder:
    """The model's function from token ids to logits. Drive it under ``torch.inference_mode()``."""

    def __init__(
        self, config: ModelConfig, weights: Iterable[tuple[str, torch.Tensor]], make_linear: MakeLinear = dense
    ) -> None:
        """``weights`` come from ``loader.load`` or ``loader.dummy``; ``make_linear(weight, bias)`` picks the format."""
        self.config = config
        pending: dict[str, torch.Tensor] = {}
        self.layers: list[Layer] = []
        for name, tensor in weights:
            pending[name] = tensor
            if (name == f"layers.{len(self.layers)}.down" and not config.mlp_bias) or name.endswith("down_bias"):
                # Convert a layer as soon as it is complete: the unconverted matrices of one layer exist at a time.
                self.layers.append(self._layer(pending, f"layers.{len(self.layers)}.", make_linear))
        self.embed = pending.pop("embed")
        self.norm = pending.pop("norm")
        self.head = make_linear(pending.pop("head", self.embed), None)
        assert not pending and len(self.layers) == config.layers
        self.dtype = self.embed.dtype
        cos, sin = rope_table(config)
        self.cos, self.sin = cos[:, None].to(self.embed.device), sin[:, None].to(self.embed.device)

    @staticmethod
    def _layer(pending: dict[str, torch.Tensor], prefix: str, make_linear: MakeLinear) -> Layer:
        def linear(name: str) -> Linear:
            return make_linear(pending.pop(prefix + name), pending.pop(f"{prefix}{name}_bias", None))

        return Layer(
            attn_norm=pending.pop(prefix + "attn_norm"),
            qkv=linear("qkv"),
            q_norm=pending.pop(prefix + "q_norm", None),
            k_norm=pending.pop(prefix + "k_norm", None),
            o=linear("o"),
            mlp_norm=pending.pop(prefix + "mlp_norm"),
            gate_up=linear("gate_up"),
            down=linear("down"),
        )

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The last layer's output before the final norm: tokens, positions int [tokens] -> [tokens, hidden]."""
        config = self.config
        heads = [config.q_heads, config.kv_heads, config.kv_heads]
        cos, sin = self.cos[positions], self.sin[positions]
        x = self.embed[tokens]
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(rms_norm(x, layer.attn_norm, config.rms_eps))
            q, k, v = torch.split(qkv.view(len(tokens), sum(heads), config.head_dim), heads, dim=1)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = rms_norm(q, layer.q_norm, config.rms_eps), rms_norm(k, layer.k_norm, config.rms_eps)
            attended = attend(i, rotate(q, cos, sin), rotate(k, cos, sin), v)
            x = x + layer.o(attended.reshape(len(tokens), config.q_size))
            gate, up = layer.gate_up(rms_norm(x, layer.mlp_norm, config.rms_eps)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of rows taken from ``hidden``: [rows, hidden] -> float32 [rows, vocab]."""
        return self.head(rms_norm(hidden, self.norm, self.config.rms_eps)).float()
