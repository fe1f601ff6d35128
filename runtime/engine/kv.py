"""The KV memory of a CPU runner in pages, and a model over it in plain torch."""

import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from runtime.engine.batch import I32, Batch, SlotTable
from runtime.models.config import ModelConfig
from runtime.models.decoder import Decoder, MakeLinear

I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepIndex:
    """One step's tokens, laid out row after row, and where their keys and values live."""

    tokens: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    places: torch.Tensor  # int64 [tokens]: page * page_tokens + offset
    decodes: int
    decode_places: torch.Tensor | None  # int64 [decodes * longest]; behind a row's end: the row of zeros
    decode_mask: torch.Tensor | None  # bool [decodes, 1, 1, longest]
    extends: list[tuple[int, int, int, torch.Tensor]]  # first token, tokens, cached, places int64 [cached + tokens]


def step_index(batch: Batch, slots: SlotTable, zero_place: int) -> StepIndex:
    """Gathers the inputs of a step from the slot table."""
    row = np.repeat(np.arange(len(batch.slots)), batch.extend)
    ends = np.cumsum(batch.extend, dtype=np.int64)
    positions = np.arange(len(row)) - np.repeat(ends - batch.extend - batch.cached, batch.extend)
    slot, size = batch.slots[row], slots.page_tokens
    page = slots.pages[slot, positions // size].astype(np.int64)
    decode_places = decode_mask = None
    if batch.decodes:
        lengths = batch.cached[: batch.decodes, None] + 1
        steps = np.arange(int(lengths.max()))
        present = steps < lengths
        pages = slots.pages[batch.slots[: batch.decodes, None], steps // size].astype(np.int64)
        decode_places = torch.from_numpy(np.where(present, pages * size + steps % size, zero_place).reshape(-1))
        decode_mask = torch.from_numpy(present)[:, None, None, :]
    extends = []
    for i in range(batch.decodes, len(batch.slots)):
        cached, count = int(batch.cached[i]), int(batch.extend[i])
        steps = np.arange(cached + count)
        places = slots.pages[batch.slots[i], steps // size].astype(np.int64) * size + steps % size
        extends.append((int(ends[i]) - count, count, cached, torch.from_numpy(places)))
    return StepIndex(
        tokens=torch.from_numpy(slots.tokens[slot, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        places=torch.from_numpy(page * size + positions % size),
        decodes=batch.decodes,
        decode_places=decode_places,
        decode_mask=decode_mask,
        extends=extends,
    )


class PagedKV:
    """Keys and values of all layers: [layers][pages, page_tokens, kv_heads, head_dim], plus a page of zeros.

    Memory is committed by the kernel as pages are first written.
    """

    def __init__(self, config: ModelConfig, num_pages: int, page_tokens: int, dtype: torch.dtype) -> None:
        shape = (num_pages + 1, page_tokens, config.kv_heads, config.head_dim)
        pool = _lazy_zeros((config.layers, 2, *shape), dtype)
        self.keys, self.values = list(pool[:, 0]), list(pool[:, 1])
        self.zero_place = num_pages * page_tokens

    @staticmethod
    def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
        return 2 * config.layers * config.kv_size * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that the kernel hands out as they are touched; in huge pages, for attention reads rows far apart."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(memory, "madvise"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def paged_attention(
    kv: PagedKV, index: StepIndex, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Stores k and v [tokens, kv_heads, head_dim] and attends with q [tokens, q_heads, head_dim]; like q."""
    keys, values = kv.keys[layer].flatten(0, 1), kv.values[layer].flatten(0, 1)
    keys.index_copy_(0, index.places, k)
    values.index_copy_(0, index.places, v)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if index.decode_places is not None:
        # A row's stale memory may hold NaN, which no mask hides: behind its end a row reads zeros instead.
        shape = (index.decodes, -1, *k.shape[1:])
        past_k = keys.index_select(0, index.decode_places).view(shape).transpose(1, 2)
        past_v = values.index_select(0, index.decode_places).view(shape).transpose(1, 2)
        queries = q[: index.decodes, :, None]
        out[: index.decodes] = F.scaled_dot_product_attention(
            queries, past_k, past_v, attn_mask=index.decode_mask, enable_gqa=True
        )[:, :, 0]
    for first, count, cached, places in index.extends:
        past_k, past_v = keys.index_select(0, places), values.index_select(0, places)
        out[first : first + count] = causal_attention(q[first : first + count], past_k, past_v, cached)
    return out


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cached: int) -> torch.Tensor:
    """One request: q [extend, q_heads, head_dim] at positions from ``cached`` on over k, v [cached + extend, ...]."""
    extend = len(q)
    mask = None
    if cached and extend > 1:
        mask = torch.ones(extend, cached + extend, dtype=torch.bool).tril_(cached)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=not cached and extend > 1,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


class TorchModel:
    """The decoder over paged KV in plain torch: always correct, everywhere."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        slots: SlotTable,
        make_linear: MakeLinear,
    ) -> None:
        self.decoder, self.slots = Decoder(config, weights, make_linear), slots
        self.other_bytes = self.decoder.cos.nbytes + self.decoder.sin.nbytes

    def attach(self, kv: PagedKV) -> None:
        """Tells the model where keys and values live."""
        self.kv = kv

    def run(self, batch: Batch, rows: I32, keep_hidden: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes a step. Of its tokens, laid out row after row, those at ``rows`` get logits float32 [rows, vocab];
        with ``keep_hidden`` all get their hidden state [tokens, hidden]."""
        index = step_index(batch, self.slots, self.kv.zero_place)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return paged_attention(self.kv, index, layer, q, k, v)

        hidden = self.decoder.hidden(index.tokens, index.positions, attend)
        return self.decoder.logits(hidden[torch.from_numpy(rows).long()]), hidden if keep_hidden else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of rows of the hidden states: float32 [rows, vocab]."""
        return self.decoder.logits(hidden)

    def workspace_bytes(self) -> int:
        return 0

    def close(self) -> None:
        del self.decoder, self.kv
