"""A step's inputs, made on the device from its copy of the slot table.

``apply_pages`` and ``admit`` bring the copy up to date from the step's staging buffer (one host-to-device copy),
``expand`` lists the slot and position of every new token, ``embed`` looks the tokens up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.engine.kernels.launch import options


@triton.jit
def _apply_pages(count, updates, pages, pages_stride, BLOCK: tl.constexpr):
    n = tl.load(count)
    for i0 in range(0, n, BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        slot = tl.load(updates + i * 3, i < n, 0).to(tl.int64)
        index = tl.load(updates + i * 3 + 1, i < n, 0)
        tl.store(pages + slot * pages_stride + index, tl.load(updates + i * 3 + 2, i < n, 0), i < n)


def apply_pages(count: Tensor, updates: Tensor, pages: Tensor) -> None:
    """pages[slot, index] = page for ``count`` (on the device) triples in ``updates`` int32 [>= 3 * count]."""
    _apply_pages[(1,)](count, updates, pages, pages.stride(0), BLOCK=512, **options(4))


def apply_pages_reference(count: Tensor, updates: Tensor, pages: Tensor) -> Tensor:
    triples = updates[: 3 * int(count)].view(-1, 3).long()
    out = pages.clone()
    out[triples[:, 0], triples[:, 1]] = triples[:, 2].to(pages.dtype)
    return out


@triton.jit
def _admit(
    news, payload, columns, tokens, pages, slots_count, tokens_stride, pages_stride, page_words,
    COLUMNS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    new = news + tl.program_id(0) * 3
    slot = tl.load(new).to(tl.int64)
    words = payload + tl.load(new + 1)
    length = tl.load(new + 2)
    c = tl.arange(0, BLOCK_C)
    tl.store(columns + c * slots_count + slot, tl.load(words + c, c < COLUMNS, 0), c < COLUMNS)
    words += COLUMNS
    i = tl.arange(0, BLOCK)
    for i0 in range(0, page_words, BLOCK):
        inside = i0 + i < page_words
        tl.store(pages + slot * pages_stride + i0 + i, tl.load(words + i0 + i, inside, 0), inside)
    words += page_words
    for i0 in range(0, length, BLOCK):
        inside = i0 + i < length
        tl.store(tokens + slot * tokens_stride + i0 + i, tl.load(words + i0 + i, inside, 0), inside)


def admit(count: int, news: Tensor, payload: Tensor, columns: Tensor, tokens: Tensor, pages: Tensor) -> None:
    """Fill the rows of ``count`` new slots.

    news int32 [>= 3 * count]: (slot, offset in payload, known tokens); payload int32: per slot its columns, its whole
    pages row, its known tokens. columns int32 [n, slots] (floats as their bits), tokens [slots, context_tokens], pages
    [slots, context_pages].
    """
    fields, slots = columns.shape
    _admit[(count,)](
        news, payload, columns, tokens, pages, slots, tokens.stride(0), pages.stride(0), pages.shape[1],
        COLUMNS=fields, BLOCK_C=triton.next_power_of_2(fields), BLOCK=1024, **options(4),
    )  # fmt: skip


def admit_reference(
    count: int, news: Tensor, payload: Tensor, columns: Tensor, tokens: Tensor, pages: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    columns, tokens, pages = columns.clone(), tokens.clone(), pages.clone()
    for slot, at, length in news[: 3 * count].view(-1, 3).tolist():
        columns[:, slot] = payload[at : at + len(columns)]
        at += len(columns)
        pages[slot] = payload[at : at + pages.shape[1]]
        at += pages.shape[1]
        tokens[slot, :length] = payload[at : at + length]
    return columns, tokens, pages


@triton.jit
def _expand(slots, cached, starts, token_slot, token_position, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    slot = tl.load(slots + row)
    before = tl.load(cached + row)
    for i0 in range(0, length, BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        tl.store(token_slot + start + i, tl.zeros([BLOCK], tl.int32) + slot, i < length)
        tl.store(token_position + start + i, before + i, i < length)


def expand(
    rows: int, slots: Tensor, cached: Tensor, starts: Tensor, token_slot: Tensor, token_position: Tensor
) -> None:
    """Slot and position of each new token: line starts[r] + i is at position cached[r] + i of slots[r]."""
    _expand[(rows,)](slots, cached, starts, token_slot, token_position, BLOCK=1024, **options(4))


def expand_reference(rows: int, slots: Tensor, cached: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    lengths = (starts[1 : rows + 1] - starts[:rows]).long()
    within = torch.cat([torch.arange(n, device=slots.device) for n in lengths.tolist()])
    return slots[:rows].repeat_interleave(lengths), (cached[:rows].repeat_interleave(lengths) + within).to(torch.int32)


@triton.jit
def _embed(
    tokens, token_slot, token_position, table, out, tokens_stride, vocab, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(token_slot + line).to(tl.int64)
    token = tl.load(tokens + slot * tokens_stride + tl.load(token_position + line)).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)  # padding lines hold anything
    i = tl.arange(0, BLOCK)
    tl.store(out + line * WIDTH + i, tl.load(table + token * WIDTH + i, i < WIDTH, 0.0), i < WIDTH)


def embed(
    tokens: Tensor, token_slot: Tensor, token_position: Tensor, table: Tensor, out: Tensor, *, pdl: bool = False
) -> None:
    """out [lines, width] = table[tokens[token_slot, token_position]]; table [vocab, width]."""
    lines, width = out.shape
    block = triton.next_power_of_2(width)
    _embed[(lines,)](
        tokens, token_slot, token_position, table, out, tokens.stride(0), table.shape[0],
        WIDTH=width, BLOCK=block, PDL=pdl, **options(max(1, min(8, block // 256)), pdl=pdl),
    )  # fmt: skip


def embed_reference(tokens: Tensor, token_slot: Tensor, token_position: Tensor, table: Tensor) -> Tensor:
    return table[tokens[token_slot.long(), token_position.long()].long()]
