"""Scatter K/V by slot in Triton: keys and values of some heads of one token a program, read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decodekit.kernels import overlaps

_NUMBERS = 1024  # of keys and of values that a program writes


def kv_write(key_cache: Tensor, value_cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """As the reference; the last dimension of caches, keys and values is contiguous."""
    count, heads, width = keys.shape
    value_width = values.shape[2]
    if not count:
        return
    block = max(triton.next_power_of_2(width), triton.next_power_of_2(value_width))
    some = max(1, min(triton.next_power_of_2(heads), _NUMBERS // block))
    _write[(count, triton.cdiv(heads, some))](
        key_cache,
        value_cache,
        slots,
        keys,
        values,
        slots.stride(0),
        *key_cache.stride()[:2],
        *value_cache.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        heads,
        D=width,
        DV=value_width,
        HEADS=some,
        BLOCK=block,
        OVERLAP=(overlap := overlaps(keys.device)),
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )


@triton.jit
def _write(
    key_cache,
    value_cache,
    slots,
    keys,
    values,
    stride_s,
    stride_kcs,
    stride_kch,
    stride_vcs,
    stride_vch,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    heads,
    D: tl.constexpr,
    DV: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * stride_s).to(tl.int64)
    head, dim = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64), tl.arange(0, BLOCK)[None, :]
    # A token without a slot is left out.
    heads = tl.where(slot < 0, 0, heads)
    there = (head < heads) & (dim < D)
    key = tl.load(keys + token * stride_kn + head * stride_kh + dim, mask=there)
    tl.store(key_cache + slot * stride_kcs + head * stride_kch + dim, key.to(key_cache.dtype.element_ty), mask=there)
    there = (head < heads) & (dim < DV)
    value = tl.load(values + token * stride_vn + head * stride_vh + dim, mask=there)
    tl.store(
        value_cache + slot * stride_vcs + head * stride_vch + dim, value.to(value_cache.dtype.element_ty), mask=there
    )
