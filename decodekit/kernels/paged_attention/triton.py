"""Paged attention in Triton: the items of a step in parallel, then the parts of each query merged.

Scores are kept transposed, keys by queries: the keys fill the rows of a matrix instruction, however few queries there are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decodekit.kernels import overlaps
from decodekit.kernels.paged_attention.chunks import bounds, load_blocks, load_quantized
from decodekit.kernels.paged_attention.plan import Tree
from decodekit.kernels.paged_attention.quantized import KV, QuantizedKV, in_place
from decodekit.kernels.paged_attention.work import COLUMNS, TILES, Work

_LOG2_E = tl.constexpr(math.log2(math.e))
_COLUMNS = tl.constexpr(COLUMNS)
_MERGED = 8  # parts that are merged at a time


def paged_attention(
    query: Tensor,
    key_cache: KV,
    value_cache: KV,
    work: Work,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tree: Tree | None = None,
) -> Tensor:
    """As the reference; the tables, lengths and window are those that ``work`` was planned for.

    Args:
        query: [N, Hq, D].
        key_cache: [S, Hk, D], contiguous in its last dimension, or quantized.
        value_cache: [S, Hk, Dv], as the keys.
        work: :func:`~decodekit.kernels.paged_attention.work.plan_work` of the step.
        block_size: tokens a block.
        scale: of the scores.
        window: tokens a query sees, itself included; ``None``: all.
        softcap: see the reference.
        sinks: [Hq], see the reference.
        tree: see the reference.

    Returns:
        [N, Hq, Dv]; bit for bit the same for a row whatever rows are beside it.
    """
    count, heads, width = query.shape
    key_heads, value_width = value_cache.shape[1:]
    output = query.new_empty((count, heads, value_width))
    parts = query.new_empty((work.num_parts, heads, value_width), dtype=torch.float32)
    lse = query.new_empty((work.num_parts, heads), dtype=torch.float32)
    widths = {"D": width, "DV": value_width}
    padded = {f"BLOCK_{name}": max(16, triton.next_power_of_2(size)) for name, size in widths.items()}
    keys_a_step, stages = _tuning(query.dtype, max(padded.values()))
    packed: dict[str, Any] = {"KIND": None}
    if isinstance(key_cache, QuantizedKV) and isinstance(value_cache, QuantizedKV):
        packed = in_place(key_cache, value_cache)
        keys_a_step, stages = max(keys_a_step, block_size), min(stages, 2)  # as was fastest on an H200
    keys, values = (cache.codes if isinstance(cache, QuantizedKV) else cache for cache in (key_cache, value_cache))
    overlap: dict[str, Any] = {"OVERLAP": overlaps(query.device)}
    if overlap["OVERLAP"]:
        overlap["launch_pdl"] = True
    for tile, items in work.items:
        _attend[(len(items) * key_heads,)](
            query,
            keys,
            values,
            work.table,
            items,
            work.members,
            work.grown,
            sinks,
            output,
            parts,
            lse,
            *query.stride()[:2],
            keys.stride(1),
            values.stride(1),
            work.table.stride(0),
            heads,
            key_heads,
            scale,
            softcap,
            window,
            BLOCK_SIZE=block_size,
            GROUP=work.group,
            TILE=tile,
            KEYS=keys_a_step,
            STRIDE_KS=keys.stride(0),
            STRIDE_VS=values.stride(0),
            ancestors=None if tree is None else tree.ancestors.contiguous(),
            tree_start=None if tree is None else tree.start,
            WORDS=0 if tree is None else tree.ancestors.shape[1],
            **widths,
            **padded,
            **packed,
            **overlap,
            # Of wide items twice as many programs run at once with so much less shared memory, and none has registers to spare.
            FLAT=tile < TILES[1],
            num_stages=stages if tile < TILES[1] else min(stages, 2),
            num_warps=4,
        )
    if len(work.merges):
        _merge[(len(work.merges), heads)](
            work.merges,
            parts,
            lse,
            sinks,
            output,
            heads,
            PARTS=_MERGED,
            DV=value_width,
            BLOCK_DV=padded["BLOCK_DV"],
            num_warps=1,
            **overlap,
        )
    return output


def _tuning(dtype: torch.dtype, width: int) -> tuple[int, int]:
    """Keys a step, on which a row's bits depend, and steps that are loaded ahead."""
    # Measured on an H200. Fewer keys a step read a little faster with many rows and are much slower with few; wide heads have
    # no room in shared memory for more, single precision none in registers.
    if dtype == torch.float32:
        return 32, 1
    return (64 if width <= 128 else 32), 3


