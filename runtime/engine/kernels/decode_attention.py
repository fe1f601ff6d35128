"""Attention of decoding rows, one new token each, over the paged KV cache; with the rotary step fused in front.

The batch's keys are cut into *pieces* of about equal length, so that ragged batches and single long rows alike fill
the machine. A one-program kernel cuts once a step, on the device, from the rows' lengths: the grid is fixed (as many
pieces as there is room for), so one captured graph fits every batch of its size. Every piece of every KV head is a
program; the query heads that share a KV head form one tile for the tensor cores. The piece that holds a row's last
position also norms, rotates and stores the new key and value. The last program of a row and head to finish merges the
row's pieces (a counter tells it that it is last), so no second launch is needed.

After Flash-Decoding (Dao et al. 2023) and stream-K (Osama et al. 2023).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.engine.kernels.launch import options
from runtime.engine.kernels.rotary import rotate_reference, rotated

PIECE_WORDS = 8  # row, slot, start, end (keys in the cache), position, first piece of the row, pieces of the row, 0
BLOCK_KEYS = 64
LEAST_PIECE_TOKENS = 128


@triton.jit(do_not_specialize=["most_rows", "most_pieces"])
def _cut(
    slots, positions, rows_count, pieces, total, most_rows, most_pieces, BLOCK_R: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, LEAST: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    r = tl.arange(0, BLOCK_R)
    rows = tl.load(rows_count)
    position = tl.load(positions + r, r < rows, -1)
    length = tl.where(r < rows, position + 1, 0)
    # Rows of n tokens make at most n / piece + 1 pieces: this piece length never needs more than there is room for.
    piece = tl.maximum(tl.cdiv(tl.sum(length, 0), most_pieces - most_rows), LEAST)
    count = tl.cdiv(length, piece)
    step = tl.cdiv(tl.cdiv(length, tl.maximum(count, 1)), BLOCK_KEYS) * BLOCK_KEYS
    count = tl.cdiv(length, tl.maximum(step, 1))
    last = tl.cumsum(count, 0)
    first = last - count
    slot = tl.load(slots + r, r < rows, 0)
    tl.store(total, tl.sum(count, 0))
    for w0 in range(0, most_pieces, BLOCK_W):
        w = w0 + tl.arange(0, BLOCK_W)
        mine = (first[None, :] <= w[:, None]) & (w[:, None] < last[None, :])  # [BLOCK_W, BLOCK_R], at most one a line
        w_first = tl.sum(tl.where(mine, first[None, :], 0), 1)
        w_step = tl.sum(tl.where(mine, step[None, :], 0), 1)
        w_position = tl.sum(tl.where(mine, position[None, :], 0), 1)
        start = (w - w_first) * w_step
        at = pieces + w * 8
        room = w < most_pieces
        tl.store(at, tl.sum(tl.where(mine, r[None, :], 0), 1), room)
        tl.store(at + 1, tl.sum(tl.where(mine, slot[None, :], 0), 1), room)
        tl.store(at + 2, start, room)
        tl.store(at + 3, tl.minimum(start + w_step, w_position), room)
        tl.store(at + 4, w_position, room)
        tl.store(at + 5, w_first, room)
        tl.store(at + 6, tl.sum(tl.where(mine, count[None, :], 0), 1), room)


@triton.jit
def _decode(
    qkv, q_norm, k_norm, cos, sin, k_cache, v_cache, pages, pieces, total, partial, partial_lse, arrived, out,
    pages_stride, scale, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr, MERGE_G: tl.constexpr, MERGE_P: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = HQ // HK
    head = tl.program_id(0)
    w = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if w >= tl.load(total):
        return
    row = tl.load(pieces + w * 8).to(tl.int64)
    slot = tl.load(pieces + w * 8 + 1).to(tl.int64)
    start = tl.load(pieces + w * 8 + 2)
    end = tl.load(pieces + w * 8 + 3)
    position = tl.load(pieces + w * 8 + 4)
    first = tl.load(pieces + w * 8 + 5)
    count = tl.load(pieces + w * 8 + 6)
    newest = w - first == count - 1  # this piece holds the new token

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, D)
    qkv += row * (HQ + 2 * HK) * D
    table = pages + slot * pages_stride
    q = rotated(qkv, head * G + g, q_norm, cos, sin, position, eps, g < G, D, NORM)  # [BLOCK_G, D]
    q = q.to(qkv.dtype.element_ty)

    # The new key and value: stored, and what the softmax starts from. One head, as a tile of one.
    one = tl.arange(0, 1)
    k_new = rotated(qkv, HQ + head + one, k_norm, cos, sin, position, eps, one < 1, D, NORM)
    k_new = k_new.to(k_cache.dtype.element_ty)
    v_new = tl.load(qkv + (HQ + HK + head + one[:, None]) * D + d[None, :])
    page = tl.load(table + position // PAGE).to(tl.int64)
    at = ((page * HK + head) * PAGE + position % PAGE) * D + d[None, :] + one[:, None]
    stores = tl.where(newest, at, -1) >= 0
    tl.store(k_cache + at, k_new, stores)
    tl.store(v_cache + at, v_new, stores)
    score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * scale
    m = tl.where(newest, score, float("-inf"))
    mass = tl.where(newest, g * 0.0 + 1.0, 0.0)
    acc = tl.where(newest, v_new.to(tl.float32) + tl.zeros([BLOCK_G, D], tl.float32), 0.0)

    for n0 in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        n = n0 + tl.arange(0, BLOCK_N)
        valid = n < end
        page_n = tl.load(table + n // PAGE, valid, 0).to(tl.int64)
        base = ((page_n * HK + head) * PAGE + n % PAGE) * D
        k = tl.load(k_cache + base[None, :] + d[:, None], valid[None, :], 0.0)  # [D, BLOCK_N]
        s = tl.dot(q, k) * scale
        s = tl.where(valid[None, :], s, float("-inf"))
        m_next = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_next[:, None])
        fade = tl.exp2(m - m_next)
        mass = mass * fade + tl.sum(p, 1)
        v = tl.load(v_cache + base[:, None] + d[None, :], valid[:, None], 0.0)  # [BLOCK_N, D]
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        m = m_next

    acc = acc / mass[:, None]
    heads = head * G + g
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
    """Where a batch size's cut and its partial results live; shared by the layers, and by all smaller batch sizes."""

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
        """Pieces that a batch may be cut into: about 4 programs a multiprocessor beyond one piece a row."""
        return rows + max(4 * self.multiprocessors // self.kv_heads, rows)


def cut(slots: Tensor, positions: Tensor, rows_count: Tensor, rows: int, work: Pieces, *, pdl: bool = False) -> None:
    """Cut the first ``rows_count`` (on the device, <= rows) rows' keys into pieces; once a step, before the layers.

    slots, positions int32 [rows]; position = index of the new token = number of cached keys.
    """
    block_r = 16 if rows <= 16 else max(triton.next_power_of_2(work.rows), 16)
    _cut[(1,)](
        slots, positions, rows_count, work.pieces, work.total, rows, work.room_for(rows),
        BLOCK_R=block_r, BLOCK_KEYS=BLOCK_KEYS, LEAST=LEAST_PIECE_TOKENS, BLOCK_W=max(16, min(128, 8192 // block_r)),
        PDL=pdl,
        **options(8, pdl=pdl),
    )  # fmt: skip


def decode_attention(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    work: Pieces,
    out: Tensor,
    eps: float,
    scale: float,
    *,
    pdl: bool = False,
    warps: int = 4,
    stages: int = 3,
) -> None:
    """Norm, rotate, store and attend for rows that ``cut`` has cut.

    qkv [rows, (q_heads + 2 kv_heads) * head_dim] contiguous, as projected; out [rows, q_heads * head_dim]; norms
    [head_dim] or None; cos, sin float32 [positions, head_dim / 2]; caches [pages, kv_heads, page_tokens, head_dim];
    pages [slots, context_pages].
    """
    _, kv_heads, page_tokens, head_dim = k_cache.shape
    q_heads = out.shape[1] // head_dim
    group = q_heads // kv_heads
    unused = cos
    _decode[(kv_heads, work.room_for(qkv.shape[0]))](
        qkv, unused if q_norm is None else q_norm, unused if k_norm is None else k_norm, cos, sin, k_cache, v_cache,
        pages, work.pieces, work.total, work.partial, work.lse, work.arrived, out, pages.stride(0),
        scale * 1.4426950408889634, eps,
        HQ=q_heads, HK=kv_heads, D=head_dim, PAGE=page_tokens, BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_N=BLOCK_KEYS, MERGE_G=triton.next_power_of_2(group), MERGE_P=max(1, 16 // triton.next_power_of_2(group)),
        STAGES=stages, NORM=q_norm is not None, PDL=pdl, **options(warps, pdl=pdl),
    )  # fmt: skip


def decode_attention_reference(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, k_cache: Tensor,
    v_cache: Tensor, pages: Tensor, slots: Tensor, positions: Tensor, eps: float, scale: float, *, q_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out [rows, q_heads * head_dim], keys [rows, kv_heads, head_dim], values: what the cache must hold), float32."""
    _, kv_heads, page_tokens, head_dim = k_cache.shape
    q, k, v = qkv.view(len(qkv), -1, head_dim).split((q_heads, kv_heads, kv_heads), 1)
    position = positions.long()
    q = rotate_reference(q, q_norm, cos[position], sin[position], eps)
    k = rotate_reference(k, k_norm, cos[position], sin[position], eps)
    v = v.float()
    out = torch.empty((len(qkv), q_heads, head_dim), dtype=torch.float32, device=qkv.device)
    for i, (slot, p) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        held = pages[slot, : -(-p // page_tokens)].long()
        old_k = k_cache[held].float().transpose(1, 2).reshape(-1, kv_heads, head_dim)[:p]
        old_v = v_cache[held].float().transpose(1, 2).reshape(-1, kv_heads, head_dim)[:p]
        keys = torch.cat((old_k, k[i : i + 1])).repeat_interleave(q_heads // kv_heads, 1)
        values = torch.cat((old_v, v[i : i + 1])).repeat_interleave(q_heads // kv_heads, 1)
        weights = torch.softmax(torch.einsum("hd,nhd->hn", q[i], keys) * scale, -1)
        out[i] = torch.einsum("hn,nhd->hd", weights, values)
    return out.view(len(qkv), -1), k, v
