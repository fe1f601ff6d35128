"""What stands between the joint q/k/v projection and attention: per-head RMSNorm (Qwen3), rotary embedding, KV store.

The cache of a layer is [pages, kv_heads, page_tokens, head_dim] for keys and the same for values: one head's share of
a page is one contiguous block, which is what attention reads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.engine.kernels.launch import options


@triton.jit
def rotated(
    x, heads, weight, cos, sin, position, eps, inside, D: tl.constexpr, NORM: tl.constexpr
):  # -> [HEADS, D] float32
    """Load heads [HEADS] of the row at ``x``, norm each head if NORM, rotate by ``position``."""
    d = tl.arange(0, D)
    half: tl.constexpr = D // 2
    other = (d + half) % D
    at = x + heads[:, None] * D
    mine = tl.load(at + d[None, :], inside[:, None], 0.0).to(tl.float32)
    twin = tl.load(at + other[None, :], inside[:, None], 0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(mine * mine, 1) / D + eps)[:, None]
        mine = mine * scale * tl.load(weight + d).to(tl.float32)[None, :]
        twin = twin * scale * tl.load(weight + other).to(tl.float32)[None, :]
    c = tl.load(cos + position * half + d % half)
    s = tl.load(sin + position * half + d % half)
    s = tl.where(d < half, -s, s)
    return mine * c[None, :] + twin * s[None, :]


@triton.jit
def _rotate_store(
    qkv, q_norm, k_norm, cos, sin, k_cache, v_cache, pages, token_slot, token_position, count, qkv_stride,
    pages_stride, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr,
    NORM: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (HQ + BLOCK_H - 1) // BLOCK_H
    there = True
    if COUNTED:
        there = token < tl.load(count)
    position = tl.load(token_position + token)
    slot = tl.load(token_slot + token).to(tl.int64)
    if PDL:
        gdc_wait()
        # Only now: what follows may rely on all that came before this kernel's predecessor.
        gdc_launch_dependents()
    if not there:
        return
    row = qkv + token * qkv_stride
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, D)
    if block < q_blocks:
        heads = block * BLOCK_H + h
        inside = heads < HQ
        q = rotated(row, heads, q_norm, cos, sin, position, eps, inside, D, NORM)
        tl.debug_barrier()  # in place: every twin has been read before its place is written
        tl.store(row + heads[:, None] * D + d[None, :], q, inside[:, None])
    else:
        heads = (block - q_blocks) * BLOCK_H + h
        inside = heads < HK
        page = tl.load(pages + slot * pages_stride + position // PAGE).to(tl.int64)
        at = ((page * HK + heads[:, None]) * PAGE + position % PAGE) * D + d[None, :]
        k = rotated(row + HQ * D, heads, k_norm, cos, sin, position, eps, inside, D, NORM)
        tl.store(k_cache + at, k, inside[:, None])
        v = tl.load(row + (HQ + HK + heads[:, None]) * D + d[None, :], inside[:, None], 0.0)
        tl.store(v_cache + at, v, inside[:, None])


def rotate_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    token_slot: Tensor,
    token_position: Tensor,
    eps: float,
    *,
    q_heads: int,
    count: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Queries are rotated in place, keys and values go to their place in the cache.

    qkv [tokens, (q_heads + 2 kv_heads) * head_dim]; norms [head_dim] or None; cos, sin float32 [positions, head_dim/2];
    caches [pages, kv_heads, page_tokens, head_dim]; pages [slots, context_pages]; token_* int32 [tokens]. With
    ``count`` (on the device) lines from there on are padding and left alone.
    """
    _, kv_heads, page_tokens, head_dim = k_cache.shape
    block = min(8, triton.next_power_of_2(max(q_heads, kv_heads)))
    grid = (qkv.shape[0], triton.cdiv(q_heads, block) + triton.cdiv(kv_heads, block))
    unused = cos
    _rotate_store[grid](
        qkv, unused if q_norm is None else q_norm, unused if k_norm is None else k_norm, cos, sin, k_cache, v_cache,
        pages, token_slot, token_position, token_slot if count is None else count, qkv.stride(0), pages.stride(0), eps,
        HQ=q_heads, HK=kv_heads, D=head_dim, PAGE=page_tokens, BLOCK_H=block, NORM=q_norm is not None,
        COUNTED=count is not None, PDL=pdl, **options(2, pdl=pdl),
    )  # fmt: skip


def rotate_reference(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """x [tokens, heads, head_dim], cos and sin [tokens, head_dim/2] -> float32 of x's shape."""
    x = x.float()
    if weight is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    first, second = x.chunk(2, -1)
    c, s = cos.float()[:, None, :], sin.float()[:, None, :]
    return torch.cat((first * c - second * s, second * c + first * s), -1)


def rotate_store_reference(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, k_cache: Tensor,
    v_cache: Tensor, pages: Tensor, token_slot: Tensor, token_position: Tensor, eps: float, *, q_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(q [tokens, q_heads, head_dim], k_cache, v_cache), all float32; the arguments stay as they are."""
    _, kv_heads, page_tokens, head_dim = k_cache.shape
    q, k, v = qkv.view(len(qkv), -1, head_dim).split((q_heads, kv_heads, kv_heads), 1)
    position = token_position.long()
    q = rotate_reference(q, q_norm, cos[position], sin[position], eps)
    k = rotate_reference(k, k_norm, cos[position], sin[position], eps)
    page = pages[token_slot.long(), position // page_tokens].long()
    keys, values = k_cache.float(), v_cache.float()
    keys[page, :, position % page_tokens] = k
    values[page, :, position % page_tokens] = v.float()
    return q, keys, values
