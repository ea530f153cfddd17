"""Where a step writes and reads: the slots of all its rows, the shorter ones padded on the left.

They are computed once a step for all layers that share block tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decodekit.cache.allocator import Host
from decodekit.cache.blocks import BlockPool, BlockTable
from decodekit.cache.rectangle import Rectangle
from decodekit.cache.streaming import Stream, Turn


class Slots:
    """The slots of one step in one cache group.

    Args:
        columns: [R, T + spare] int64, the last ``query_length`` of T new; on the host.
        query_length: new tokens a row, pads included.
        counts: [R] new tokens a row, without pads.
        spare: columns of room behind the new ones.
        turn: moves the keys that are read to their positions; ``None`` where they are there.
    """

    def __init__(
        self,
        columns: Tensor,
        query_length: int,
        counts: Sequence[int],
        spare: int = 0,
        turn: Turn | None = None,
    ) -> None:
        self._columns, self._query_length, self._counts, self._spare = columns, query_length, counts, spare
        self.turn = turn
        self._on: dict[torch.device, tuple[Tensor, Tensor, Tensor | None]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """Slots to write, [N], to read, [R, T + spare], and which of the R * q new columns are written (``None``: all)."""
        if (slots := self._on.get(device)) is None:
            columns = self._columns.to(device)
            stop = columns.shape[1] - self._spare
            new, chosen = columns[:, stop - self._query_length : stop].flatten(), None
            if min(self._counts) < self._query_length:
                place = torch.arange(self._query_length)
                pads = self._query_length - torch.tensor(self._counts)
                chosen = (place >= pads.unsqueeze(1)).flatten().nonzero().squeeze(1).to(device)
                new = new[chosen]
            slots = self._on[device] = new, columns, chosen
        return slots


class Group:
    """The layers of a model whose rows share block tables: those with full attention, or with one size of window.

    Args:
        layers: their numbers.
        num_blocks: blocks of the pool.
        block_size: tokens a block.
        window: tokens a query sees, itself included, of the layers' own; ``None`` for all.
        host: gets what evicted blocks hold.
        keeps: whether what was gathered may be kept for the next step; in a stream it never is, since keys move.
        stream: what the cache keeps of a row in layers without a window.
        frequencies: [n] of the layers' rotary embedding, for a stream.

    Attributes:
        pool: their blocks.
        window: tokens a query sees, sinks apart; ``None`` for all.
        sinks: first tokens that every query sees.
        rectangle: what was gathered of them.
        stored: blocks that the stores of its layers have room for.
    """

    def __init__(
        self,
        layers: Sequence[int],
        num_blocks: int,
        block_size: int,
        window: int | None,
        *,
        host: Host | None = None,
        keeps: bool = True,
        stream: Stream | None = None,
        frequencies: Tensor | None = None,
    ) -> None:
        self.layers, self.window, self.sinks, self._host = tuple(layers), window, 0, host
        # The pool is not told of a stream's window: its prompts go on from prefixes of which every block is there.
        self._size, self._own_window = (num_blocks, block_size), window
        if stream is not None and window is None:
            self.window, self.sinks = stream.window, stream.sinks
        self._stream, self._frequencies = stream, frequencies
        self.rectangle = Rectangle(keeps=keeps and stream is None)
        self.stored = 0
        self._listed: list[list[int | None]] = []
        self._blocks = torch.empty(0)
        self.renew(prefix_cache=False)

    def renew(self, *, prefix_cache: bool) -> None:
        """An empty pool in place of the old one."""
        self.pool = BlockPool(*self._size, prefix_cache=prefix_cache, window=self._own_window, host=self._host)

    def first_needed(self, length: int) -> int:
        """The first token that a query after ``length`` tokens sees, sinks apart."""
        return 0 if self.window is None else max(length - self.window + 1, 0)

    def cached_columns(self, longest: int) -> int:
        """How many cached tokens a query sees whose row has ``longest``."""
        return longest - max(self.first_needed(longest) - self.sinks, 0)

    def slots(
        self, tables: Sequence[BlockTable], lengths: Sequence[int], query_length: int, counts: Sequence[int]
    ) -> Slots:
        """The slots of a step: to write all that is new, to read what the rectangle lacks.

        Args:
            tables: [R] with room for the new tokens.
            lengths: [R] cached tokens, less the row's pads among the new columns.
            query_length: new columns a row.
            counts: [R] new tokens a row.
        """
        longest = max(lengths)
        cached = self.cached_columns(longest)
        spare = self.rectangle.begin(tables, lengths, query_length, longest - cached)
        ends = [length + query_length for length in lengths]
        if spare is None:
            new = [self.pool.slot_mapping(*row) for row in zip(tables, lengths, ends, strict=True)]
            return Slots(torch.tensor(new), query_length, counts)
        size, stops = self.pool.block_size, torch.tensor(ends).unsqueeze(1)
        # A pad reads the row's own first token: whatever another row holds, even NaN, never gets near.
        positions = torch.arange(-cached - query_length, spare) + stops
        positions = positions.clamp_(min=0).minimum(stops - 1)
        if self.sinks:
            dropped = stops > cached + query_length
            first = torch.arange(min(self.sinks, positions.shape[1]))
            positions[:, : self.sinks] = torch.where(dropped, first, positions[:, : self.sinks])
        blocks = self.block_table(tables).gather(1, positions // size)
        turn = self._turn(positions, torch.tensor(lengths).clamp_(min=0).unsqueeze(1))
        return Slots(blocks * size + positions % size, query_length, counts, spare, turn)

    def new_slots(self, tables: Sequence[BlockTable], positions: Sequence[Tensor]) -> Slots:
        """The slots of a packed step, which gathers nothing: of each row's new tokens, after each other.

        Args:
            tables: [R] with room for the new tokens.
            positions: [R] the places of the new tokens in each row.
        """
        size, table = self.pool.block_size, self.block_table(tables)
        slots = torch.cat([own[at // size] * size + at % size for own, at in zip(table, positions, strict=True)])
        return Slots(slots.unsqueeze(0), len(slots), [len(slots)])

    def _turn(self, tokens: Tensor, query: Tensor) -> Turn | None:
        if self._stream is None:
            return None
        assert self._frequencies is not None
        turns = self._stream.turns(tokens, query, self.sinks)
        return Turn(self._frequencies, turns) if turns.any() else None

    def block_table(self, tables: Sequence[BlockTable]) -> Tensor:
        """[R, blocks] of these rows, 0 where a window let go; made anew only when a table got another list of blocks."""
        lists = [table.blocks for table in tables]
        if len(lists) != len(self._listed) or any(new is not old for new, old in zip(lists, self._listed, strict=True)):
            width = max(map(len, lists))
            padded = [[block or 0 for block in blocks] + [0] * (width - len(blocks)) for blocks in lists]
            self._listed, self._blocks = lists, torch.tensor(padded)
        return self._blocks