# Of each step's own size or place in the plan: none of them may have the kernel compiled once more.
@triton.jit(do_not_specialize=["stride_t"], do_not_specialize_on_alignment=["items", "members", "grown"])
def _attend(
    query,
    keys,
    values,
    table,
    items,
    members,
    grown,
    sinks,
    output,
    parts,
    lse,
    stride_qn,
    stride_qh,
    stride_kh,
    stride_vh,
    stride_t,
    heads,
    key_heads,
    scale,
    softcap,
    window,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    STRIDE_KS: tl.constexpr,
    STRIDE_VS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    OVERLAP: tl.constexpr,
    FLAT: tl.constexpr,
    KIND: tl.constexpr,
    ancestors=None,
    tree_start=None,
    WORDS: tl.constexpr = 0,
    key_scales=None,
    value_scales=None,
    key_pool=None,
    value_pool=None,
    places=None,
    KEY_BYTES: tl.constexpr = 0,
    VALUE_BYTES: tl.constexpr = 0,
    LARGEST: tl.constexpr = 0.0,
):
    if OVERLAP:
        gdc_launch_dependents()
    # The heads of an item one after the other: what they all read of it is in the cache then.
    item, head = items + tl.program_id(0) // key_heads * _COLUMNS, tl.program_id(0) % key_heads
    row, first_key, last_key = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    first, count, size = tl.load(item + 3), tl.load(item + 4), tl.load(item + 8)
    if count == 0:
        if OVERLAP:
            gdc_wait()  # what comes after a launch without any items must not overtake those before it
        return
    column = tl.arange(0, TILE)
    live = column < count * GROUP
    place = tl.where(live, tl.load(item + 5), 0).to(tl.int64)
    position = tl.where(live, tl.load(item + 6), -1)
    part = tl.where(live, tl.load(item + 7), -1).to(tl.int64)
    if count > 1:
        member = members + (first + column // GROUP) * 3
        place = tl.load(member, mask=live, other=0).to(tl.int64)
        position = tl.load(member + 1, mask=live, other=-1)
        part = tl.load(member + 2, mask=live, other=-1).to(tl.int64)
    lowest, highest_key = first_key, last_key
    if grown is not None:
        position = tl.where(live, position + tl.load(grown), -1)
        highest_key = tl.minimum(last_key, tl.max(position, 0) + 1)
        if window is not None:
            lowest = tl.maximum(first_key, tl.min(tl.where(live, position, 2147483647), 0) - window + 1)
    query_head = head * GROUP + column % GROUP
    dim, value_dim = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    if KIND is None:
        keys += head.to(tl.int64) * stride_kh + dim[None, :]
        values += head.to(tl.int64) * stride_vh + value_dim[None, :]
    table += row.to(tl.int64) * stride_t
    ones = tl.full([16, KEYS], 1.0, query.dtype.element_ty)
    offset = tl.arange(0, KEYS)
    if OVERLAP:
        # What was read so far is older than any kernel that may still run.
        gdc_wait()
    queries = tl.load(
        query + (place * stride_qn + query_head * stride_qh)[None, :] + dim[:, None],
        mask=live[None, :] & (dim < D)[:, None],
        other=0.0,
    )
    if ancestors is not None:
        branches = tl.load(tree_start + place, mask=live, other=2147483647)
        first_new = tl.min(branches, 0)
    # Where all splits take one loop, the first keys of the next are on their way while the last of this are multiplied.
    for outer in range(first_key, last_key, last_key - first_key if FLAT else size):
        split = outer
        begin, start, stop = bounds(split, size, lowest, highest_key, BLOCK_SIZE, KIND)
        steps = tl.cdiv(stop - begin, KEYS)
        if FLAT:
            steps = 0
            for each in range(first_key, last_key, size):
                its_begin, _, its_stop = bounds(each, size, lowest, highest_key, BLOCK_SIZE, KIND)
                steps += tl.maximum(tl.cdiv(its_stop - its_begin, KEYS), 1)
        highest = tl.full([TILE], float("-inf"), tl.float32)
        totals = tl.zeros([16, TILE], tl.float32)
        if sinks is not None:
            # Those of queries with parts are for the merge to add.
            whole = live & (part < 0)
            sink = tl.load(sinks + query_head, mask=whole, other=0.0).to(tl.float32)
            highest = tl.where(whole, sink * _LOG2_E, highest)
            totals += tl.where(whole, 1.0, 0.0)[None, :]
        result = tl.zeros([BLOCK_DV, TILE], tl.float32)
        block, spot = load_blocks(table, places, begin, stop, BLOCK_SIZE, KEYS, KIND)
        for _ in range(steps):
            token = begin + offset
            there = (token >= start) & (token < stop)
            now, now_spot, here, ends = block, spot, begin, begin + KEYS >= stop
            begin += KEYS
            if FLAT:
                split = tl.where(ends, split + size, split)
                next_begin, next_start, next_stop = bounds(split, size, lowest, highest_key, BLOCK_SIZE, KIND)
                begin, start = tl.where(ends, next_begin, begin), tl.where(ends, next_start, start)
                stop = tl.where(ends, next_stop, stop)
            # Loaded a step ahead: keys whose address waits for a load are not fetched while others are multiplied.
            block, spot = load_blocks(table, places, begin, stop, BLOCK_SIZE, KEYS, KIND)
            if KIND is None:
                slot = now.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
                key_there, value_there = there[:, None], there[:, None]
                if BLOCK_D != D:
                    key_there = key_there & (dim < D)[None, :]
                if BLOCK_DV != DV:
                    value_there = value_there & (value_dim < DV)[None, :]
                key = tl.load(keys + slot[:, None] * STRIDE_KS, mask=key_there, other=0.0)
            else:
                by_block = tl.reshape(there, [KEYS // BLOCK_SIZE, BLOCK_SIZE])
                key = load_quantized(
                    *(keys, key_scales, key_pool, now, now_spot, by_block, head, key_heads, stride_kh),
                    *(STRIDE_KS, BLOCK_SIZE, KIND, True, D, BLOCK_D, KEY_BYTES, LARGEST),
                )
            scores = tl.dot(key, queries, input_precision="ieee") * scale
            if softcap is not None:
                scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2 * _LOG2_E / softcap)) + 1.0))
            visible = there[:, None] & (token[:, None] <= position[None, :])
            if window is not None:
                visible = visible & (token[:, None] > position[None, :] - window)
            if ancestors is not None:
                if here + KEYS > first_new:
                    after = token[:, None] - branches[None, :]
                    word = ancestors + (place * WORDS)[None, :] + after // 32
                    bit = tl.load(word, mask=live[None, :] & (after >= 0) & (after < 32 * WORDS), other=0) >> (
                        after & 31
                    )
                    visible = visible & ((after < 0) | ((bit & 1) != 0))
            scores = tl.where(visible, scores * _LOG2_E, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 0))
            # Finite, where a query saw nothing yet: -inf - -inf is NaN.
            floor = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - floor[None, :])
            decay = tl.exp2(highest - floor)
            if KIND is None:
                value = tl.load(values + slot[:, None] * STRIDE_VS, mask=value_there, other=0.0)
            else:
                value = load_quantized(
                    *(values, value_scales, value_pool, now, now_spot, by_block, head, key_heads, stride_vh),
                    *(STRIDE_VS, BLOCK_SIZE, KIND, False, DV, BLOCK_DV, VALUE_BYTES, LARGEST),
                )
            weights = weights.to(value.dtype)
            result = tl.dot(tl.trans(value), weights, result * decay[None, :], input_precision="ieee")
            # A product sums in the order of the keys; a sum would in one of the tile's shape, and of the rows beside this one.
            totals = tl.dot(ones, weights, totals * decay[None, :], input_precision="ieee")
            highest = higher
            if FLAT:
                if ends:
                    # fmt: off
                    _store(output, parts, lse, result, highest, totals, place, part, query_head, live, heads, value_dim, DV)
                    # fmt: on
                    part = tl.where(part >= 0, part + 1, part)
                    highest = tl.full([TILE], float("-inf"), tl.float32)
                    totals = tl.zeros([16, TILE], tl.float32)
                    result = tl.zeros([BLOCK_DV, TILE], tl.float32)
        if not FLAT:
            _store(output, parts, lse, result, highest, totals, place, part, query_head, live, heads, value_dim, DV)
            part = tl.where(part >= 0, part + 1, part)


