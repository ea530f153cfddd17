"""Captured forwards over a cache: which of them serves the rows at hand, and when another is captured."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from decodekit.cache.fixed import FixedStep, bucket
from decodekit.cache.packed import PackedFrame, PackedPlan
from decodekit.cache.runs import Frame, Run
from decodekit.core.types import BranchOutputs
from decodekit.kernels.paged_attention import WorkShape
from decodekit.runtime.capture import GraphStats, capture, captures, look

if TYPE_CHECKING:
    from decodekit.cache.paged import PagedCache
    from decodekit.runtime.places import PlacedSession

_MOST_LENT = 4
"""How many times as many tokens a forward may have as another that would do."""


class Forward:
    """A forward of the tokens in a frame, captured where graphs are.

    Args:
        session: whose model and cache.
        frame: what it reads.
    """

    def __init__(self, session: PlacedSession, frame: FixedStep) -> None:
        self.session, self.frame = session, frame
        self._outputs: BranchOutputs | None = None
        self._graph: Any = None

    @property
    def outputs(self) -> BranchOutputs:
        """Of all its tokens, overwritten by every launch."""
        assert self._outputs is not None, "nothing was forwarded"
        return self._outputs

    @torch.no_grad()
    def __call__(self) -> None:
        """What a graph holds."""
        self._outputs = self.session.framed(self.frame)

    def capture(self, stats: GraphStats) -> None:
        """Put it into a graph, where graphs are."""
        if captures(self.session.cache.device):
            self._graph = capture(self, stats)
            # Only a replay fills it: what lies there may be anything.
            self.outputs.blank()
        stats.forward_captures += 1

    @property
    def captured(self) -> bool:
        """Whether a graph holds it."""
        return self._graph is not None

    def launch(self) -> None:
        """Forward the tokens that the frame holds."""
        if self._graph is None:
            self()
        else:
            self._graph.replay()


class RunForward(Forward):
    """One token of each row, step after step."""

    frame: Frame
    _run: Run | None = None
    _lent_for: Hashable = None

    def lend(self, key: Hashable) -> RunForward:
        """Take the next run's steps for rows so few that another forward, of this key, would do: they are counted."""
        self._lent_for = key
        return self

    @property
    def lent(self) -> bool:
        """Whether it takes the steps of fewer rows, for now."""
        return self._lent_for is not None

    def load(self, run: Run) -> None:
        """Begin the steps of a run."""
        self._run = run
        self.frame.load(run)

    def extend(self, steps: int) -> bool:
        """Plan more steps of the run, of which all are launched; whether there is room for them here.

        Raises:
            OutOfBlocks: there are no blocks for them.
        """
        assert self._run is not None, "no run was begun"
        assert self._run.launched == self._run.steps, "the plan is for steps that are not launched yet"
        self._run.extend(steps)
        if not _holds(self.frame.shapes, [WorkShape.of(plan) for plan in self._run.plan(self.frame.rows)]):
            return False
        self.frame.renew(self._run)
        return True

    def launch(self) -> None:
        """Forward the tokens that the frame holds."""
        assert self._run is not None, "no run was begun"
        self._run.launched += 1
        if self.lent:
            self.session.cache.lent[self._lent_for] += 1
        super().launch()


class PackedForward(Forward):
    """Any tokens of some rows, once."""

    frame: PackedFrame


