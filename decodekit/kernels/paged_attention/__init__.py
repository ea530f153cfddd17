"""Attention of ragged rows of queries over K/V that lie in blocks; a prefix that rows share is read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decodekit.kernels import triton_runs
from decodekit.kernels.paged_attention import quantized, reference
from decodekit.kernels.paged_attention.fixed import FixedWork, WorkShape
from decodekit.kernels.paged_attention.plan import Part, Tree, plan_parts
from decodekit.kernels.paged_attention.quantized import KV, QuantizedKV
from decodekit.kernels.paged_attention.work import Work, next_split, plan_work

__all__ = [
    "KV",
    "FixedWork",
    "Part",
    "QuantizedKV",
    "Tree",
    "Work",
    "WorkShape",
    "next_split",
    "paged_attention",
    "plan_attention",
    "plan_parts",
    "plan_work",
    "why_torch",
]

_WIDEST = 256


def why_torch(query: Tensor, key_cache: KV, value_cache: KV) -> str | None:
    """Why plain torch serves these tensors and not the Triton kernel; ``None``: the kernel does."""
    if not triton_runs(query.device):
        return "no GPU with Triton"
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"queries of {query.dtype}"
    if {key_cache.dtype, value_cache.dtype} != {query.dtype}:
        return f"K/V kept in {key_cache.dtype}"
    caches = key_cache, value_cache
    if any(tensor.stride(-1) != 1 for tensor in (query, *caches) if isinstance(tensor, Tensor)):
        return "heads whose numbers do not adjoin"
    if isinstance(key_cache, QuantizedKV) and (reason := quantized.why_torch(key_cache)) is not None:
        return reason
    if (width := max(key_cache.shape[2], value_cache.shape[2])) > _WIDEST:
        return f"heads {width} wide"
    if (group := query.shape[1] // key_cache.shape[1]) > _WIDEST // 2:
        return f"{group} query heads a K/V head"
    return None


def plan_attention(
    query: Tensor,
    key_cache: KV,
    value_cache: KV,
    block_table: Tensor,
    lengths: Tensor,
    query_start: Tensor,
    *,
    block_size: int,
    window: int | None = None,
) -> Work | list[Part]:
    """What :func:`paged_attention` does for all layers with such tensors and these tables: with or without the kernel."""
    options: dict[str, Any] = {"block_size": block_size, "window": window, "device": query.device}
    if why_torch(query, key_cache, value_cache) is not None:
        return plan_parts(block_table, lengths, query_start, **options)
    group = query.shape[1] // key_cache.shape[1]
    return plan_work(block_table, lengths, query_start, group=group, **options)


def paged_attention(
    query: Tensor,
    key_cache: KV,
    value_cache: KV,
    block_table: Tensor,
    lengths: Tensor,
    query_start: Tensor,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tree: Tree | None = None,
    parts: Work | Sequence[Part] | None = None,
) -> Tensor:
    """See :func:`decodekit.kernels.paged_attention.reference.paged_attention`; ``parts`` is a :func:`plan_attention`.

    On a GPU a row's result does not depend, to the bit, on the rows beside it.
    """
    reference.check(query, key_cache, value_cache, sinks)
    if parts is None:
        parts = plan_attention(
            query, key_cache, value_cache, block_table, lengths, query_start, block_size=block_size, window=window
        )
    options: dict[str, Any] = {
        "block_size": block_size,
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
        "tree": tree,
    }
    if isinstance(parts, Work):
        if tree is not None:
            reference.check_tree(query, tree, window)
        from decodekit.kernels.paged_attention import triton

        return triton.paged_attention(query, key_cache, value_cache, parts, **options)
    return reference.paged_attention(
        query, key_cache, value_cache, block_table, lengths, query_start, **options, parts=parts
    )
