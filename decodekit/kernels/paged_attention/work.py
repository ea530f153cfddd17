"""What each program of the paged attention kernel does: planned once a step on the host, used by every layer.

The keys of a row are cut at multiples of a length that depends on its own alone, so that the parts of a query, and the order
in which they are merged, are the same whatever rows are beside it. Rows whose blocks are the same over a whole split share one
item, which reads them once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SPLITS = 512, 4096
"""Least and most keys a part of a long row: short ones occupy the processor with few rows, long ones cost less to begin and to
merge."""

_PARTS = 8  # at least, of a row between these; powers of 2, all three

TILES = (16, 64)
"""Rows of scores of narrow items, which waste less, and of wide ones, which read the keys less often; powers of 2."""

COLUMNS = 9
"""Numbers an item."""

_ENOUGH = 64
"""Items that keep the processor busy with 8 K/V heads; more of them are joined, which costs less to begin."""

_LONGEST = 4096  # keys of an item that was joined

_MOST_SPLIT_QUERIES = 16  # a row with more keeps the processor busy without cutting its keys

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Work:
    """The items of one step. A member is a query of an item; its part is where the item's result for it goes.

    Attributes:
        table: [R, B] int32, the block table.
        items: (rows of scores, [I, 9] int32) a kernel launch: row of the table, first key, stop, place of the first member,
            members, the first member itself, which is often the only one, and keys a split: where there are several, each has
            a part of its own, which follow each other.
        members: [J, 3] int32: place of the query, its position, its part; -1 where the item has all keys of the query.
        merges: [Q, 3] int32: place of the query, first part, number of parts; 0 where a query sees nothing.
        num_parts: how many parts there are.
        group: query heads a K/V head, for which the items were cut.
        grown: [1] int32, tokens that every row got since then; ``None``: none.
    """

    table: Tensor
    items: tuple[tuple[int, Tensor], ...]
    members: Tensor
    merges: Tensor
    num_parts: int
    group: int
    grown: Tensor | None = None


@dataclass(frozen=True)
class _Rows:
    """[R] each: first query, its position, new tokens, length and first visible key of the rows that have any queries."""

    number: Ints
    query: Ints
    position: Ints
    count: Ints
    length: Ints
    first: Ints

    def __getitem__(self, chosen: NDArray[np.bool_] | Ints) -> _Rows:
        return _Rows(*(column[chosen] for column in vars(self).values()))


def plan_work(
    block_table: Tensor,
    lengths: Tensor,
    query_start: Tensor,
    *,
    block_size: int,
    group: int,
    window: int | None = None,
    ahead: int = 0,
    device: torch.device | str | None = None,
) -> Work:
    """Divide the attention of a batch of rows into items for the kernel. Best called with tensors on the host.

    Args:
        block_table: [R, B] int, as for :func:`~decodekit.kernels.paged_attention.paged_attention`.
        lengths: [R] int, as there.
        query_start: [R + 1] int, as there.
        block_size: tokens a block.
        group: query heads a K/V head.
        window: tokens a query sees, itself included; ``None``: all.
        ahead: the work also serves the next steps in which every row has got as many as ``ahead`` tokens more (see
            :attr:`Work.grown`); no row may pass a length of :func:`next_split` then.
        device: where the work is needed; ``None``: where ``block_table`` is.

    Raises:
        ValueError: the shapes do not fit together, or a token that a query sees has no block.
    """
    device = block_table.device if device is None else device
    table = block_table.cpu().numpy().astype(np.int32)
    length, starts = lengths.cpu().numpy().astype(np.int64), query_start.cpu().numpy().astype(np.int64)
    rows = _rows(table, length, starts, block_size, window)
    cut = rows.count <= _MOST_SPLIT_QUERIES
    narrow, wide = (max(tile, 1 << (group - 1).bit_length()) for tile in TILES)
    # Later the window of a row begins within a split that others see whole.
    members, merges, num_parts, begins, sizes, keys = _cut(
        rows[cut], table, block_size, ahead, shares=not ahead or window is None
    )
    whole_members, whole_sizes, whole_keys = _whole(rows[~cut], wide // group, window)
    few = sizes * group <= narrow
    whole_begins = np.cumsum(whole_sizes) - whole_sizes + len(members)
    members = np.concatenate([members, whole_members])
    wide_items = (
        _items(whole_keys, whole_begins, whole_sizes, members, wide // group),
        _items(keys[~few], begins[~few], sizes[~few], members, wide // group),
    )
    launches = [
        (tile, items)
        for tile, items in (
            (narrow, _items(keys[few], begins[few], sizes[few], members, narrow // group)),
            (wide, np.concatenate(wide_items)),
        )
        if len(items)
    ]
    seen = _spread(rows.query, rows.count)
    blind = np.setdiff1d(np.arange(starts[-1]), seen, assume_unique=True)
    merges = np.concatenate([merges, np.stack([blind, 0 * blind, 0 * blind], axis=1)])
    arrays: list[NDArray[Any]] = [table, *(items for _, items in launches), members, merges]
    # One copy to the device instead of five.
    flat = torch.from_numpy(np.concatenate([array.ravel().astype(np.int32) for array in arrays])).to(device)
    parts = flat.split([array.size for array in arrays])
    placed = [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
    items = tuple((tile, tensor) for (tile, _), tensor in zip(launches, placed[1:-2], strict=True))
    return Work(placed[0], items, placed[-2], placed[-1], num_parts, group)


def _rows(table: NDArray[np.int32], lengths: Ints, starts: Ints, block_size: int, window: int | None) -> _Rows:
    if len(table) != len(lengths) or len(starts) != len(lengths) + 1:
        raise ValueError(
            f"block_table has {len(table)} rows, lengths {len(lengths)} and query_start {len(starts)}; "
            "R rows need R lengths and R + 1 starts"
        )
    if len(lengths) and lengths.max() > table.shape[1] * block_size:
        longest = lengths.argmax()
        raise ValueError(
            f"row {longest} has {lengths[longest]} tokens, its block_table {table.shape[1]} blocks of {block_size}"
        )
    count = np.minimum(np.diff(starts), lengths)
    position = lengths - count
    first = np.zeros_like(position) if window is None else np.maximum(0, position - window + 1)
    rows = _Rows(np.arange(len(lengths)), starts[1:] - count, position, count, lengths, first)[count > 0]
    place = np.arange(table.shape[1])
    seen = (place >= rows.first[:, None] // block_size) & (place < -(-rows.length[:, None] // block_size))
    if (holes := (table[rows.number] < 0) & seen).any():
        row, block = np.argwhere(holes)[0]
        raise ValueError(
            f"block_table has no block for token {block * block_size} of row {rows.number[row]}, which its queries see"
        )
    return rows


def _spread(first: Ints, count: Ints) -> Ints:
    """``first[i]``, ``first[i] + 1``, ..., ``count[i]`` of them, one i after the other."""
    return np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())


def _split_sizes(lengths: Ints) -> Ints:
    sizes = np.clip((1 << np.log2(lengths).astype(np.int64)) // _PARTS, *SPLITS)
    # A short row alone would wait for few programs, each with many of its keys.
    short = np.where(lengths < SPLITS[0], SPLITS[0] // 4, SPLITS[0] // 2)
    return np.where(lengths < 2 * SPLITS[0], short, sizes)


def next_split(length: int) -> int | None:
    """The length at which a row of ``length`` tokens is first cut at other places; ``None``: it never is."""
    borders = [SPLITS[0], 2 * SPLITS[0], 2 * _PARTS * SPLITS[0]]
    while 2 * borders[-1] <= _PARTS * SPLITS[1]:
        borders.append(2 * borders[-1])
    return next((border for border in borders if border > length), None)


def _cut(
    rows: _Rows, table: NDArray[np.int32], block_size: int, ahead: int, *, shares: bool
) -> tuple[Ints, Ints, int, Ints, Ints, Ints]:
    """Rows whose keys are cut: members, merges, number of parts; of each group the place of its first member, how many it
    has, and (row, start, stop, keys a split).
    """
    size, last = _split_sizes(rows.length), rows.length + ahead
    begin, stop = rows.first // size, -(-last // size)
    splits = stop - begin
    pair = np.repeat(np.arange(len(splits)), splits)  # of a row and a split
    split = _spread(begin, splits)
    size = size[pair]
    start, end = np.maximum(split * size, rows.first[pair]), np.minimum((split + 1) * size, last[pair])
    whole = (end - start == size) & (end <= rows.length[pair]) & shares
    order, leads = _shared(rows.number[pair], split, size, whole, table, block_size)
    pair, split, start, end, size = pair[order], split[order], start[order], end[order], size[order]
    parts = np.where(splits > 1, splits * rows.count, 0)
    base = np.cumsum(parts) - parts  # of a row's parts: all splits of its first query, then of its next
    count = rows.count[pair]
    step = _spread(0 * count, count)
    wide, splitting = np.repeat(pair, count), np.repeat(split - begin[pair], count)
    part = np.where(splits[wide] > 1, base[wide] + step * splits[wide] + splitting, -1)
    members = np.stack([rows.query[wide] + step, rows.position[wide] + step, part], axis=1)
    first = np.flatnonzero(leads)
    sizes = np.add.reduceat(count, first) if len(count) else count
    begins = np.cumsum(sizes) - sizes
    keys = np.stack([rows.number[pair], start, end, np.where(start % size, end - start, size)], axis=1)[first]
    keys, begins, sizes = _join(keys, begins, sizes, split[first])
    merged = rows[splits > 1]
    of_query = np.repeat(np.flatnonzero(splits > 1), merged.count)
    step = _spread(0 * merged.count, merged.count)
    merges = np.stack([rows.query[of_query] + step, base[of_query] + step * splits[of_query], splits[of_query]], axis=1)
    return members, merges, int(parts.sum()), begins, sizes, keys


def _join(keys: Ints, begins: Ints, sizes: Ints, split: Ints) -> tuple[Ints, Ints, Ints]:
    """Where there are more groups than keep the processor busy, those of one query with the next splits of its row."""
    most = 1
    while len(keys) // (2 * most) >= _ENOUGH:
        most *= 2
    if most == 1:
        return keys, begins, sizes
    order = np.lexsort((split, keys[:, 0], sizes > 1))
    keys, begins, sizes, split = keys[order], begins[order], sizes[order], split[order]
    row, start, stop, size = keys.T
    # Whole splits up to the last, so that each begins where the one before ends.
    joins = (sizes == 1) & (start % size == 0)
    follows = (
        joins[1:] & joins[:-1] & (row[1:] == row[:-1]) & (split[1:] == split[:-1] + 1) & (stop[:-1] % size[:-1] == 0)
    )
    follows &= split[1:] % np.minimum(most, np.maximum(_LONGEST // size[1:], 1)) != 0
    leads = np.flatnonzero(np.concatenate([[True], ~follows]))
    keys = keys[leads]
    keys[:, 2] = stop[np.append(leads[1:], len(stop)) - 1]
    return keys, begins[leads], sizes[leads]


def _shared(
    row: Ints, split: Ints, size: Ints, full: NDArray[np.bool_], table: NDArray[np.int32], block_size: int
) -> tuple[Ints, NDArray[np.bool_]]:
    """The order that brings the pairs of a row and a split with the same blocks together, and which begin a group."""
    if SPLITS[0] // 4 % block_size or not len(row):
        return np.arange(len(row)), np.ones(len(row), dtype=bool)
    first = split * size // block_size
    order = np.lexsort((table[row, first], first, size))
    row, first, size, full = row[order], first[order], size[order], full[order]
    same = (size[1:] == size[:-1]) & (first[1:] == first[:-1]) & full[1:] & full[:-1]
    same &= table[row[1:], first[1:]] == table[row[:-1], first[:-1]]
    likely = np.flatnonzero(same)
    offset = np.arange(SPLITS[1] // block_size)
    place = np.minimum(first[likely, None] + offset, table.shape[1] - 1)
    equal = table[row[likely, None], place] == table[row[likely + 1, None], place]
    same[likely] = (equal | (offset >= size[likely, None] // block_size)).all(1)
    return order, np.concatenate([[True], ~same])


def _whole(rows: _Rows, width: int, window: int | None) -> tuple[Ints, Ints, Ints]:
    """Rows with many queries, ``width`` of them an item: members, and of each item its members and keys, as :func:`_cut`."""
    chunks = -(-rows.count // width)
    row = np.repeat(np.arange(len(chunks)), chunks)
    offset = _spread(0 * chunks, chunks) * width
    sizes = np.minimum(width, rows.count[row] - offset)
    position = rows.position[row] + offset
    start = np.zeros_like(position) if window is None else np.maximum(0, position - window + 1)
    # The last queries have the most keys: begun first, they are not waited for in the end.
    order = np.argsort(-(position - start), kind="stable")
    row, offset, sizes, position, start = row[order], offset[order], sizes[order], position[order], start[order]
    query, where = _spread(rows.query[row] + offset, sizes), _spread(position, sizes)
    members = np.stack([query, where, np.full_like(query, -1)], axis=1)
    stop = position + sizes
    return members, sizes, np.stack([rows.number[row], start, stop, stop - start], axis=1)


def _items(keys: Ints, begins: Ints, sizes: Ints, members: Ints, width: int) -> Ints:
    """[I, 9]: groups of members over the same keys, ``width`` members an item."""
    chunks = -(-sizes // width)
    group = np.repeat(np.arange(len(chunks)), chunks)
    offset = _spread(0 * chunks, chunks) * width
    first, count = begins[group] + offset, np.minimum(width, sizes[group] - offset)
    keys, size = keys[group, :3], keys[group, 3:]
    return np.concatenate([keys, np.stack([first, count], axis=1), members[first], size], axis=1)
