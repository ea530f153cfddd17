"""Which queries attend to which blocks together: planned once a step on the host, used by every layer.

The blocks that several tables have in common, level by level (a system prompt, then each prompt that was forked), make a
part of their own for the queries of all these rows; what is left of each row makes its tail. The results of a query's
parts are merged by their log-sum-exp, so the plan changes what is computed together, not what comes out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MIN_SHARED = 256
"""Least tokens saved by attending to a shared run apart: fewer cost less to read again than the extra part does."""

_SCORES = 1 << 20  # of one head in one part: bounds its memory, whatever the lengths
_MIN_QUERIES = 16  # a product of fewer rows leaves the processor waiting for the keys


@dataclass(frozen=True, eq=False)
class Part:
    """Queries and keys to attend to in one go: G groups of M queries and T keys each.

    Attributes:
        queries: [G, M] int64, places in the flat queries.
        slots: [G, T] int64, or the range of slots where G is 1 and they adjoin.
        visible: [G, M, T] bool, whether the query sees the key; ``None``: all.
        causal: query i sees keys 0 to i (T is M); ``visible`` is ``None``.
        whole: these queries are in no other part.
    """

    queries: Tensor
    slots: Tensor | slice
    visible: Tensor | None
    causal: bool
    whole: bool


class Tree(NamedTuple):
    """Which new tokens of its row each of N queries sees, where they are a tree and not a chain: drafts that branch.

    After SpecInfer (Miao et al., 2023, arXiv:2305.09781). The tokens of a row lie one after the other in its blocks, parents
    before their children; all tokens before the new ones are seen as ever.

    Attributes:
        ancestors: [N, W] int32, bit ``j % 32`` of word ``j // 32`` says whether the query sees new token j of its row: itself
            and the tokens on the way to it.
        start: [N] int32, how many tokens its row had before.
    """

    ancestors: Tensor
    start: Tensor


class _Row(NamedTuple):
    number: int
    query: int  # place of its first query
    position: int  # of that query in its sequence
    length: int
    first: int  # first block that its queries see


class _Chunk(NamedTuple):
    row: int
    query: int
    position: int
    key: int  # position of the first key
    keys: int


def plan_parts(
    block_table: Tensor,
    lengths: Tensor,
    query_start: Tensor,
    *,
    block_size: int,
    window: int | None = None,
    min_shared: int | None = MIN_SHARED,
    device: torch.device | str | None = None,
) -> list[Part]:
    """Divide the attention of a batch of rows into parts; each query meets each key it sees in exactly one.

    Finds shared prefixes as in Hydragen (Juravsky et al., 2024, arXiv:2402.05099), at every depth. Best called with
    tensors on the host.

    Args:
        block_table: [R, B] int, block ``i`` has tokens ``i * block_size`` and on; -1 where a window let go.
        lengths: [R] int, tokens of each row, the queries' own included; 0 for an empty row.
        query_start: [R + 1] int, the queries of row r are ``query_start[r]`` to ``query_start[r + 1]``: the last tokens of
            its sequence. Those before its beginning (left pads) see nothing.
        block_size: tokens a block.
        window: tokens a query sees, itself included; ``None``: all.
        min_shared: least tokens to save by attending to a shared run apart; ``None``: never.
        device: where the parts are needed; ``None``: where ``block_table`` is.

    Raises:
        ValueError: the shapes do not fit together, or a token that a query sees has no block.
    """
    device = block_table.device if device is None else device
    table = block_table.to("cpu", torch.int64)
    counts, starts = lengths.tolist(), query_start.tolist()
    if table.shape[0] != len(counts) or len(starts) != len(counts) + 1:
        raise ValueError(
            f"block_table has {table.shape[0]} rows, lengths {len(counts)} and query_start {len(starts)}; "
            "R rows need R lengths and R + 1 starts"
        )
    if counts and max(counts) > table.shape[1] * block_size:
        longest = counts.index(max(counts))
        raise ValueError(
            f"row {longest} has {counts[longest]} tokens, its block_table {table.shape[1]} blocks of {block_size}"
        )
    rows = list(_rows(counts, starts, block_size, window))
    for row in rows:
        if (holes := table[row.number, row.first : -(-row.length // block_size)] < 0).any():
            token = (row.first + int(holes.int().argmax())) * block_size
            raise ValueError(f"block_table has no block for token {token} of row {row.number}, which its queries see")
    planner = _Planner(table, block_size, window, device)
    runs, tails = _shared_runs(rows, table, block_size, min_shared)
    return [
        *(part for shared, start, stop in runs for part in planner.run(shared, start, stop)),
        *planner.tails(rows, tails),
    ]


def _rows(lengths: Sequence[int], starts: Sequence[int], block_size: int, window: int | None) -> Iterator[_Row]:
    for index, length in enumerate(lengths):
        position = length - (starts[index + 1] - starts[index])
        query = starts[index] + max(0, -position)
        position = max(0, position)
        if position < length:
            first = 0 if window is None else max(0, position - window + 1) // block_size
            yield _Row(index, query, position, length, first)


def _shared_runs(
    rows: Sequence[_Row], table: Tensor, block_size: int, min_shared: int | None
) -> tuple[list[tuple[list[_Row], int, int]], dict[int, int]]:
    """The runs of full blocks that rows share, as (rows, first block, stop); and by row the first block of its tail."""
    tails = {row.number: row.first for row in rows}
    runs: list[tuple[list[_Row], int, int]] = []
    if min_shared is None:
        return runs, tails
    # Rows that still agree, the first block that none of their runs has, and the block where they were compared last.
    agreeing = [(group, group[0].first, group[0].first) for group in _split(rows, table, block_size)]
    while agreeing:
        group, start, at = agreeing.pop()
        stop = min(row.length // block_size for row in group)
        blocks = table[[row.number for row in group], at:stop]
        if (different := (blocks != blocks[0]).any(0)).any():
            stop = at + int(different.int().argmax())
        if (stop - start) * block_size * (len(group) - 1) >= min_shared:
            runs.append((group, start, stop))
            start = stop
            tails.update((row.number, start) for row in group)
        agreeing += [(part, start, stop) for part in _split(group, table, block_size, stop)]
    return runs, tails


def _split(rows: Sequence[_Row], table: Tensor, block_size: int, at: int | None = None) -> list[list[_Row]]:
    """The rows by the full block they have at this place (by default the first they see), where several have the same."""
    groups = defaultdict(list)
    for row in rows:
        place = row.first if at is None else at
        if place < row.length // block_size:
            groups[place, int(table[row.number, place])].append(row)
    return [group for group in groups.values() if len(group) > 1]


class _Planner:
    def __init__(self, table: Tensor, block_size: int, window: int | None, device: torch.device | str) -> None:
        self._table, self._block_size, self._window, self._device = table, block_size, window, device

    def run(self, rows: Sequence[_Row], start: int, stop: int) -> Iterator[Part]:
        """All queries of these rows over the blocks ``start`` to ``stop`` of their tables, which are the same."""
        # The table's entries are positions here: the rows of the group are equal in them.
        counts = torch.tensor([row.length - row.position for row in rows])
        within = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        queries = torch.tensor([row.query for row in rows]).repeat_interleave(counts) + within
        positions = torch.tensor([row.position for row in rows]).repeat_interleave(counts) + within
        keys = torch.arange(start * self._block_size, stop * self._block_size)[None]
        slots = self._slots(torch.tensor([rows[0].number]), keys)
        width = max(_MIN_QUERIES, _SCORES // keys.shape[1])
        for some, where in zip(queries.split(width), positions.split(width), strict=True):
            yield self._part(some[None], slots, self._visible(where[None], keys), whole=False)

    def tails(self, rows: Sequence[_Row], tails: dict[int, int]) -> Iterator[Part]:
        """Each row's queries over its own blocks, from block ``tails[row]`` on."""
        # Rows of about one length together: padding them costs at most as much again.
        alike = defaultdict(list)
        for row in rows:
            for chunk, count in self._chunks(row, tails[row.number] * self._block_size):
                causal = chunk.key == chunk.position and (self._window is None or chunk.keys <= self._window)
                whole = tails[row.number] == row.first
                alike[count, chunk.keys.bit_length(), causal, whole].append(chunk)
        for (count, _, causal, whole), chunks in alike.items():
            groups = max(1, _SCORES // (count * max(chunk.keys for chunk in chunks)))
            for place in range(0, len(chunks), groups):
                yield self._tail(chunks[place : place + groups], count, causal, whole)

    def _chunks(self, row: _Row, key: int) -> Iterator[tuple[_Chunk, int]]:
        width = max(_MIN_QUERIES, _SCORES // row.length)
        for position in range(row.position, row.length, width):
            stop = min(position + width, row.length)
            first = key if self._window is None else max(key, position - self._window + 1)
            if first < stop:
                place = row.query + position - row.position
                yield _Chunk(row.number, place, position, first, stop - first), stop - position

    def _tail(self, chunks: Sequence[_Chunk], count: int, causal: bool, whole: bool) -> Part:
        rows, query, position, key, lengths = torch.tensor(chunks).T[:, :, None]
        steps = torch.arange(count)
        keys = key + torch.arange(int(lengths.max()))
        # A shorter row's padding reads its last token again: a slot that is not its own may hold anything, also NaN.
        slots = self._slots(rows[:, 0], torch.minimum(keys, key + lengths - 1))
        visible = None if causal else self._visible(position + steps, keys)
        return self._part(query + steps, slots, visible, causal=causal, whole=whole)

    def _slots(self, rows: Tensor, keys: Tensor) -> Tensor:
        blocks = self._table[rows].gather(1, keys // self._block_size)
        return blocks * self._block_size + keys % self._block_size

    def _visible(self, positions: Tensor, keys: Tensor) -> Tensor | None:
        """Whether the queries at ``positions`` [G, M] see ``keys`` [G, T]; ``None`` where all see all."""
        distance = positions[:, :, None] - keys[:, None, :]
        visible = distance >= 0
        if self._window is not None:
            visible &= distance < self._window
        return None if visible.all() else visible

    def _part(
        self, queries: Tensor, slots: Tensor, visible: Tensor | None, *, causal: bool = False, whole: bool
    ) -> Part:
        place: Tensor | slice = slots.to(self._device)
        if slots.shape[0] == 1 and bool((slots.diff() == 1).all()):
            place = slice(int(slots[0, 0]), int(slots[0, -1]) + 1)
        visible = None if visible is None else visible.to(self._device)
        return Part(queries.to(self._device), place, visible, causal, whole)


def plan_tree(
    block_table: Tensor, lengths: Tensor, query_start: Tensor, tree: Tree, *, block_size: int, device: torch.device
) -> list[Part]:
    """As :func:`plan_parts` for new tokens that are trees: a part a row."""
    table, words = block_table.to("cpu", torch.int64), tree.ancestors.cpu()
    parts = []
    for row in _rows(lengths.tolist(), query_start.tolist(), block_size, None):
        queries = torch.arange(row.query, row.query + row.length - row.position)
        token = torch.arange(row.length)
        after = token - row.position
        bits = words[queries][:, after.clamp(min=0) // 32] >> after.clamp(min=0) % 32 & 1
        visible = (token <= row.position + torch.arange(len(queries))[:, None]) & ((after < 0) | (bits != 0))
        slots = table[row.number, token // block_size] * block_size + token % block_size
        placed = [part[None].to(device) for part in (queries, slots, visible)]
        parts.append(Part(placed[0], placed[1], placed[2], causal=False, whole=True))
    return parts
