"""Attention of decoding rows, one new token each, over the paged KV cache, which holds the new token's key already.

The batch's keys are cut into *pieces* of about equal length, so that ragged batches and single long rows alike fill
the machine. ``cut`` does so once a step, on the device, from the rows' lengths: the grid is fixed (as many pieces as
there is room for), so one captured graph fits every batch of its size. Every piece of every KV head is a program; the
query heads that share a KV head form one tile for the tensor cores. The last program of a row and head to finish
merges the row's pieces (a counter tells it that it is last), so no second launch is needed.

A program is one warp: what limits this kernel after memory is how many instructions a key costs, and a lone warp needs
no barriers, no reductions through shared memory, and few address computations, as a page of keys is one contiguous
block. Several programs a multiprocessor hide each other's latencies.

After Flash-Decoding (Dao et al. 2023) and stream-K (Osama et al. 2023).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.engine.kernels.launch import options

PIECE_WORDS = 8  # row, slot, start, end (keys), first piece of the row, pieces of the row, 0, 0
PIECE_PAGES = 4  # read in one round of the kernel's loop; pieces are multiples of it
LEAST_PIECE_TOKENS = 128
LINES = 16  # of a tile for the tensor cores, at least
MOST_SHARED_BYTES = 160 << 10


def shape_for(rows: int) -> tuple[int, int]:
    """(warps, stages) that are fastest for a batch of so many rows on an H200."""
    return (1, 3) if rows <= 8 else (1, 2)


def extra_pieces(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """How many pieces more than rows there is room for."""
    return max(8 * multiprocessors // kv_heads, rows)


@triton.jit(do_not_specialize=["most_rows", "most_pieces"])
def _cut(
    slots, positions, rows_count, pieces, total, most_rows, most_pieces,
    BLOCK_R: tl.constexpr, STEP: tl.constexpr, LEAST: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    mine = tl.program_id(0)
    r = tl.arange(0, BLOCK_R)
    rows = tl.load(rows_count)
    length = tl.load(positions + r, r < rows, -1) + 1
    # Rows of n tokens make at most n / piece + 1 pieces: this piece length never needs more than there is room for.
    piece = tl.maximum(tl.cdiv(tl.sum(length, 0), most_pieces - most_rows), LEAST)
    count = tl.cdiv(length, piece)
    step = tl.cdiv(tl.cdiv(length, tl.maximum(count, 1)), STEP) * STEP
    count = tl.cdiv(length, tl.maximum(step, 1))
    if mine == 0:
        tl.store(total, tl.sum(count, 0))
    if mine < rows:
        first = tl.sum(tl.where(r < mine, count, 0), 0)
        my_count = tl.sum(tl.where(r == mine, count, 0), 0)
        my_step = tl.sum(tl.where(r == mine, step, 0), 0)
        my_length = tl.sum(tl.where(r == mine, length, 0), 0)
        slot = tl.load(slots + mine)
        for w0 in range(0, my_count, BLOCK_W):
            w = w0 + tl.arange(0, BLOCK_W)
            there = w < my_count
            at = pieces + (first + w) * 8
            tl.store(at, w * 0 + mine, there)
            tl.store(at + 1, w * 0 + slot, there)
            tl.store(at + 2, w * my_step, there)
            tl.store(at + 3, tl.minimum(w * my_step + my_step, my_length), there)
            tl.store(at + 4, w * 0 + first, there)
            tl.store(at + 5, w * 0 + my_count, there)


@triton.jit
def _decode(
    q, k_cache, v_cache, pages, pieces, total, partial, partial_lse, arrived, out, q_stride, pages_stride, scale,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, LINES: tl.constexpr,
    MERGE_G: tl.constexpr, MERGE_P: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = HQ // HK
    head = tl.program_id(0)
    w = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    # What the step's first kernels have written may be read before the wait: ``rotate_store``, which comes between,
    # lets this kernel start only when it has waited itself.
    used = tl.load(total)
    row = tl.load(pieces + w * 8).to(tl.int64)
    slot = tl.load(pieces + w * 8 + 1).to(tl.int64)
    start = tl.load(pieces + w * 8 + 2)
    end = tl.load(pieces + w * 8 + 3)
    first = tl.load(pieces + w * 8 + 4)
    count = tl.load(pieces + w * 8 + 5)
    if w >= used:
        return
    table = pages + slot * pages_stride
    whole = end // PAGE  # pages; a row's last one may be filled in part
    left = end - whole * PAGE
    last = tl.load(table + whole, left > 0, 0).to(tl.int64)
    if PDL:
        gdc_wait()

    g = tl.arange(0, LINES)
    d = tl.arange(0, D)
    n = tl.arange(0, PAGE)
    PAGE_SIZE: tl.constexpr = HK * PAGE * D
    at_k = head * PAGE * D + n[None, :] * D + d[:, None]  # [D, PAGE]
    at_v = head * PAGE * D + n[:, None] * D + d[None, :]  # [PAGE, D]
    heads = head * G + g
    qs = tl.load(q + row * q_stride + heads[:, None] * D + d[None, :], (g < G)[:, None], 0.0)  # [LINES, D]
    k = tl.load(k_cache + last * PAGE_SIZE + at_k, (n < left)[None, :], 0.0)
    v = tl.load(v_cache + last * PAGE_SIZE + at_v, (n < left)[:, None], 0.0)
    s = tl.where((n < left)[None, :], tl.dot(qs, k) * scale, float("-inf"))
    m = tl.maximum(tl.max(s, 1), -1e30)
    p = tl.exp2(s - m[:, None])
    mass = tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v)

    zero = tl.zeros([1, 1], tl.int32)
    i0 = start // PAGE
    p0 = tl.load(table + i0, i0 < whole, 0)
    p1 = tl.load(table + i0 + 1, i0 + 1 < whole, 0)
    p2 = tl.load(table + i0 + 2, i0 + 2 < whole, 0)
    p3 = tl.load(table + i0 + 3, i0 + 3 < whole, 0)
    for i in tl.range(i0, whole, 4, num_stages=STAGES):
        there = zero + (whole - i)  # pages, as a tile of one
        t1, t2, t3 = there > 1, there > 2, there > 3
        b0 = p0.to(tl.int64) * PAGE_SIZE
        b1 = p1.to(tl.int64) * PAGE_SIZE
        b2 = p2.to(tl.int64) * PAGE_SIZE
        b3 = p3.to(tl.int64) * PAGE_SIZE
        s0 = tl.dot(qs, tl.load(k_cache + b0 + at_k))
        s1 = tl.dot(qs, tl.load(k_cache + b1 + at_k, t1, 0.0))
        s2 = tl.dot(qs, tl.load(k_cache + b2 + at_k, t2, 0.0))
        s3 = tl.dot(qs, tl.load(k_cache + b3 + at_k, t3, 0.0))
        p0 = tl.load(table + i + 4, i + 4 < whole, 0)
        p1 = tl.load(table + i + 5, i + 5 < whole, 0)
        p2 = tl.load(table + i + 6, i + 6 < whole, 0)
        p3 = tl.load(table + i + 7, i + 7 < whole, 0)
        s1 = tl.where(t1, s1, float("-inf"))
        s2 = tl.where(t2, s2, float("-inf"))
        s3 = tl.where(t3, s3, float("-inf"))
        m_next = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), 1) * scale
        m_next = tl.maximum(m, m_next)
        fade = tl.exp2(m - m_next)
        e0 = tl.exp2(s0 * scale - m_next[:, None])
        e1 = tl.exp2(s1 * scale - m_next[:, None])
        e2 = tl.exp2(s2 * scale - m_next[:, None])
        e3 = tl.exp2(s3 * scale - m_next[:, None])
        mass = mass * fade + tl.sum((e0 + e1) + (e2 + e3), 1)
        acc = acc * fade[:, None]
        acc = tl.dot(e0.to(qs.dtype), tl.load(v_cache + b0 + at_v), acc)
        acc = tl.dot(e1.to(qs.dtype), tl.load(v_cache + b1 + at_v, t1, 0.0), acc)
        acc = tl.dot(e2.to(qs.dtype), tl.load(v_cache + b2 + at_v, t2, 0.0), acc)
        acc = tl.dot(e3.to(qs.dtype), tl.load(v_cache + b3 + at_v, t3, 0.0), acc)
        m = m_next

    acc = acc / mass[:, None]
    out += row * HQ * D
    if count == 1:
        tl.store(out + heads[:, None] * D + d[None, :], acc, (g < G)[:, None])
    else:
        w64 = w.to(tl.int64)
        tl.store(partial + (w64 * HQ + heads[:, None]) * D + d[None, :], acc, (g < G)[:, None])
        tl.store(partial_lse + w64 * HQ + heads, m + tl.log2(mass), g < G)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + row * HK + head, 1, sem="acq_rel", scope="gpu")
        if before == count - 1:
            tl.debug_barrier()
            tl.store(arrived + row * HK + head, 0)
            gg = tl.arange(0, MERGE_G)
            pp = tl.arange(0, MERGE_P)
            m_all = tl.full([MERGE_G], float("-inf"), tl.float32)
            mass_all = tl.zeros([MERGE_G], tl.float32)
            sum_all = tl.zeros([MERGE_G, D], tl.float32)
            for p0 in range(0, count, MERGE_P):
                piece = (first + p0 + pp).to(tl.int64)
                there = (p0 + pp < count)[:, None] & (gg < G)[None, :]
                of = piece[:, None] * HQ + head * G + gg[None, :]  # [MERGE_P, MERGE_G]
                lse = tl.load(partial_lse + of, there, float("-inf"))
                part = tl.load(partial + of[:, :, None] * D + d[None, None, :], there[:, :, None], 0.0)
                m_new = tl.maximum(tl.maximum(m_all, tl.max(lse, 0)), -1e30)
                weight = tl.exp2(lse - m_new[None, :])
                fade_all = tl.exp2(m_all - m_new)
                sum_all = sum_all * fade_all[:, None] + tl.sum(part * weight[:, :, None], 0)
                mass_all = mass_all * fade_all + tl.sum(weight, 0)
                m_all = m_new
            sum_all /= tl.where(gg < G, mass_all, 1.0)[:, None]
            tl.store(out + (head * G + gg[:, None]) * D + d[None, :], sum_all, (gg < G)[:, None])


class Pieces:
    """Where a step's cut and its partial results live; shared by the layers, and by all batch sizes up to ``rows``."""

    def __init__(
        self, rows: int, q_heads: int, kv_heads: int, head_dim: int, device: torch.device, multiprocessors: int = 132
    ) -> None:
        self.rows, self.kv_heads, self.multiprocessors = rows, kv_heads, multiprocessors
        room = self.room_for(rows)
        self.pieces = torch.zeros((room, PIECE_WORDS), dtype=torch.int32, device=device)
        self.total = torch.zeros(1, dtype=torch.int32, device=device)
        self.partial = torch.zeros((room, q_heads, head_dim), dtype=torch.float32, device=device)
        self.lse = torch.zeros((room, q_heads), dtype=torch.float32, device=device)
        self.arrived = torch.zeros((rows, kv_heads), dtype=torch.int32, device=device)

    def room_for(self, rows: int) -> int:
        """Pieces that a batch may be cut into."""
        return rows + extra_pieces(rows, self.kv_heads, self.multiprocessors)


