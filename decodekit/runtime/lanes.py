"""The lanes of an engine: found for requests that agree, made for others, and let go of when nobody has used them for long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from decodekit.runtime.call import make_lane, speculate, steps_of
from decodekit.runtime.graphs import Graphs
from decodekit.runtime.intake import Intake
from decodekit.runtime.lane import Lane
from decodekit.runtime.paged_session import PagedSession
from decodekit.runtime.processors import OptionStep
from decodekit.runtime.work import Work

_KEPT = 16
"""Lanes without requests that are kept: their drafters have learned something."""


_LENT = 64
"""Steps that graphs of more rows take before one is captured for fewer, which takes as long as these save. Requests that came
together end one after another, so that each number of rows lasts for a step or two."""


@dataclass(eq=False)
class _Known:
    """A lane, what its requests agree in, what takes its steps from graphs, and how many it has, queued ones too."""

    kind: Any
    steps: list[str]
    lane: Lane
    graphs: Graphs
    requests: int = 0


class Lanes:
    """All lanes.

    Args:
        intake: tells which requests agree.
        sessions: what runs the branches, one a model.
        new_row: gives a number that no row of the sessions has had.
        tokens: most tokens that all rows hold together.
    """

    def __init__(
        self, intake: Intake, sessions: Sequence[PagedSession], new_row: Callable[[], int], tokens: int
    ) -> None:
        self._intake, self._sessions, self._new_row, self._tokens = intake, sessions, new_row, tokens
        self._known: list[_Known] = []

    @property
    def all(self) -> list[Lane]:
        """Every lane, the last used at the end."""
        return [known.lane for known in self._known]

    def enter(self, work: Work) -> Lane:
        """The lane of a request, which it enters."""
        model, kind = self._intake.model, self._intake.kind(work)
        steps = steps_of(model, work)
        names = [name for name, _ in steps]
        known = next((own for own in self._known if own.kind == kind and own.steps == names), None)
        if known is None:
            lane = make_lane(model, work, self._sessions, self._new_row, steps=steps, confines=Exception)
            graphs = self._graphs(lane)
            if graphs.stats.eager is not None:
                speculate(lane, model, work.given, self._sessions, self._tokens, grows=True)
            known = _Known(kind, names, lane, graphs)
        else:
            self._known.remove(known)
            for (_, mine), (_, new) in zip(known.lane.pipeline.steps, steps, strict=True):
                if isinstance(mine, OptionStep) and isinstance(new, OptionStep):
                    mine.processors |= new.processors
        known.requests += 1
        self._known.append(known)
        self._sweep()
        return known.lane

    def graphs(self, lane: Lane) -> Graphs:
        """What takes the steps of a lane from graphs, as far as they can."""
        return next(own.graphs for own in self._known if own.lane is lane)

    def renew_graphs(self) -> None:
        """There are other sessions than before."""
        for known in self._known:
            known.graphs = self._graphs(known.lane)

    def _graphs(self, lane: Lane) -> Graphs:
        # Drafts of one request come while another has none.
        return Graphs(self._sessions, lane, watched="drafts" if lane.plan.drafter is not None else None, lent=_LENT)

    def leave(self, lane: Lane, rows: Sequence[int]) -> None:
        """A request is over, with these rows of its prompts."""
        known = next(own for own in self._known if own.lane is lane)
        known.requests -= 1
        for _, step in lane.pipeline.steps:
            if isinstance(step, OptionStep):
                for row in rows:
                    step.processors.pop(row, None)

    def clear(self) -> None:
        """Let go of all."""
        for lane in self.all:
            if lane.speculation is not None:
                lane.speculation.close()
        self._known = []

    def _sweep(self) -> None:
        idle = [own for own in self._known if not own.requests and not own.lane.holds]
        for own in idle[: max(0, len(idle) - _KEPT)]:
            self._known.remove(own)
            if own.lane.speculation is not None:
                own.lane.speculation.close()
