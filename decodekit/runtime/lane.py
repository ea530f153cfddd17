"""Requests that are decoded the same way: one set of strategies, rules and drafter, and what a step asks for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from decodekit.core.drafts import Draft
from decodekit.core.errors import reason
from decodekit.core.types import BranchOutputs, Outputs
from decodekit.runtime.auditing import Auditor
from decodekit.runtime.choosing import Chooser, StepRecord, View, select_positions
from decodekit.runtime.pipeline import Pipeline
from decodekit.runtime.plan import Plan
from decodekit.runtime.scoring import Scoring
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.speculation import Fan, Settled, Speculation, Walk
from decodekit.runtime.tasks import SequenceTask, Task

Live = tuple[Task, SequenceState]
Parts = dict[str, BranchOutputs]


class Rearranged(NamedTuple):
    """Rows to fork (a new row, its parent), all that are needed, and those that no longer are."""

    forks: dict[int, int]
    kept: set[int]
    gone: set[int]


@dataclass(eq=False)
class Lane:
    """Requests whose recipes agree: forwarded with all others, scored and chosen for together.

    Attributes:
        plan: the strategies.
        pipeline: rules and pick.
        scorer: from outputs to scores.
        chooser: from scores to tokens.
        layers: hidden layers that are read.
        tasks: those that are being decoded.
        speculation: what drafts for them, if anything does.
        auditor: checks some of their steps, if any are to be.
    """

    plan: Plan
    pipeline: Pipeline
    scorer: Scoring
    chooser: Chooser
    layers: tuple[int, ...] = ()
    tasks: list[Task] = field(default_factory=list)
    speculation: Speculation | None = None
    auditor: Auditor | None = None
    _rows: set[int] = field(default_factory=set)

    @property
    def live(self) -> list[Live]:
        """Sequences that wait for a token, with their tasks."""
        return [(task, sequence) for task in self.tasks for sequence in task.live]

    @property
    def holds(self) -> bool:
        """Whether rows of requests that left it are yet to be let go of."""
        return bool(self._rows)

    def rearranged(self) -> Rearranged:
        """What was decided since the last forward."""
        kept = {sequence.row for task in self.tasks for sequence in task.held}
        change = Rearranged(self.chooser.keep(kept), kept, self._rows - kept)
        self._rows = kept
        return change


Room = Callable[[Lane, SequenceState], int]


class Turn:
    """What a step is for the requests of one lane.

    Args:
        lane: whose.
        held: rows that the sessions hold.

    Attributes:
        stepping: those that are fed the token that was chosen last, and drafts behind it.
        fresh: those whose prompts are to be prefilled.
        ready: candidates whose first token follows a prompt that was forwarded for all of them.
        drafts: of each that is stepping.
        fan: what is fed for these.
        live: [P] all that are chosen for, in the order of the outputs.
        outputs: at each of these, then after each node of its draft.
        seconds: that the forward took.
    """

    def __init__(self, lane: Lane, held: Collection[int]) -> None:
        self.lane = lane
        live = lane.live
        self.stepping = [own for own in live if own[1].row in held and own[1].tokens]
        self.fresh = [own for own in live if own[1].row not in held]
        self.ready = [own for own in live if own[1].row in held and not own[1].tokens]
        self.drafts: list[Draft] = []
        self.fan = Fan()
        self.live: list[Live] = []
        self.outputs = Outputs({})
        self.seconds = 0.0
        self._walks: list[Walk] = []

    def draft(self, room: Room | None = None) -> None:
        """Decide what is fed to the rows that are stepping.

        Args:
            room: a lane and a sequence of it to most tokens of its draft, besides its own limit.
        """
        sequences = [sequence for _, sequence in self.stepping]
        speculation = self.lane.speculation
        if speculation is None or not sequences:
            self.drafts = [Draft()] * len(sequences)
            self.fan = Fan([own.row for own in sequences], [[own.tokens[-1]] for own in sequences])
        else:
            rooms = None if room is None else [room(self.lane, own) for own in sequences]
            self.drafts = speculation.propose(sequences, rooms)
            self.fan = speculation.fan_out(sequences, self.drafts)

    def take(self, stepped: Parts, first: Parts, through: Collection[int], seconds: float) -> None:
        """Take what the forwards gave.

        Args:
            stepped: of the rows that were fed, at the ``last`` positions of each.
            first: of the fresh rows whose prompts are through, in order.
            through: which these are.
            seconds: that the forward took.
        """
        prefilled = [own for own in self.fresh if own[1].row in through]
        if prefilled and self.lane.speculation is not None:
            self.lane.speculation.prefilled([sequence for _, sequence in prefilled])
        parts = []
        if self.stepping:
            index = self.fan.index
            whole = not index or index == list(range(len(index)))
            parts.append(stepped if whole else dict(select_positions(Outputs(stepped), *index)))
        # One that was put aside begins anew with all that it had but its last token: that is fed next.
        places = [place for place, (_, sequence) in enumerate(prefilled) if not sequence.tokens]
        begun = [prefilled[place] for place in places]
        if begun:
            parts.append(first if len(begun) == len(prefilled) else dict(select_positions(Outputs(first), *places)))
        for task, _ in self.ready:
            assert isinstance(task, SequenceTask)
            assert task.outputs is not None
            parts.append(dict(task.outputs))
        self.live = [*self.stepping, *begun, *self.ready]
        self.drafts += [Draft()] * (len(self.live) - len(self.drafts))
        self.outputs = Outputs(joined(parts))
        self.seconds = seconds

    def choose(self, *, confined: bool = False) -> list[StepRecord]:
        """All tokens that the outputs give, a record for each that a live sequence gets.

        Args:
            confined: what fails for all, before any of them takes a token, is tried for each task by itself: those for which
                it fails end alone.
        """
        if not self.live:
            return []
        for task in dict.fromkeys(task for task, _ in self.live):
            task.steps += 1
        bases = [0, *itertools.accumulate(1 + len(draft) for draft in self.drafts)][:-1]
        self._walks = [
            Walk(*own, base, draft, goes_on=True)
            for own, base, draft in zip(self.live, bases, self.drafts, strict=True)
        ]
        records, scores = list[StepRecord](), self._score(confined)
        while going := [walk for walk in self._walks if walk.goes_on]:
            for walks, view in self._pick(going, scores, confined):
                records.append(self.lane.chooser.commit(walks, view))
        return records

    def _score(self, confined: bool) -> Tensor:
        """[P, V] after each sequence and each node of its draft."""
        try:
            return self.lane.scorer(self.outputs)
        except Exception:
            if not confined:
                raise
        order, parts = list[int](), list[Tensor]()
        for walks in _by_task(self._walks):
            index = [walk.base + node for walk in walks for node in range(1 + len(walk.draft))]
            outputs = select_positions(self.outputs, *index)
            try:
                parts.append(self.lane.scorer(outputs))
            except Exception as error:
                _fail(walks, error)
                parts.append(torch.zeros_like(outputs["main"].logits))
            order += index
        scores = torch.cat(parts)
        return torch.empty_like(scores).index_copy_(0, torch.tensor(order, device=scores.device), scores)

    def _pick(self, going: Sequence[Walk], scores: Tensor, confined: bool) -> list[tuple[Sequence[Walk], View]]:
        """What is picked where these sequences stand, for all at once or, where that fails, for each task by itself."""
        try:
            return [(going, self._pick_at(going, scores))]
        except Exception:
            if not confined:
                raise
        picked = list[tuple[Sequence[Walk], View]]()
        for walks in _by_task(going):
            try:
                picked.append((walks, self._pick_at(walks, scores)))
            except Exception as error:
                _fail(walks, error)
        return picked

    def _pick_at(self, walks: Sequence[Walk], scores: Tensor) -> View:
        lane, places = self.lane, [walk.place for walk in walks]
        whole = places == list(range(len(scores)))
        at = self.outputs if whole else select_positions(self.outputs, *places)
        if not whole:
            plain = scores is self.outputs["main"].logits
            scores = at["main"].logits if plain else scores[places]
        if lane.auditor is not None:
            lane.auditor.check([walk.sequence for walk in walks], at)
        return lane.chooser.pick(walks, at, scores)

    def settle(self, whole: float | None) -> Settled:
        """What was drafted and not accepted.

        Args:
            whole: seconds that the step took; ``None`` where that does not tell what others will take.
        """
        if self.lane.speculation is None or not self.stepping:
            return Settled()
        own = self._walks[: len(self.stepping)]
        return self.lane.speculation.settle(own, self.fan, self.outputs["main"], self.seconds, whole)


def _by_task(walks: Sequence[Walk]) -> list[list[Walk]]:
    """The walks of each task, in order."""
    own: dict[Task, list[Walk]] = {}
    for walk in walks:
        own.setdefault(walk.task, []).append(walk)
    return [*own.values()]


def _fail(walks: Sequence[Walk], error: Exception) -> None:
    """The task of these walks is over."""
    walks[0].task.fail(reason(error))
    for walk in walks:
        walk.goes_on = False


def joined(parts: Sequence[Parts]) -> Parts:
    """The positions of several outputs of the same branches, in order."""
    if len(parts) < 2:
        return parts[0] if parts else {}
    return {name: BranchOutputs.concatenate([part[name] for part in parts]) for name in parts[0]}


def merged(parts: Iterable[Parts]) -> Parts:
    """The branches of several sessions."""
    return {name: outputs for part in parts for name, outputs in part.items()}
