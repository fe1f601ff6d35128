"""The decoder's forward pass on a GPU: cuBLAS for large products, our kernels for the rest, no allocation in a step.

Two entries over the same weights and buffers: ``decode`` (one token a row; fixed launches, so it can be captured) and
``extend`` (prompt tokens, with decoding rows in front). Both end with logits of the rows in ``logits``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.engine.device import Device
from runtime.engine.device_table import DeviceTable, Extension
from runtime.engine.kernels.activation import silu_mul
from runtime.engine.kernels.decode_attention import Pieces, cut, decode_attention
from runtime.engine.kernels.extend_attention import extend_attention
from runtime.engine.kernels.gemv import Tile, gemv, tile_for
from runtime.engine.kernels.inputs import embed, expand
from runtime.engine.kernels.norm import rms_norm
from runtime.engine.kernels.rotary import rotate_store
from runtime.models.config import ModelConfig
from runtime.models.decoder import rope_table

# Batches whose products go through ``gemv``: there cuBLAS leaves part of the memory's rate unused.
FEW_ROWS = (1, 2, 4)
# In steps of up to so many tokens the residual stream is float32, which costs nothing there: a token's own rounding is
# what decides near-ties. In larger ones it would cost a prefill 1.5 %.
WIDE_TOKENS = 2048


@dataclass(slots=True)
class Layer:
    """Weights as stored [out, in]; biases and head norms only where the model has them."""

    attn_norm: Tensor
    qkv: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Residual(NamedTuple):
    """The residual stream of every token, [tokens, hidden_size], and room for the lines that are sampled from."""

    stream: Tensor
    last: Tensor


def project(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x @ weight.T + bias"""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def project_logits(x: Tensor, head: Tensor, logits: Tensor) -> Tensor:
    """logits = x @ head.T, in float32 from the product's accumulator. Rounded to bfloat16, every fiftieth greedy token
    of a small model would be another than the best."""
    if x.dtype == torch.float32:
        return torch.mm(x, head.t(), out=logits)
    return torch.mm(x, head.t(), torch.float32, out=logits)


def project_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """residual += x @ weight.T + bias; the sum is made in the product's float32 accumulator."""
    if residual.dtype == x.dtype:
        residual.addmm_(x, weight.t())
    else:
        torch.addmm(residual, x, weight.t(), residual.dtype, out=residual)
    if bias is not None:
        residual.add_(bias)