def cut(slots: Tensor, positions: Tensor, rows_count: Tensor, rows: int, work: Pieces, page_tokens: int) -> None:
    """Cut the first ``rows_count`` (on the device, <= rows) rows' keys into pieces; once a step, before the layers.

    slots, positions int32 [rows]; position = index of the new token, the row's last key.
    """
    _cut[(rows,)](
        slots, positions, rows_count, work.pieces, work.total, rows, work.room_for(rows),
        BLOCK_R=max(triton.next_power_of_2(rows), 32), STEP=PIECE_PAGES * page_tokens, LEAST=LEAST_PIECE_TOKENS,
        BLOCK_W=32, **options(1),
    )  # fmt: skip


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    work: Pieces,
    out: Tensor,
    scale: float,
    *,
    pdl: bool = False,
) -> None:
    """Attend for rows that ``cut`` has cut and whose new keys and values are in the cache.

    q [rows, >= q_heads * head_dim] normed and rotated, rows may be strided; out [rows, q_heads * head_dim]; caches
    [pages, kv_heads, page_tokens, head_dim]; pages [slots, context_pages]. With ``pdl`` it must follow
    ``rotate_store`` directly.
    """
    _, kv_heads, page_tokens, head_dim = k_cache.shape
    q_heads = out.shape[1] // head_dim
    group = triton.next_power_of_2(q_heads // kv_heads)
    # What is in flight must fit into a multiprocessor's shared memory.
    warps, stages = shape_for(q.shape[0])
    if (stages - 1) * 2 * PIECE_PAGES * page_tokens * head_dim * q.element_size() > MOST_SHARED_BYTES:
        stages = 2
    _decode[(kv_heads, work.room_for(q.shape[0]))](
        q, k_cache, v_cache, pages, work.pieces, work.total, work.partial, work.lse, work.arrived, out, q.stride(0),
        pages.stride(0), scale * 1.4426950408889634,
        HQ=q_heads, HK=kv_heads, D=head_dim, PAGE=page_tokens, LINES=max(LINES, group), MERGE_G=group,
        MERGE_P=max(1, 16 // group), STAGES=stages, PDL=pdl, **options(warps, pdl=pdl),
    )  # fmt: skip


def decode_attention_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Tensor, slots: Tensor, positions: Tensor, scale: float, *,
    q_heads: int,
) -> Tensor:  # fmt: skip
    """float32 [rows, q_heads * head_dim]"""
    _, kv_heads, page_tokens, head_dim = k_cache.shape
    q = q[:, : q_heads * head_dim].float().reshape(len(q), q_heads, head_dim)
    out = torch.empty_like(q)
    for i, (slot, length) in enumerate(zip(slots.tolist(), (positions + 1).tolist(), strict=True)):
        held = pages[slot, : -(-length // page_tokens)].long()
        keys, values = (
            cache[held].float().transpose(1, 2).reshape(-1, kv_heads, head_dim)[:length]
            .repeat_interleave(q_heads // kv_heads, 1) for cache in (k_cache, v_cache)
        )  # fmt: skip
        weights = torch.softmax(torch.einsum("hd,nhd->hn", q[i], keys) * scale, -1)
        out[i] = torch.einsum("hn,nhd->hd", weights, values)
    return out.view(len(q), -1)