@triton.jit
def _store(
    output, parts, lse, result, highest, totals, place, part, query_head, live, heads, value_dim, DV: tl.constexpr
):
    """What a query has seen of a split goes to its part, or if that is all to the output."""
    total = tl.max(totals, 0)  # all its rows are equal
    result = result / tl.where(total > 0, total, 1.0)[None, :]
    kept = (value_dim < DV)[:, None] & live[None, :]
    where = (place * heads + query_head) * DV
    whole = output + where[None, :] + value_dim[:, None]
    tl.store(whole, result.to(output.dtype.element_ty), mask=kept & (part < 0)[None, :])
    where = part * heads + query_head
    tl.store(parts + (where * DV)[None, :] + value_dim[:, None], result, mask=kept & (part >= 0)[None, :])
    tl.store(lse + where, highest + tl.log2(total), mask=live & (part >= 0))


@triton.jit(do_not_specialize_on_alignment=["merges"])
def _merge(
    merges,
    parts,
    lse,
    sinks,
    output,
    heads,
    PARTS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    merge, head = merges + tl.program_id(0) * 3, tl.program_id(1)
    place, first, count = tl.load(merge).to(tl.int64), tl.load(merge + 1).to(tl.int64), tl.load(merge + 2)
    if place < 0:
        return
    number, dim = tl.arange(0, PARTS), tl.arange(0, BLOCK_DV)
    highest = float("-inf")
    total = 0.0
    if sinks is not None:
        if count > 0:
            highest = tl.load(sinks + head).to(tl.float32) * _LOG2_E
            total = 1.0
    result = tl.zeros([BLOCK_DV], tl.float32)
    for begin in range(0, count, PARTS):
        there = begin + number < count
        where = (first + begin + number) * heads + head
        part_lse = tl.load(lse + where, mask=there, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(part_lse, 0))
        floor = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(part_lse - floor)
        decay = tl.exp2(highest - floor)
        part = tl.load(
            parts + (where * DV)[:, None] + dim[None, :], mask=there[:, None] & (dim < DV)[None, :], other=0.0
        )
        result = result * decay + tl.sum(part * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        highest = higher
    result = result / tl.where(total > 0, total, 1.0)
    tl.store(output + (place * heads + head) * DV + dim, result.to(output.dtype.element_ty), mask=dim < DV)
