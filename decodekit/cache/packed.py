"""One step of rows with any numbers of new tokens, packed into one row, at fixed addresses: what a captured graph works on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from decodekit.cache.attention import Layout
from decodekit.cache.fixed import FixedLayout, FixedStep
from decodekit.cache.steps import Step
from decodekit.kernels.paged_attention import Work, WorkShape, plan_work

if TYPE_CHECKING:
    from decodekit.cache.paged import PagedCache


class PackedPlan:
    """What a packed step asks of a frame of N tokens: those that fill it up belong to a row that has none.

    Args:
        cache: the cache.
        step: begun, with ``packed``.
        tokens: N.

    Attributes:
        step: the same.
        works: of each cache group, on the host.
        lengths: [N] int64, of each row with its new tokens; there are N rows, as many as there can be.
        query_start: [N + 1] int64.
    """

    def __init__(self, cache: PagedCache, step: Step, tokens: int) -> None:
        assert step.counts is not None, "nobody named the tokens of the step"
        self.step, pads = step, tokens - len(step.rows)
        own = [length + count for length, count in zip(step.lengths, step.counts, strict=True)]
        self.lengths = torch.tensor([*own, *[0] * pads])
        self.query_start = torch.tensor([0, *itertools.accumulate(step.counts), *[tokens] * pads])
        self.works: list[Work] = []
        for number, group in enumerate(cache.groups):
            table = group.block_table([row.tables[number] for row in step.rows])
            table = torch.cat([table, table.new_zeros(pads, table.shape[1])])
            self.works.append(
                plan_work(
                    table,
                    self.lengths,
                    self.query_start,
                    block_size=group.pool.block_size,
                    group=cache.heads_a_kv_head,
                    window=group.window,
                    device="cpu",
                )
            )


class PackedFrame(FixedStep):
    """The tensors of a forward of N tokens, one row's after another's.

    Args:
        cache: their cache, which has room for all its blocks from the start.
        tokens: N.
        shapes: of the plan of each cache group.
    """

    def __init__(self, cache: PagedCache, tokens: int, shapes: Sequence[WorkShape]) -> None:
        super().__init__(cache, shapes)
        self.last = tokens
        with torch.inference_mode(False):
            # Tokens, their positions, and the slots of each cache group: one copy to the device.
            self._fed = torch.zeros(2 + len(self.shapes), tokens, dtype=torch.int64, device=cache.device)
        self._slots = [*self._fed[2:]]
        if self._fixed:
            self._layouts = [
                FixedLayout(fixed.work, self._fed[1], group.pool.block_size, group.window)
                for group, fixed in zip(cache.groups, self._works, strict=True)
            ]

    def load(self, plan: PackedPlan) -> None:
        """Take the tokens of a step whose plan fits."""
        step, fed = plan.step, torch.zeros(self._fed.shape, dtype=torch.int64, pin_memory=self._fed.is_cuda)
        tokens = [token for own in step.tokens or () for token in own]
        used = slice(len(tokens))
        fed[0, used] = torch.tensor(tokens)
        fed[1, used] = torch.cat(step.places())
        fed[2:] = -1  # nothing is stored of tokens that are nobody's
        for slots, own in zip(fed[2:], step.slots, strict=True):
            slots[used] = own.on(fed.device)[0]
        self._fed.copy_(fed, non_blocking=True)
        for fixed, work in zip(self._works, plan.works, strict=True):
            fixed.load(work)
        if not self._fixed:
            self._layouts = [
                Layout(fixed.work.table, plan.lengths, plan.query_start, group.pool.block_size, group.window)
                for group, fixed in zip(self._cache.groups, self._works, strict=True)
            ]

    @property
    @override
    def input_ids(self) -> Tensor:
        return self._fed[:1]

    @property
    @override
    def position_ids(self) -> Tensor:
        return self._fed[1:2]
