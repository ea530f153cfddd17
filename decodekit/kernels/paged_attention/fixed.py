"""A plan at fixed addresses: what a captured graph reads, step after step, while its content is renewed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decodekit.kernels.paged_attention.work import COLUMNS, Work


class WorkShape(NamedTuple):
    """How much of everything a plan has, or has room for; see :class:`Work`."""

    rows: int
    blocks: int
    items: tuple[tuple[int, int], ...]
    members: int
    merges: int
    num_parts: int

    @classmethod
    def of(cls, work: Work) -> WorkShape:
        """What this plan has."""
        rows, blocks = work.table.shape
        items = tuple((tile, len(own)) for tile, own in work.items)
        return WorkShape(rows, blocks, items, len(work.members), len(work.merges), work.num_parts)

    def roomy(self, blocks: int, growth: float = 1.0) -> WorkShape:
        """Room for this and somewhat more, so that plans of about this size have the same.

        Args:
            blocks: columns of the table.
            growth: room for so many times the items and parts.
        """
        items = tuple((tile, _round(int(count * growth))) for tile, count in self.items)
        more = (_round(int(count * growth)) for count in (self.members, self.num_parts))
        return WorkShape(self.rows, blocks, items, next(more), _round(self.merges), next(more))

    def joined(self, other: WorkShape) -> WorkShape:
        """Room for either, of as many rows."""
        tiles = sorted({*dict(self.items), *dict(other.items)})
        items = tuple((tile, max(dict(own.items).get(tile, 0) for own in (self, other))) for tile in tiles)
        blocks, *more = (max(pair) for pair in zip((self.blocks, *self[3:]), (other.blocks, *other[3:]), strict=True))
        return WorkShape(self.rows, blocks, items, *more)

    def holds(self, other: WorkShape) -> bool:
        """Whether there is room for the other."""
        room = dict(self.items)
        return (
            self.rows == other.rows
            and all(room.get(tile, 0) >= count for tile, count in other.items)
            and all(mine >= its for mine, its in zip(self[3:], other[3:], strict=True))
            and self.blocks >= other.blocks
        )


class FixedWork:
    """Room for plans of one shape.

    Args:
        shape: the most that a plan has.
        group: query heads a K/V head.
        device: where the kernel runs.

    Attributes:
        work: what the kernel is given; what is not filled has no effect.
    """

    def __init__(self, shape: WorkShape, group: int, device: torch.device) -> None:
        self.shape = shape
        sizes = [shape.rows * shape.blocks, *(COLUMNS * count for _, count in shape.items)]
        sizes += [3 * shape.members, 3 * shape.merges, 1]
        self._flat = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        table, *items, members, merges, grown = self._flat.split(sizes)
        self.work = Work(
            table.view(shape.rows, shape.blocks),
            tuple((tile, part.view(-1, COLUMNS)) for (tile, _), part in zip(shape.items, items, strict=True)),
            members.view(-1, 3),
            merges.view(-1, 3),
            shape.num_parts,
            group,
            grown,
        )

    def load(self, work: Work) -> None:
        """Take a plan that fits, made on the host; its rows have got no more tokens yet."""
        flat = torch.zeros(self._flat.shape, dtype=torch.int32, pin_memory=self._flat.is_cuda)
        table, *items, members, merges, _ = flat.split([part.numel() for part in self._parts()])
        table.view(self.shape.rows, -1)[:, : work.table.shape[1]] = work.table
        own = dict(work.items)
        for (tile, _), part in zip(self.shape.items, items, strict=True):
            if tile in own:
                part[: own[tile].numel()] = own[tile].flatten()
        members[: work.members.numel()] = work.members.flatten()
        merges.fill_(-1)
        merges[: work.merges.numel()] = work.merges.flatten()
        self._flat.copy_(flat, non_blocking=True)

    def _parts(self) -> list[Tensor]:
        work = self.work
        assert work.grown is not None
        return [work.table, *(items for _, items in work.items), work.members, work.merges, work.grown]


def _round(count: int) -> int:
    """At least ``count``, with two significant bits beside the first."""
    step = 1 << max(count.bit_length() - 3, 0)
    return -(-count // step) * step
