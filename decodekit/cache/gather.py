"""Where a step writes and reads: the slots of all its rows, the shorter ones padded on the left.

They are computed once a step for all layers that share block tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decodekit.cache.blocks import BlockPool, BlockTable
from decodekit.cache.streaming import Stream, Turn


class Slots:
    """The slots of one step in one cache group.

    Args:
        columns: [R, T] int64, the last ``query_length`` of them new; on the host.
        query_length: new tokens a row, pads included.
        counts: [R] new tokens a row, without pads.
        turn: moves the keys that are read to their positions; ``None`` where they are there.

    Attributes:
        run: first and last slot but one, where all slots of an only row follow each other: they can be read in place.
    """

    def __init__(self, columns: Tensor, query_length: int, counts: Sequence[int], turn: Turn | None = None) -> None:
        self._columns, self._query_length, self._counts = columns, query_length, counts
        self.turn = turn
        first = int(columns[0, 0])
        alone = len(columns) == 1 and bool((columns[0] == torch.arange(first, first + columns.shape[1])).all())
        self.run = (first, first + columns.shape[1]) if alone else None
        self._on: dict[torch.device, tuple[Tensor, Tensor, Tensor | None]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """Slots to write, [N], slots to read, [R, T], and which of the R * q new columns are written (``None``: all)."""
        if (slots := self._on.get(device)) is None:
            columns = self._columns.to(device)
            new, chosen = columns[:, columns.shape[1] - self._query_length :].flatten(), None
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
        stream: what the cache keeps of a row in layers without a window.
        frequencies: [n] of the layers' rotary embedding, for a stream.

    Attributes:
        pool: their blocks.
        window: tokens a query sees, sinks apart; ``None`` for all.
        sinks: first tokens that every query sees.
    """

    def __init__(
        self,
        layers: Sequence[int],
        num_blocks: int,
        block_size: int,
        window: int | None,
        stream: Stream | None = None,
        frequencies: Tensor | None = None,
    ) -> None:
        self.layers, self.window, self.sinks = tuple(layers), window, 0
        # The pool is not told of a stream's window: its prompts go on from prefixes of which every block is there.
        self._size, self._own_window = (num_blocks, block_size), window
        if stream is not None and window is None:
            self.window, self.sinks = stream.window, stream.sinks
        self._stream, self._frequencies = stream, frequencies
        self._listed: list[list[int | None]] = []
        self._blocks = torch.empty(0)
        self.renew(prefix_cache=False)

    def renew(self, *, prefix_cache: bool) -> None:
        """An empty pool in place of the old one."""
        self.pool = BlockPool(*self._size, prefix_cache=prefix_cache, window=self._own_window)

    def first_needed(self, length: int) -> int:
        """The first token that a query after ``length`` tokens sees, sinks apart."""
        return 0 if self.window is None else max(length - self.window + 1, 0)

    def cached_columns(self, longest: int) -> int:
        """How many cached tokens a query sees whose row has ``longest``."""
        return longest - max(self.first_needed(longest) - self.sinks, 0)

    def slots(
        self, tables: Sequence[BlockTable], lengths: Sequence[int], query_length: int, counts: Sequence[int]
    ) -> Slots:
        """The slots of a step.

        Args:
            tables: [R] with room for the new tokens.
            lengths: [R] cached tokens, less the row's pads among the new columns.
            query_length: new columns a row.
            counts: [R] new tokens a row.
        """
        size, columns = self.pool.block_size, self.cached_columns(max(lengths)) + query_length
        first = torch.tensor(lengths).unsqueeze(1) + (query_length - columns)
        # A pad reads the row's own first token: whatever another row holds, even NaN, never gets near.
        positions = (torch.arange(columns) + first).clamp_(min=0)
        if self.sinks:
            positions[:, : self.sinks] = torch.where(
                first > 0, torch.arange(min(self.sinks, columns)), positions[:, : self.sinks]
            )
        blocks = self.block_table(tables).gather(1, positions // size)
        turn = self._turn(positions, torch.tensor(lengths).clamp_(min=0).unsqueeze(1))
        return Slots(blocks * size + positions % size, query_length, counts, turn)

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