def forward_of(session: PlacedSession, run: Run, most: int, stats: GraphStats, lent: int = 0) -> RunForward:
    """A forward that serves a run, captured where graphs are.

    Args:
        session: whose rows they are.
        run: the run.
        most: tokens that its longest row may get to have.
        stats: is told of captures.
        lent: steps that a forward of more rows takes before one is captured for so few.
    """
    cache, rows = session.cache, bucket(len(run.rows), session.cache.device)
    key = *key_of(session), rows
    shapes = [WorkShape.of(plan) for plan in run.plan(rows)]
    if (forward := _serving(cache.captured.get(key, ()), shapes)) is not None:
        return forward.lend(None)
    if cache.lent[key] < lent:
        for size in _larger(cache, key):
            needed = [WorkShape.of(plan) for plan in run.plan(size)]
            if (forward := _serving(cache.captured[*key[:-1], size], needed)) is not None:
                return forward.lend(key)
    now = max(row.length for row in run.rows) + run.steps
    forward = RunForward(session, Frame(cache, rows, _roomy(cache, shapes, now, max(now, most))))
    if captures(cache.device):
        forward.load(run)
    forward.capture(stats)
    _keep(cache, key, forward)
    return forward


def packed_forward_of(
    session: PlacedSession, plan: PackedPlan, key: tuple[Any, ...], stats: GraphStats, wait: int = 0
) -> PackedForward:
    """A forward that takes a packed step, which is in its frame then.

    Args:
        session: whose rows they are.
        plan: of the step.
        key: what tells such forwards apart; ends with the tokens of one.
        stats: is told of captures.
        wait: steps that are launched operation by operation before one is captured.
    """
    cache, tokens = session.cache, key[-1]
    shapes = [WorkShape.of(work) for work in plan.works]
    known = cache.captured.get(key, ())
    if (forward := _serving(known, shapes)) is None:
        for other in known:
            shapes = [mine.joined(its) for mine, its in zip(shapes, other.frame.shapes, strict=True)]
        # Any of the tokens may have parts that are merged, or be nobody's.
        shapes = [own._replace(merges=max(own.merges, tokens)) for own in shapes]
        now = int(plan.lengths.max())
        forward = PackedForward(session, PackedFrame(cache, tokens, _roomy(cache, shapes, now, 2 * now)))
        forward.frame.load(plan)
        if known or cache.lent[key] >= wait:
            forward.capture(stats)
            _keep(cache, key, forward)
        cache.lent[key] += 1
    forward.frame.load(plan)
    return forward


def key_of(session: PlacedSession) -> tuple[Hashable, ...]:
    """What tells forwards of a session's model and layers apart; those of models that are no more are let go of."""
    # Where modules may change what they compute, every session has forwards of its own.
    found = look(session.model)
    model = found.number, id(session) if found.from_elsewhere else None
    for stale in [other for other in session.cache.captured if other[0] != model]:
        del session.cache.captured[stale]
        session.cache.lent.clear()
    return model, session.layers


_Kind = TypeVar("_Kind", bound=Forward)


def _serving(forwards: Iterable[_Kind], shapes: Sequence[WorkShape]) -> _Kind | None:
    return next((own for own in forwards if _holds(own.frame.shapes, shapes)), None)


def _larger(cache: PagedCache, key: tuple[Any, ...]) -> Iterator[int]:
    """Tokens of captured forwards that have somewhat more of them than the one of this key, the fewest first."""
    *kind, least = key
    return iter(sorted(n for *own, n in cache.captured if own == kind and least < n <= _MOST_LENT * least))


def _roomy(cache: PagedCache, shapes: Sequence[WorkShape], now: int, most: int) -> list[WorkShape]:
    """Room for plans of rows that grow from ``now`` to ``most`` tokens."""
    blocks = [-(-most // group.pool.block_size) for group in cache.groups]
    growth = min(2.0, most / now)
    return [shape.roomy(max(count, shape.blocks), growth) for shape, count in zip(shapes, blocks, strict=True)]


def _keep(cache: PagedCache, key: Hashable, forward: Forward) -> None:
    """It serves whom those served that have less room."""
    kept = [own for own in cache.captured.get(key, ()) if not _holds(forward.frame.shapes, own.frame.shapes)]
    cache.captured[key] = [*kept, forward]


def _holds(roomy: Sequence[WorkShape], shapes: Sequence[WorkShape]) -> bool:
    return all(mine.holds(its) for mine, its in zip(roomy, shapes, strict=True))
