"""Many one-token forwards in a row, whose blocks are taken at once: what a captured graph works on.

A :class:`Frame` holds the tensors that such a forward reads, at addresses that never change; a :class:`Run` is the stretch of
steps that some rows take with it. In between the host does nothing: the forward itself counts its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from decodekit.cache.attention import Layout
from decodekit.cache.blocks import Copy
from decodekit.cache.fixed import FixedLayout, FixedStep
from decodekit.cache.rows import Row
from decodekit.cache.states import StateBatch, StateKey, collect, working_copy
from decodekit.cache.states import load as load_states
from decodekit.core.errors import InputError
from decodekit.kernels.paged_attention import Work, WorkShape, next_split, plan_work

if TYPE_CHECKING:
    from decodekit.cache.paged import PagedCache


class Frame(FixedStep):
    """The tensors of forwards of one token a row, R rows of one cache.

    Args:
        cache: their cache, which has room for all its blocks from the start.
        rows: R.
        shapes: of the plan of each cache group.

    Attributes:
        tokens: [R] int64, to be forwarded.
        lengths: [R] int64, tokens that each row had before; -1 where there is no row.
        used: rows that the run has.
    """

    def __init__(self, cache: PagedCache, rows: int, shapes: Sequence[WorkShape]) -> None:
        super().__init__(cache, shapes)
        self.rows, self.used, device = rows, 0, cache.device
        with torch.inference_mode(False):
            self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
            self.lengths = torch.full((rows,), -1, dtype=torch.int64, device=device)
        # Frames of so many rows share them: only one of them is in use.
        self._states: dict[StateKey, Tensor] = cache.frame_states.setdefault(rows, {})

    def load(self, run: Run) -> None:
        """Begin the steps of a run, which fits."""
        self.used = len(run.rows)
        pad = [-1] * (self.rows - self.used)
        self.lengths.copy_(_staged([*(row.length for row in run.rows), *pad], self.lengths))
        self.tokens.copy_(_staged([*run.tokens, *pad], self.tokens).clamp_(min=0))
        self.renew(run)
        run.frame = self
        for key, own in (working_copy([row.state for row in run.rows]) or {}).items():
            if key not in self._states:
                with torch.inference_mode(False):
                    self._states[key] = own.new_zeros(self.rows, *own.shape[1:])
            self._states[key][: self.used] = own

    def renew(self, run: Run) -> None:
        """Go on with a run that was extended, whose plan fits."""
        for fixed, plan in zip(self._works, run.plan(self.rows), strict=True):
            fixed.load(plan)

    def states(self, places: Sequence[int]) -> StateBatch | None:
        """A copy of the states of some rows; ``None`` where there are none."""
        return StateBatch(self._states, self.rows).take(places) if self._states else None

    @property
    @override
    def input_ids(self) -> Tensor:
        return self.tokens.unsqueeze(1)

    @property
    @override
    def position_ids(self) -> Tensor:
        return self.lengths.clamp(min=0).unsqueeze(1)

    @override
    def begin(self) -> None:
        """A forward begins: find the slots of its tokens, give the recurrent layers their states."""
        load_states(self._cache.layers, self._states or None)
        self._slots, self._layouts = [], []
        positions, there = self.lengths.clamp(min=0), self.lengths >= 0
        for group, fixed in zip(self._cache.groups, self._works, strict=True):
            size, table = group.pool.block_size, fixed.work.table
            block = table.gather(1, (positions // size).unsqueeze(1)).squeeze(1).long()
            self._slots.append(torch.where(there, block * size + positions % size, -1))
            if self._fixed:
                self._layouts.append(FixedLayout(fixed.work, self.lengths, size, group.window))
            else:
                starts = torch.arange(self.rows + 1)
                self._layouts.append(Layout(table.cpu(), self.lengths.cpu() + 1, starts, size, group.window))

    @override
    def end(self) -> None:
        """A forward is over: every row has a token more."""
        for key, own in collect(self._cache.layers, self.rows).tensors.items():
            if own.data_ptr() != self._states[key].data_ptr():  # kernels change it in place
                self._states[key].copy_(own)
        self.lengths.add_(self.lengths >= 0)
        for fixed in self._works:
            assert fixed.work.grown is not None
            fixed.work.grown.add_(1)


class Run:
    """A stretch of steps of some rows, with room for all its tokens; :meth:`finish` ends it.

    Args:
        cache: their cache.
        rows: [R] those that take part.
        tokens: [R] the first that each forwards.
        steps: how many to plan at first.

    Attributes:
        frame: what it is loaded into.
        steps: that there is room for; the plan is for those that came with the last :meth:`extend`.
        launched: forwards so far.

    Raises:
        OutOfBlocks: there is no room for all of it; nothing was taken.
    """

    def __init__(self, cache: PagedCache, rows: Sequence[Row], tokens: Sequence[int], steps: int) -> None:
        self._cache, self.rows, self.tokens, self.steps = cache, list(rows), list(tokens), steps
        self.frame: Frame | None = None
        self.launched = self._taken = 0
        # Steps before those that the plan is for.
        self._passed = 0
        self._copies: list[list[list[Copy]]] = []
        self._plans: dict[int, list[Work]] = {}
        try:
            for number, group in enumerate(cache.groups):
                tables = [row.tables[number] for row in rows]
                self._copies.append(group.pool.append_together(tables, steps))
                self._taken += 1
                group.rectangle.clear()
                cache.settle_copies(group, [copy for own in self._copies[-1] for copy in own])
        except BaseException:
            self.abort()
            raise

    def extend(self, steps: int) -> None:
        """Take room for more steps, and plan these instead of those before, which are launched already.

        Raises:
            OutOfBlocks: there is no room for them; what was launched can be finished.
        """
        for number, group in enumerate(self._cache.groups):
            group.pool.append_together([row.tables[number] for row in self.rows], steps)  # no row shares its last block
            self._cache.settle_copies(group, ())
        self._passed, self.steps = self.steps, self.steps + steps
        self._plans = {}

    def plan(self, rows: int) -> list[Work]:
        """For each cache group the plan of the steps to come, on the host; ``rows`` counts those that are filled up with."""
        if rows in self._plans:
            return self._plans[rows]
        pads = rows - len(self.rows)
        lengths = torch.tensor([*(row.length + self._passed + 1 for row in self.rows), *[0] * pads])
        plans = self._plans[rows] = []
        for number, group in enumerate(self._cache.groups):
            table = group.block_table([row.tables[number] for row in self.rows])
            table = torch.cat([table, table.new_zeros(pads, table.shape[1])])
            options: dict[str, Any] = {"group": self._cache.heads_a_kv_head, "window": group.window}
            options |= {"block_size": group.pool.block_size, "ahead": self.steps - self._passed - 1, "device": "cpu"}
            plans.append(plan_work(table, lengths, torch.arange(rows + 1), **options))
        return plans

    def finish(self, tokens: Sequence[Sequence[int]]) -> list[bool]:
        """The run is over.

        Args:
            tokens: [R] those that each row has forwarded and keeps; others that it forwarded are dropped.

        Returns:
            whether each row keeps them; where states have seen more, which cannot go back, it is as before the run.
        """
        if wrong := [len(own) for own in tokens if len(own) > self.steps]:
            raise InputError(f"rows of a run of {self.steps} steps have {wrong} tokens")
        kept = [not self._cache.keeps_states or len(own) == self.launched for own in tokens]
        self._cache.end_run(self, [list(own) if keep else [] for own, keep in zip(tokens, kept, strict=True)])
        return kept

    def abort(self) -> None:
        """Take everything back."""
        for number, group in enumerate(self._cache.groups[: self._taken]):
            for row, copied in zip(self.rows, self._copies[number], strict=True):
                group.pool.retract(row.tables[number], row.length, copied)


def most_steps(lengths: Sequence[int]) -> int | None:
    """How many steps rows of these lengths can take in one run; ``None``: any number.

    A run has one plan, so that no row may get to where its keys are cut at other places.
    """
    limits = [(split, length) for length in lengths if (split := next_split(length + 1)) is not None]
    return min((split - length - 1 for split, length in limits), default=None)


def _staged(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, pin_memory=like.is_cuda)
