"""How many tokens to draft: what a pass costs against how many tokens it is likely to give."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from decodekit.core.drafts import Draft
from decodekit.core.protocols import Drafter
from decodekit.core.shared import PerModel

SMOOTHING = 0.1
"""Weight of a new measurement of seconds in a running mean."""

OUTLIER = 1.5
"""A measurement counts for at most so many times, and at least one such part, of what was expected: other processes run too."""

MEMORY = 0.96
"""What a hit or miss weighs after each further one of its kind."""

PROBE = 32
"""Passes after which what was given up is tried again at the earliest, be it drafts or passes without."""

SHARE = 0.0025
"""Of the time of all passes, what looking at drafts may take where none pays, and what trying them all the same may lose."""

RESTS = 16
"""Passes in a row without drafts after which not every pass looks at some."""

MARGIN = 1.04
"""How much better than none drafts must look: those that look best are overrated most."""

LONGEST_REST = 16
"""Most passes between two looks."""

TRUSTED = 3
"""Measurements after which a pass with drafts tells what one without would have taken."""

PRIOR_COST = 0.1
"""Seconds of one more token of a row in a pass, relative to a pass without drafts, before any has been measured."""

PRIOR_TRIES = 2.0
"""Tries that the guess for a place weighs against what was seen there."""

CORRECTION = 0.05
"""How far a hit or miss that was not expected moves the log-odds of all that a drafter says."""

PRIOR_WEIGHT = 4.0
"""Hits and misses that the expectation for a row weighs against its own."""

FEW = 16
"""Tokens of a forward up to which libraries choose other ways to multiply, so that more may take less."""

MOST_SHAPES = 256
"""Shapes of a number of rows that are remembered, the latest."""

Shape = tuple[int, int]
"""Rows of a forward, and tokens of the longest."""


@dataclass
class Costs:
    """What passes of a model have taken so far, over all calls.

    Attributes:
        seconds: rows of the call, shape: of a forward, relative to one of the same rows without drafts; how often measured.
    """

    seconds: dict[int, dict[Shape, tuple[float, int]]] = field(default_factory=dict)

    def of(self, batch: int, shape: Shape) -> float:
        """Seconds of a forward relative to one without drafts: as measured, or else guessed low, so that it will be.

        No forward takes less than a smaller one, so that the least of the larger ones corrects what was measured badly.
        """
        if shape == (batch, 1):
            return 1.0
        known = self.seconds.get(batch, {})
        larger = [seconds for own, (seconds, _) in known.items() if own[0] >= shape[0] and own[1] >= shape[1]]
        if shape not in known:
            larger.append(1 + _more(batch, shape) * self._least(batch, shape[0] * shape[1]))
        return min(larger)

    def count(self, batch: int, shape: Shape) -> int:
        """How often this was measured."""
        return self.seconds.get(batch, {}).get(shape, (0.0, 0))[1]

    def knows(self, batch: int) -> bool:
        """Whether passes with drafts of so many rows have been measured."""
        return batch in self.seconds

    def note(self, batch: int, shape: Shape, seconds: float) -> None:
        """Note a measurement of these relative seconds."""
        own = self.seconds.setdefault(batch, {})
        known, count = own.pop(shape, (0.0, 0))
        own[shape] = known + (seconds - known) * max(SMOOTHING, 1 / (count + 1)), count + 1
        if len(own) > MOST_SHAPES:
            del own[next(iter(own))]

    def _least(self, batch: int, tokens: int) -> float:
        """What a token more of each row takes at least, as far as is known, in a forward of so many in all."""
        if not self.knows(batch):
            # The more rows there are, the more of its time a forward takes for each token more.
            return max(PRIOR_COST, *(self._slope(rows) * min(1.0, batch / rows) for rows in self.seconds), 0.0)
        least = self._slope(batch)
        # Of few tokens, each may have cost much, and more of them half as much.
        return max(min(least, PRIOR_COST), least / 2) if tokens <= FEW else least

    def _slope(self, batch: int) -> float:
        slopes = ((seconds - 1) / _more(batch, shape) for shape, (seconds, _) in self.seconds[batch].items())
        return max(0.0, min(slopes))


@dataclass
class Measured:
    """What became of the drafts of one drafter for a model so far, over all calls.

    Attributes:
        rates: place in a draft: hits and tries, of which the older count less; of drafts without confidence.
        shift: by which the log-odds of what a drafter says are corrected.
        idle: rows of the call: passes since one had drafts.
    """

    rates: dict[int, tuple[float, float]] = field(default_factory=dict)
    shift: float = 0.0
    idle: Counter[int] = field(default_factory=Counter)

    def rate(self, draft: Draft, place: int) -> float:
        """How likely a token is accepted if those before it are; before anything is known, as the one before it."""
        if draft.confidence:
            said = min(max(draft.confidence[place], 1e-3), 1 - 1e-3)
            return 1 / (1 + (1 - said) / said * math.exp(-self.shift))
        hits, tries = self.rates.get(place, (0.0, 0.0))
        prior = self.rate(draft, place - 1) if place else 0.5
        return (hits + PRIOR_TRIES * prior) / (tries + PRIOR_TRIES)

    def try_token(self, draft: Draft, place: int, *, hit: bool) -> None:
        """Note whether a token was accepted."""
        if draft.confidence:
            self.shift += CORRECTION * (hit - self.rate(draft, place))
        else:
            hits, tries = self.rates.get(place, (0.0, 0.0))
            self.rates[place] = MEMORY * hits + hit, MEMORY * tries + 1


_COSTS: PerModel[Costs] = PerModel(Costs)
_MEASURED: PerModel[Measured] = PerModel(Measured)


class Schedule:
    """The length of drafts.

    ``dynamic`` weighs the tokens that a pass is expected to give (Leviathan et al., 2023, arXiv:2211.17192, section 3.3, with
    an acceptance for each token) against its seconds, as measured on this model, and drafts nothing where nothing pays.

    Args:
        drafter: its ``schedule`` and ``max_tokens``.
        model: the target.

    Attributes:
        runs: passes without drafts are taken elsewhere, see :meth:`ran`.
    """

    def __init__(self, drafter: Drafter, model: Any) -> None:
        self._kind, self._most = drafter.schedule, drafter.max_tokens
        self._cheap = drafter.cheap
        self._model = model
        self._placed = str(getattr(model, "device", "")), str(getattr(model, "dtype", ""))
        self._costs = _COSTS.of(model, self._placed)
        self._measured = _MEASURED.of(model, (drafter.model_dump_json(), *self._placed))
        self._lengths: dict[int, int] = {}
        # Of each row, tokens that were accepted and expected to be.
        self._luck: dict[int, tuple[float, float]] = {}
        # By rows, seconds of a pass without drafts in this call, and of how many; by length, seconds of proposing.
        self._units: dict[int, tuple[float, int]] = {}
        self._drafting: dict[int, float] = {}
        self._without = 0
        self._warm = False
        # Rows that drafts were looked at for, and whether all of a pass were known; passes since; seconds that it took.
        self._seen: set[int] = set()
        self._knew = False
        self._rested = 0
        self._looking: dict[int, float] = {}
        # Drafts are fed that are not expected to pay.
        self._tries = False
        # Passes without drafts are taken elsewhere.
        self.runs = False

    @property
    def weighs(self) -> bool:
        """Whether it decides by what passes take."""
        return self._kind == "dynamic" and self._cheap

    def ran(self, batch: int, seconds: float | None, drafting: float) -> None:
        """A pass without drafts was taken elsewhere, in less time than here: others are measured beside that from now on.

        Args:
            batch: its rows.
            seconds: that it took; ``None`` where that is not known.
            drafting: seconds that looking for drafts took.
        """
        self._look(batch, drafting)
        if seconds is not None:
            if not self.runs:
                self.runs, self._units = True, {}
                self._costs = _COSTS.of(self._model, (*self._placed, "runs"))
            self._time(batch, (batch, 1), seconds)
        self._without = 0
        self._measured.idle[batch] += 1

    def budgets(self, rows: Sequence[int], room: Sequence[int]) -> list[int]:
        """[R] most tokens of each row's draft.

        Args:
            rows: those that are to be drafted for.
            room: [R] tokens that each may still get, besides the one that every pass gives.
        """
        if self._kind == "dynamic" and self._cheap and self._rests(rows):
            self._rested += 1
            return [0] * len(rows)
        self._rested, self._tries = 0, False
        self._knew = self._seen.issuperset(rows)
        self._seen.update(rows)
        if self._kind == "heuristic":
            budgets = [self._lengths.get(row, self._most) for row in rows]
        elif self._kind == "dynamic" and not self._cheap:
            budgets = [self._best(rows, [Draft([0] * self._most)] * len(rows))] * len(rows)
        else:
            budgets = [self._most] * len(rows)
        return [max(0, min(budget, own)) for budget, own in zip(budgets, room, strict=True)]

    def cut(self, rows: Sequence[int], drafts: Sequence[Draft]) -> list[Draft]:
        """[R] as much of the drafts as pays.

        What was drawn from a distribution is left whole: to drop tokens for what they are would change what is drawn.
        """
        if self._kind != "dynamic" or not self._cheap or any(draft.q is not None for draft in drafts):
            return list(drafts)
        length = self._best(rows, drafts)
        return [_cut(draft, length) for draft in drafts]

    def observe(
        self,
        drafts: Mapping[int, Draft],
        accepted: Mapping[int, int],
        seconds: float | None,
        drafting: float,
    ) -> None:
        """What a pass gave.

        Args:
            drafts: a row, its draft.
            accepted: a row, how many of its drafted tokens were accepted.
            seconds: of the forward; where :attr:`runs`, of the whole pass; ``None`` where it was slower than others will be.
            drafting: seconds that proposing took.
        """
        depths = {row: draft.depth for row, draft in drafts.items()}
        for row, draft in drafts.items():
            depth, hits = depths[row], accepted[row]
            if not depth or draft.forced:
                continue
            expected = 0.0
            # The token after the last accepted one was tried and failed, if there was one.
            for place in range(min(depth, hits + 1)):
                expected += self._measured.rate(draft, place)
                self._measured.try_token(draft, place, hit=place < hits)
            won, due = self._luck.get(row, (PRIOR_WEIGHT, PRIOR_WEIGHT))
            self._luck[row] = (MEMORY * won + hits, MEMORY * due + expected)
            length = self._lengths.get(row, self._most)
            self._lengths[row] = min(self._most, length + 2) if hits == depth else max(1, length - 1)
        batch, longest = len(drafts), max(depths.values())
        shape = _shape(list(drafts.values()))
        # The first pass of a call is much slower than those after it.
        if seconds is not None and self._warm and not (self.runs and shape == (batch, 1)):
            self._time(batch, shape, seconds)
        self._warm = True
        known = self._drafting.get(longest, drafting)
        self._drafting[longest] = known + SMOOTHING * (drafting - known)
        self._look(batch, drafting)
        self._without = 0 if not longest else self._without + 1
        if seconds is None:
            self._measured.idle[batch] = 0 if longest else self._measured.idle[batch] + 1
            return
        unit, _ = self._units.get(batch, (seconds, 0))
        if self._tries and (batch + sum(accepted.values())) * unit > batch * seconds:
            self._rested = LONGEST_REST  # it did pay: try again
        else:
            self._measured.idle[batch] = 0 if longest else self._measured.idle[batch] + 1

    def _look(self, batch: int, drafting: float) -> None:
        """Note what looking for drafts of known rows took, if that was done."""
        if not self._rested and self._knew:  # what is read of a new row is no look
            known = self._looking.get(batch, drafting)
            self._looking[batch] = known + SMOOTHING * (drafting - known)

    def forget(self, row: int) -> None:
        """A row is over."""
        self._lengths.pop(row, None)
        self._luck.pop(row, None)
        self._seen.discard(row)

    def _rests(self, rows: Sequence[int]) -> bool:
        """Whether nobody need look at drafts now, as none have paid for long. A drafter is shown each row once at least."""
        batch = len(rows)
        unit, passes = self._units.get(batch, (0.0, 0))
        if self._measured.idle[batch] < RESTS or not passes or not self._seen.issuperset(rows):
            return False
        return self._rested < min(LONGEST_REST, self._looking.get(batch, 0.0) / (SHARE * unit) - 1)

    def _time(self, batch: int, shape: Shape, seconds: float) -> None:
        """Learn what a pass without drafts takes in this call, and what others take beside it in any."""
        expected, known = self._costs.of(batch, shape), self._costs.count(batch, shape)
        plain = shape == (batch, 1)
        unit, passes = self._units.get(batch, (seconds / expected, 0))
        seen = seconds / unit
        if plain or known:
            seen = min(max(seen, expected / OUTLIER), expected * OUTLIER)
        if plain or known >= TRUSTED:
            # The first passes of a call are the slowest: they must not count for long.
            passes += 1
            unit *= 1 + max(SMOOTHING, 1 / passes) * (seen / expected - 1)
        self._units[batch] = unit, passes
        if not plain:
            self._costs.note(batch, shape, seen)

    def _best(self, rows: Sequence[int], drafts: Sequence[Draft]) -> int:
        """The length to which to cut these drafts for most tokens a second."""
        longest = min(self._most, max(map(len, drafts)))
        if self._without >= PROBE or self._is_cold(len(rows)):
            return 0
        batch = len(rows)
        prospects = [self._prospects(*own, longest) for own in zip(rows, drafts, strict=True)]
        tokens, shapes, costs = list[float](), list[Shape](), list[float]()
        for length, each in enumerate(zip(*prospects, strict=True)):
            tokens.append(sum(own.tokens for own in each))
            shapes.append((sum(own.rows for own in each), 1 + max(own.depth for own in each)))
            costs.append(self._costs.of(batch, shapes[-1]))
            if not self._cheap and length:
                costs[-1] += self._drafting.get(length, 0.0) / self._units[batch][0]
        gains = [own / cost for own, cost in zip(tokens, costs, strict=True)]
        best = max(range(longest + 1), key=gains.__getitem__)
        if gains[best] < MARGIN * gains[0]:
            best = 0
        idle = self._measured.idle[batch]
        if best or not longest or idle < PROBE:
            return best
        unknown = [length for length in range(1, longest + 1) if not self._costs.count(batch, shapes[length])]
        tried = max(unknown or range(1, longest + 1), key=gains.__getitem__)
        # What a try loses, of the time of a pass.
        lost = costs[tried] - costs[0] * tokens[tried] / tokens[0]
        self._tries = idle * SHARE >= lost
        return tried if self._tries else 0

    def _is_cold(self, batch: int) -> bool:
        """Whether passes without drafts must show first what others are measured beside."""
        _, passes = self._units.get(batch, (0.0, 0))
        return not passes and not (self._cheap and self._costs.knows(batch))

    def _prospects(self, row: int, draft: Draft, longest: int) -> list[_Prospect]:
        """What a row is expected to get from its draft cut to each length, 0 to ``longest``."""
        if draft.forced:
            return [_Prospect(1.0 + draft.depth, 1, draft.depth)] * (longest + 1)
        # Who says how likely a token is has seen how well the row is guessed.
        won, due = (1.0, 1.0) if draft.confidence else self._luck.get(row, (1.0, 1.0))
        total = reached = 1.0
        expected = [total]
        for place in range(draft.depth):
            reached *= min(1.0, self._measured.rate(draft, place) * won / due)
            total += reached
            expected.append(total)
        if draft.parents is None:
            depths = [min(length, draft.depth) for length in range(longest + 1)]
            return [_Prospect(expected[depth], 1, depth) for depth in depths]
        cut = [draft.pruned(length) for length in range(longest + 1)]
        return [_Prospect(expected[own.depth], max(1, len(own.leaves())), own.depth) for own in cut]


class _Prospect(NamedTuple):
    """Tokens that a row is expected to get, and the rows and drafted tokens of the longest that it takes in a forward."""

    tokens: float
    rows: int
    depth: int


def _cut(draft: Draft, length: int) -> Draft:
    return draft if draft.forced else draft.pruned(length)


def _more(batch: int, shape: Shape) -> float:
    """Tokens of a forward for each row, besides the one that it has without drafts."""
    return shape[0] * shape[1] / batch - 1


def _shape(drafts: Sequence[Draft]) -> Shape:
    return sum(max(1, len(draft.leaves())) for draft in drafts), 1 + max(draft.depth for draft in drafts)
