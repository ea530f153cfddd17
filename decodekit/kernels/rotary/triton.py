"""Rotary position embeddings in Triton: the queries' and keys' heads of one token a program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decodekit.kernels import overlaps


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference, in float32; the last dimension of all tensors is contiguous. The results lie [R, q, H, D]."""
    rows, heads, count, width = query.shape
    key_heads = key.shape[1]
    turned_query = query.new_empty((rows, count, heads, width)).transpose(1, 2)
    turned_key = key.new_empty((rows, count, key_heads, width)).transpose(1, 2)
    cos, sin = (part.expand(rows, count, width) for part in (cos, sin))
    half = triton.next_power_of_2(width // 2)
    some = max(1, min(triton.next_power_of_2(heads + key_heads), 1024 // half))
    _rotate[(rows * count, triton.cdiv(heads + key_heads, some))](
        query,
        key,
        cos,
        sin,
        turned_query,
        turned_key,
        *query.stride()[:3],
        *key.stride()[:3],
        *cos.stride()[:2],
        *sin.stride()[:2],
        *turned_query.stride()[:3],
        *turned_key.stride()[:3],
        count,
        heads,
        key_heads,
        width // 2,
        HEADS=some,
        HALF=half,
        OVERLAP=(overlap := overlaps(query.device)),
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )
    return turned_query, turned_key


@triton.jit
def _rotate(
    query,
    key,
    cos,
    sin,
    turned_query,
    turned_key,
    stride_qr,
    stride_qh,
    stride_qt,
    stride_kr,
    stride_kh,
    stride_kt,
    stride_cr,
    stride_ct,
    stride_sr,
    stride_st,
    stride_tqr,
    stride_tqh,
    stride_tqt,
    stride_tkr,
    stride_tkh,
    stride_tkt,
    count,
    heads,
    key_heads,
    half,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, token = (tl.program_id(0) // count).to(tl.int64), (tl.program_id(0) % count).to(tl.int64)
    head, dim = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    cos += row * stride_cr + token * stride_ct + dim
    sin += row * stride_sr + token * stride_st + dim
    inside = dim < half
    cos_left = tl.load(cos, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_right = tl.load(cos + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_left = tl.load(sin, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_right = tl.load(sin + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    is_query, of_key = (head < heads)[:, None], (head - heads)[:, None]
    queries, keys = is_query & inside[None, :], ((of_key >= 0) & (of_key < key_heads)) & inside[None, :]
    from_query = query + row * stride_qr + token * stride_qt + head[:, None] * stride_qh + dim[None, :]
    from_key = key + row * stride_kr + token * stride_kt + of_key * stride_kh + dim[None, :]
    to_query = turned_query + row * stride_tqr + token * stride_tqt + head[:, None] * stride_tqh + dim[None, :]
    to_key = turned_key + row * stride_tkr + token * stride_tkt + of_key * stride_tkh + dim[None, :]
    left = tl.load(from_query, mask=queries, other=0.0).to(tl.float32)
    left += tl.load(from_key, mask=keys, other=0.0).to(tl.float32)
    right = tl.load(from_query + half, mask=queries, other=0.0).to(tl.float32)
    right += tl.load(from_key + half, mask=keys, other=0.0).to(tl.float32)
    turned_left = left * cos_left - right * sin_left
    turned_right = right * cos_right + left * sin_right
    kind = turned_query.dtype.element_ty
    tl.store(to_query, turned_left.to(kind), mask=queries)
    tl.store(to_query + half, turned_right.to(kind), mask=queries)
    tl.store(to_key, turned_left.to(kind), mask=keys)
    tl.store(to_key + half, turned_right.to(kind), mask=keys)
