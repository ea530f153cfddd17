"""What attention is given of the blocks: a rectangle of K/V, kept from step to step while the same rows grow together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decodekit.cache.blocks import BlockTable
from decodekit.cache.storage import KVStore

_SPARE = 64
"""Fewest columns that a rectangle has to spare when it is made; a long one has an eighth of its own."""


def room(columns: int) -> int:
    """How many columns a rectangle has when it is made for so many."""
    return columns + max(_SPARE, columns // 8)


class Rectangle:
    """The columns of K/V that the layers of one cache group see, the last token of each row in the last.

    A step of the same rows in the same order, each as long as the step before left it, finds all columns but its own in
    place: written tokens never change, and the pads of rows that grow alike stay where they are. It adds its columns, over
    those of tokens that were taken back from all rows alike; any other step gathers all of them. They are kept from the second
    step in a row on, so that rows which change in every step (beams) have no K/V twice. Columns that a window has passed go
    when there is no room left, and all are made anew.

    Args:
        keeps: whether to keep any; for blocks that are quantized it would undo what that saves.
    """

    _tables: Sequence[BlockTable]
    _ends: list[int]
    _kept: dict[int, list[Tensor]]
    _origin: int
    _room: int
    _adds: bool
    _seen: slice

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self.clear()

    def clear(self) -> None:
        """Keep nothing."""
        # One call: an interrupt comes before or after it.
        vars(self).update(_tables=(), _ends=[], _kept={}, _origin=0, _room=0, _adds=False, _seen=slice(0))

    def settle(self) -> None:
        """Follow rows that all went back by as many tokens; let go of those that are over, or went back otherwise."""
        dropped = {end - table.committed for table, end in zip(self._tables, self._ends, strict=True)}
        if dropped <= {0}:
            return
        back, *others = dropped
        if others or not 0 < back < self._seen.stop:
            self.clear()
            return
        ends = [end - back for end in self._ends]
        vars(self).update(_ends=ends, _seen=slice(self._seen.start, self._seen.stop - back))

    def begin(self, tables: Sequence[BlockTable], lengths: Sequence[int], query_length: int, first: int) -> int | None:
        """A step begins.

        Args:
            tables: [R] of its rows.
            lengths: [R] cached tokens, less the row's pads among the new columns.
            query_length: q, new columns.
            first: the first token of the longest row that its queries see; where it is, is the first column.

        Returns:
            how many columns to gather behind all those that the queries see; ``None``: gather the new ones alone.
        """
        same = len(tables) == len(self._tables) and all(a is b for a, b in zip(tables, self._tables, strict=True))
        goes_on, stop = same and lengths == self._ends, max(lengths) + query_length
        self._adds, spare = goes_on and self._origin <= first and stop - self._origin <= self._room, None
        if not self._adds:
            self.clear()
            self._origin = first
            self._room = room(stop - first) if goes_on and self._keeps else 0
            spare = max(self._room - (stop - first), 0)
        vars(self).update(_tables=tables, _ends=[length + query_length for length in lengths])
        self._seen = slice(first - self._origin, stop - self._origin)
        return spare

    def read(self, layer: int, store: KVStore, slots: Tensor, new: Sequence[Tensor]) -> list[Tensor]:
        """What a layer's queries see, as the store gathers it: views that are not to be edited.

        Args:
            layer: its number.
            store: its K/V, the new ones among them.
            slots: [R, ...] of the columns that :meth:`begin` said to gather.
            new: the new columns as the store would gather them, rounded as it rounds them.
        """
        if self._adds:
            kept, count = self._kept[layer], new[0].shape[2]
            for own, part in zip(kept, new, strict=True):
                own.narrow(2, self._seen.stop - count, count).copy_(part)
        else:
            with torch.inference_mode(False):  # later steps write into it, in whatever mode they are
                kept = store.gather(slots)
            if self._room:
                self._kept[layer] = kept
        return [own.narrow(2, self._seen.start, self._seen.stop - self._seen.start) for own in kept]

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(part.nbytes for kept in self._kept.values() for part in kept)