class Forward:
    """``weights`` are ``runtime.models.loader``'s, on the device. ``caches``: per layer keys and values, each
    [pages, kv_heads, page_tokens, head_dim]; set by the runner once it knows how much memory is left."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], table: DeviceTable, step_tokens: int, device: Device
    ) -> None:
        self.config, self.table, self.step_tokens = config, table, step_tokens
        self.overlapped = device.overlapped
        self.layers = [
            Layer(**{name.split(".")[2]: tensor for name, tensor in weights.items() if name.startswith(f"layers.{i}.")})
            for i in range(config.layers)
        ]
        self.embedding, self.norm = weights["embed"], weights["norm"]
        self.head = weights.get("head", self.embedding)
        self.cos, self.sin = (part.to(device.on).contiguous() for part in rope_table(config))
        self.scale = config.head_dim**-0.5
        self.caches: list[tuple[Tensor, Tensor]] = []
        rows, qkv = table.most_rows, config.q_size + 2 * config.kv_size

        def buffer(lines: int, width: int, dtype: torch.dtype = self.embedding.dtype) -> Tensor:
            return torch.zeros((lines, width), dtype=dtype, device=device.on)

        self.narrow = Residual(buffer(step_tokens, config.hidden_size), buffer(rows, config.hidden_size))
        self.wide = Residual(
            buffer(max(min(step_tokens, WIDE_TOKENS), rows), config.hidden_size, torch.float32),
            buffer(rows, config.hidden_size, torch.float32),
        )
        self.x = buffer(step_tokens, config.hidden_size)  # normed
        self.qkv = buffer(step_tokens, qkv)
        self.attended = buffer(step_tokens, config.q_size)
        self.gate_up = buffer(step_tokens, 2 * config.mlp_size)
        self.activated = buffer(step_tokens, config.mlp_size)
        self.logits = buffer(rows, config.vocab_size, torch.float32)
        self.token_slot, self.token_position = (
            torch.zeros(step_tokens, dtype=torch.int32, device=device.on) for _ in range(2)
        )
        self.pieces = Pieces(rows, config.q_heads, config.kv_heads, config.head_dim, device.on, device.multiprocessors)

    @property
    def buffer_bytes(self) -> int:
        pieces = self.pieces
        buffers = (*self.narrow, *self.wide, self.x, self.qkv, self.attended, self.gate_up, self.activated, self.logits)
        return sum(t.nbytes for t in (*buffers, pieces.partial, pieces.lse, pieces.pieces, pieces.arrived))

    def residual(self, tokens: int) -> Residual:
        """The buffers that a step of so many tokens uses."""
        return self.wide if tokens <= len(self.wide.stream) else self.narrow

    def decode(self, rows: int) -> Tensor:
        """float32 logits [rows, vocab] of the table's present step, all of whose rows decode; what of ``rows``
        is beyond its row count is padding."""
        table, eps, pdl = self.table, self.config.rms_eps, self.overlapped
        h, x = self.wide.stream[:rows], self.x[:rows]
        embed(table.tokens, table.slots, table.positions, self.embedding, h)
        cut(table.slots, table.positions, table.decodes, rows, self.pieces, table.page_tokens)
        for i in range(len(self.layers)):
            self._decode_layer(i, rows)
        rms_norm(h, self.norm, eps, x, pdl=pdl)
        return project_logits(x, self.head, self.logits[:rows])

    def _decode_layer(self, i: int, rows: int) -> None:
        layer, table, config, eps, pdl = self.layers[i], self.table, self.config, self.config.rms_eps, self.overlapped
        h, x = self.wide.stream[:rows], self.x[:rows]
        qkv, attended = self.qkv[:rows], self.attended[:rows]
        activated = self.activated[:rows]
        k_cache, v_cache = self.caches[i]
        rms_norm(h, layer.attn_norm, eps, x, pdl=pdl)
        self._product(x, layer.qkv, layer.qkv_bias, qkv)
        rotate_store(
            qkv, layer.q_norm, layer.k_norm, self.cos, self.sin, k_cache, v_cache, table.pages, table.slots,
            table.positions, eps, q_heads=config.q_heads, count=table.decodes, pdl=pdl,
        )  # fmt: skip
        decode_attention(qkv, k_cache, v_cache, table.pages, self.pieces, attended, self.scale, pdl=pdl)
        self._add_product(attended, layer.o, layer.o_bias, h)
        rms_norm(h, layer.mlp_norm, eps, x, pdl=pdl)
        tile = self._tile(rows, config.mlp_size, config.hidden_size, True)
        if tile is None:
            project(x, layer.gate_up, layer.gate_up_bias, self.gate_up[:rows])
            silu_mul(self.gate_up[:rows], activated, pdl=pdl)
        else:
            gemv(x, layer.gate_up, activated, tile, bias=layer.gate_up_bias, gated=True, pdl=pdl)
        self._add_product(activated, layer.down, layer.down_bias, h)

    def _tile(self, rows: int, outputs: int, width: int, gated: bool = False) -> Tile | None:
        return tile_for(rows, outputs, width, gated) if rows in FEW_ROWS and width % 8 == 0 else None

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        tile = self._tile(len(x), *weight.shape)
        if tile is None:
            project(x, weight, bias, out)
        else:
            gemv(x, weight, out, tile, bias=bias, pdl=self.overlapped)

    def _add_product(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
        tile = self._tile(len(x), *weight.shape)
        if tile is None:
            project_add(x, weight, bias, residual)
        else:
            gemv(x, weight, residual, tile, bias=bias, residual=residual, pdl=self.overlapped)

    def extend(self, rows: int, tokens: int, decodes: int, extension: Extension) -> Tensor:
        """float32 logits [rows, vocab] of each row's last new token. The first ``decodes`` rows have one token each and
        stand first; ``tokens`` counts all new ones. ``residual(tokens).stream`` keeps the last layer's output of every
        token."""
        table, config, eps = self.table, self.config, self.config.rms_eps
        stream, last = self.residual(tokens)
        h, x, qkv, attended = stream[:tokens], self.x[:tokens], self.qkv[:tokens], self.attended[:tokens]
        gate_up, activated = self.gate_up[:tokens], self.activated[:tokens]
        token_slot, token_position = self.token_slot[:tokens], self.token_position[:tokens]
        expand(rows, table.slots, table.cached, table.starts, token_slot, token_position)
        embed(table.tokens, token_slot, token_position, self.embedding, h)
        if decodes:
            cut(table.slots, table.positions, table.decodes, decodes, self.pieces, table.page_tokens)
        for i, layer in enumerate(self.layers):
            k_cache, v_cache = self.caches[i]
            rms_norm(h, layer.attn_norm, eps, x)
            project(x, layer.qkv, layer.qkv_bias, qkv)
            rotate_store(
                qkv, layer.q_norm, layer.k_norm, self.cos, self.sin, k_cache, v_cache, table.pages, token_slot,
                token_position, eps, q_heads=config.q_heads,
            )  # fmt: skip
            if decodes:
                decode_attention(
                    qkv[:decodes], k_cache, v_cache, table.pages, self.pieces, attended[:decodes], self.scale
                )
            extend_attention(
                qkv, k_cache, v_cache, table.pages, table.slots, table.cached, table.starts, extension.tile_row,
                extension.tile_index, attended, self.scale,
            )  # fmt: skip
            project_add(attended, layer.o, layer.o_bias, h)
            rms_norm(h, layer.mlp_norm, eps, x)
            project(x, layer.gate_up, layer.gate_up_bias, gate_up)
            silu_mul(gate_up, activated)
            project_add(activated, layer.down, layer.down_bias, h)
        torch.index_select(h, 0, table.ends[:rows], out=last[:rows])
        return self.head_of(last[:rows], self.logits[:rows])

    def head_of(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """Final norm and head: hidden [n, hidden_size] -> logits [n, vocab]; n at most ``step_tokens``."""
        x = self.x[: len(hidden)]
        rms_norm(hidden, self.norm, self.config.rms_eps, x)
        return project_logits(x, self.head, logits)
