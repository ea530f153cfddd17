"""Paged attention in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from decodekit.kernels.paged_attention.plan import Part, Tree, plan_parts, plan_tree
from decodekit.kernels.paged_attention.quantized import KV, QuantizedKV


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
    parts: Sequence[Part] | None = None,
) -> Tensor:
    """Causal attention of each row's last tokens over all of its tokens, whose K/V are in the cache already.

    Blocks that rows share are read once for all of them. The parts of a query (shared blocks, its own blocks) are merged
    exactly by their log-sum-exp: Milakov and Gimelshein, 2018, arXiv:1805.02867; over parts of the keys as in
    flash-decoding (Dao et al., 2023), over a shared prefix as in Hydragen (Juravsky et al., 2024, arXiv:2402.05099).

    Slot ``s`` of a cache is token ``s % block_size`` of block ``s // block_size``. N queries, R rows, S slots, B blocks a
    table, Hq query heads and Hk key heads of width D, values of width Dv. Computes in float32 at least.

    Args:
        query: [N, Hq, D] the queries of all rows, one row after the other.
        key_cache: [S, Hk, D], as numbers or quantized; head h of the keys serves the query heads ``h * Hq / Hk`` and on.
        value_cache: [S, Hk, Dv].
        block_table: [R, B] int, block ``i`` has tokens ``i * block_size`` and on; -1 where a window let go.
        lengths: [R] int, tokens of each row, the queries' own included; 0 for an empty row.
        query_start: [R + 1] int, the queries of row r are ``query_start[r]`` to ``query_start[r + 1]``: the last tokens of
            its sequence. Those before its beginning (left pads) see nothing.
        block_size: tokens a block.
        scale: of the scores, often ``D ** -0.5``.
        window: tokens a query sees, itself included; ``None``: all.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
        sinks: [Hq] scores of a token without value that every query sees besides (gpt-oss).
        tree: the new tokens of each row are trees; not beside a window. ``None``: they are chains.
        parts: :func:`plan_parts` of the same tables, lengths and window, for many layers to share; ``None``: planned here.

    Returns:
        [N, Hq, Dv] of the queries' dtype; zeros where a query sees nothing.

    Raises:
        ValueError: shapes that do not fit together, a token that a query sees has no block, or a tree beside a window.
    """
    check(query, key_cache, value_cache, sinks)
    if tree is not None:
        check_tree(query, tree, window)
        tables = block_table, lengths, query_start
        parts = plan_tree(*tables, tree, block_size=block_size, device=query.device)
    elif parts is None:
        parts = plan_parts(block_table, lengths, query_start, block_size=block_size, window=window, device=query.device)
    accurate = torch.promote_types(query.dtype, torch.float32)
    output = query.new_zeros((*query.shape[:2], value_cache.shape[-1]), dtype=accurate)
    lse = output.new_full(query.shape[:2], -torch.inf)
    if sinks is not None:
        lse[:] = sinks
    for part in parts:
        places = part.queries.flatten()
        queries, keys, values = query[part.queries], _read(key_cache, part.slots), _read(value_cache, part.slots)
        if part.whole and softcap is None and sinks is None:
            output[places] = _attend_whole(queries, keys, values, part, scale).flatten(0, 1).to(accurate)
            continue
        added, added_lse = _attend(queries.to(accurate), keys.to(accurate), values.to(accurate), part, scale, softcap)
        before = lse[places]
        lse[places] = total = torch.logaddexp(before, added_lse.flatten(0, 1))
        # Finite, so that a query that saw nothing yet keeps its zeros: -inf - -inf is NaN.
        floor = total.clamp(min=torch.finfo(accurate).min)
        weight, added_weight = (part_lse.sub(floor).exp_()[..., None] for part_lse in (before, added_lse.flatten(0, 1)))
        output[places] = weight * output[places] + added_weight * added.flatten(0, 1)
    return output.to(query.dtype)


def check(query: Tensor, key_cache: KV, value_cache: KV, sinks: Tensor | None) -> None:
    """Refuse shapes that do not fit together.

    Raises:
        ValueError: says which.
    """
    if query.ndim != 3 or len(key_cache.shape) != 3 or value_cache.shape[:2] != key_cache.shape[:2]:
        raise ValueError(
            f"query {list(query.shape)}, key_cache {list(key_cache.shape)}, value_cache {list(value_cache.shape)} "
            "should be [N, Hq, D], [S, Hk, D] and [S, Hk, Dv]"
        )
    heads, key_heads = query.shape[1], key_cache.shape[1]
    if heads % key_heads:
        raise ValueError(f"{heads} query heads cannot share {key_heads} K/V heads evenly")
    if query.shape[2] != key_cache.shape[2]:
        raise ValueError(f"queries are {query.shape[2]} wide and keys {key_cache.shape[2]}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks have shape {list(sinks.shape)}; {heads} query heads need [{heads}]")


def check_tree(query: Tensor, tree: Tree, window: int | None) -> None:
    """Refuse trees that do not fit the queries.

    Raises:
        ValueError: says why.
    """
    count = len(query)
    if tree.ancestors.ndim != 2 or tree.start.shape != (count,) or len(tree.ancestors) != count:
        raise ValueError(
            f"a tree has ancestors {list(tree.ancestors.shape)} and start {list(tree.start.shape)}; {count} queries need "
            f"[{count}, W] and [{count}]"
        )
    if window is not None:
        raise ValueError(f"a tree beside a window of {window}: the tokens of a branch do not adjoin; give one of them")


def _read(cache: KV, slots: Tensor | slice) -> Tensor:
    """[G, T, H, D]."""
    if isinstance(cache, QuantizedKV):
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop, device=cache.codes.device)[None]
        return cache.read(slots.flatten()).unflatten(0, slots.shape)
    if isinstance(slots, slice):
        return cache[slots][None]
    return cache.index_select(0, slots.flatten()).unflatten(0, slots.shape)


def _attend_whole(query: Tensor, keys: Tensor, values: Tensor, part: Part, scale: float) -> Tensor:
    """As :func:`_attend`, where nobody asks for the log-sum-exp: torch's fused kernel."""
    return scaled_dot_product_attention(
        query.transpose(1, 2),
        keys.to(query.dtype).transpose(1, 2),
        values.to(query.dtype).transpose(1, 2),
        attn_mask=None if part.visible is None else part.visible[:, None],
        is_causal=part.causal,
        scale=scale,
        enable_gqa=True,
    ).transpose(1, 2)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, part: Part, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Softmax attention of ``query`` [G, M, Hq, D]: [G, M, Hq, Dv] and the log-sum-exp [G, M, Hq] of the scores."""
    groups, count, heads, _ = query.shape
    key_heads = keys.shape[2]
    # The query heads that share a key head are rows of one product.
    shared = query.unflatten(2, (key_heads, -1)).transpose(1, 2).flatten(2, 3)  # [G, Hk, M * Hq / Hk, D]
    scores = (shared * scale) @ keys.permute(0, 2, 3, 1)  # [G, Hk, M * Hq / Hk, T]
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    visible = part.visible
    if part.causal:
        visible = torch.ones(count, count, dtype=torch.bool, device=query.device).tril_()[None]
    if visible is not None:
        scores.unflatten(2, (count, -1)).masked_fill_(~visible[:, None, :, None], -torch.inf)
    # Finite, where a query sees none of these keys: -inf - -inf is NaN.
    highest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    output = (weights @ values.transpose(1, 2)).div_(total.clamp(min=torch.finfo(scores.dtype).tiny))
    lse = total.log_().add_(highest)

    def by_query(rows: Tensor) -> Tensor:
        return rows.unflatten(2, (count, -1)).transpose(1, 2).reshape(groups, count, heads, -1)

    return by_query(output), by_query(lse)[..., 0]
