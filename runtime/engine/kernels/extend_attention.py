"""Causal attention of many new tokens a row over the paged KV cache, which holds the new tokens' keys already.

A program takes one *tile*: some consecutive new tokens of one row times the query heads of one KV head, packed into
BLOCK_M lines, so that short extensions fill the tensor cores too and each key is loaded once for its whole group.
Tiles are listed by the host (it knows
every length), longest first, which fills the machine's tail.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.engine.kernels.launch import options

BLOCK_M = 128
BLOCK_N = 64
WARPS, STAGES = 8, 3
REGISTERS = 128  # a thread: two programs fit a multiprocessor then, which is worth a third


@triton.jit
def _block(
    qs, mx, mass, acc, n0, position, k_cache, v_cache, table, head, end, scale,
    HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of keys from ``n0`` on."""
    d = tl.arange(0, D)
    n = n0 + tl.arange(0, BLOCK_N)
    held = tl.minimum(n, end - 1)  # beyond the row's end memory may hold anything, NaN too: the last key, masked, again
    page = tl.load(table + held // PAGE).to(tl.int64)
    base = ((page * HK + head) * PAGE + held % PAGE) * D
    s = tl.dot(qs, tl.load(k_cache + base[None, :] + d[:, None]))
    s = tl.where(n[None, :] <= position[:, None], s, float("-inf"))
    # A line's own key is among these, or it saw keys before; only lines past ``extend`` may see none.
    m_next = tl.maximum(tl.maximum(mx, tl.max(s, 1) * scale), -1e30)
    p = tl.exp2(s * scale - m_next[:, None])
    fade = tl.exp2(mx - m_next)
    mass = mass * fade + tl.sum(p, 1)
    v = tl.load(v_cache + base[:, None] + d[None, :])
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
    return m_next, mass, acc


@triton.jit
def _extend(
    q, k_cache, v_cache, pages, slots, cached, starts, tile_row, tile_index, out, q_stride, pages_stride, scale,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = HQ // HK
    TOKENS: tl.constexpr = BLOCK_M // G
    head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(tile_row + tile)
    slot = tl.load(slots + row).to(tl.int64)
    before = tl.load(cached + row)
    start = tl.load(starts + row)
    extend = tl.load(starts + row + 1) - start
    t0 = tl.load(tile_index + tile) * TOKENS
    table = pages + slot * pages_stride

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    t = t0 + m // G
    real = (t < extend) & (m < TOKENS * G)
    line = (start + t).to(tl.int64)[:, None]
    heads = (head * G + m % G)[:, None]
    qs = tl.load(q + line * q_stride + heads * D + d[None, :], real[:, None], 0.0)  # [BLOCK_M, D]
    mx = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    position = before + t
    end = before + tl.minimum(t0 + TOKENS, extend)
    for n0 in tl.range(0, end, BLOCK_N, num_stages=STAGES):
        mx, mass, acc = _block(
            qs, mx, mass, acc, n0, position, k_cache, v_cache, table, head, end, scale, HK, D, PAGE, BLOCK_N
        )
    acc = acc / mass[:, None]
    tl.store(out + line * HQ * D + heads * D + d[None, :], acc, real[:, None])


def tiles(
    cached: npt.NDArray[np.int32], extend: npt.NDArray[np.int32], group: int, first_row: int = 0
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(row, index within the row) of every tile, those with most keys first. ``group`` = query heads per KV head."""
    tokens = BLOCK_M // group
    counts = -(-extend // tokens)
    row = np.repeat(np.arange(len(extend), dtype=np.int32), counts)
    index = np.arange(len(row), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts).astype(np.int32)
    order = np.argsort(-(cached[row] + index * tokens), kind="stable")
    return row[order] + np.int32(first_row), index[order]


def extend_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    slots: Tensor,
    cached: Tensor,
    starts: Tensor,
    tile_row: Tensor,
    tile_index: Tensor,
    out: Tensor,
    scale: float,
) -> None:
    """q [tokens, >= q_heads * head_dim] normed and rotated, rows may be strided; out [tokens, q_heads * head_dim].

    Caches [pages, kv_heads, page_tokens, head_dim]; pages [slots, context_pages]; slots, cached int32 [rows]; starts
    int32 [rows + 1]: the row's new tokens are lines [starts[r], starts[r + 1]) of q, at positions cached[r] + 0, 1...
    """
    _, kv_heads, page_tokens, head_dim = k_cache.shape
    _extend[(kv_heads, tile_row.shape[0])](
        q, k_cache, v_cache, pages, slots, cached, starts, tile_row, tile_index, out, q.stride(0), pages.stride(0),
        scale * 1.4426950408889634,
        HQ=out.shape[1] // head_dim, HK=kv_heads, D=head_dim, PAGE=page_tokens, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        STAGES=STAGES, **options(WARPS, registers=REGISTERS if q.is_cuda else None),
    )  # fmt: skip


def extend_attention_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Tensor, slots: Tensor, cached: Tensor, starts: Tensor,
    scale: float, *, q_heads: int,
) -> Tensor:  # fmt: skip
    """float32 [tokens, q_heads * head_dim]"""
    _, kv_heads, page_tokens, head_dim = k_cache.shape
    q = q[:, : q_heads * head_dim].float().reshape(len(q), q_heads, head_dim)
    out = torch.empty_like(q)
    bounds = starts.tolist()
    for r, (slot, before) in enumerate(zip(slots.tolist(), cached.tolist(), strict=True)):
        begin, end = bounds[r], bounds[r + 1]
        total = before + end - begin
        held = pages[slot, : -(-total // page_tokens)].long()
        k = k_cache[held].float().transpose(1, 2).reshape(-1, kv_heads, head_dim)[:total]
        v = v_cache[held].float().transpose(1, 2).reshape(-1, kv_heads, head_dim)[:total]
        k, v = k.repeat_interleave(q_heads // kv_heads, 1), v.repeat_interleave(q_heads // kv_heads, 1)
        s = torch.einsum("thd,nhd->htn", q[begin:end], k) * scale
        position = torch.arange(before, total, device=q.device)
        s = s.masked_fill(torch.arange(total, device=q.device)[None, :] > position[:, None], float("-inf"))
        out[begin:end] = torch.einsum("htn,nhd->thd", torch.softmax(s, -1), v)
    return out.view(len(out), -1)
