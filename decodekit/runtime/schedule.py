"""How many tokens to draft: what a pass costs against how many tokens it is likely to give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
"""Passes after which what was given up is tried again, be it drafts or passes without."""

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

Shape = tuple[int, int]
"""Rows of a forward, and tokens of the longest."""


@dataclass
class Measured:
    """What passes of a model have shown so far, over all calls with one drafter.

    Attributes:
        seconds: (rows of the call, shape): of a forward, relative to one of the same rows without drafts; how often measured.
        rates: place in a draft: hits and tries, of which the older count less; of drafts without confidence.
        shift: by which the log-odds of what a drafter says are corrected.
    """

    seconds: dict[tuple[int, Shape], tuple[float, int]] = field(default_factory=dict)
    rates: dict[int, tuple[float, float]] = field(default_factory=dict)
    shift: float = 0.0

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

    def cost(self, batch: int, shape: Shape) -> float:
        """Seconds of a forward relative to one without drafts: as measured, or else guessed low, so that it will be.

        No forward takes less than a smaller one, so that the least of the larger ones corrects what was measured badly.
        """
        if shape == (batch, 1):
            return 1.0
        known = {own: seconds for (size, own), (seconds, _) in self.seconds.items() if size == batch}
        larger = [seconds for own, seconds in known.items() if own[0] >= shape[0] and own[1] >= shape[1]]
        if shape not in known:
            slopes = [(seconds - 1) / _more(batch, own) for own, seconds in known.items()]
            least = max(0.0, min(slopes, default=PRIOR_COST))
            # Where each token has cost much, more of them may cost half.
            larger.append(1 + _more(batch, shape) * max(min(least, PRIOR_COST), least / 2))
        return min(larger)

    def count(self, batch: int, shape: Shape) -> int:
        """How often this was measured."""
        return self.seconds.get((batch, shape), (0.0, 0))[1]

    def knows(self, batch: int) -> bool:
        """Whether passes with drafts of so many rows have been measured."""
        return any(rows == batch for rows, _ in self.seconds)

    def time(self, batch: int, shape: Shape, seconds: float) -> None:
        """Note a measurement of these relative seconds."""
        known, count = self.seconds.get((batch, shape), (0.0, 0))
        self.seconds[batch, shape] = known + (seconds - known) * max(SMOOTHING, 1 / (count + 1)), count + 1


_MEASURED: PerModel[Measured] = PerModel(Measured)


class Schedule:
    """The length of drafts.

    ``dynamic`` weighs the tokens that a pass is expected to give (Leviathan et al., 2023, arXiv:2211.17192, section 3.3, with
    an acceptance for each token) against its seconds, as measured on this model, and drafts nothing where nothing pays.

    Args:
        drafter: its ``schedule`` and ``max_tokens``.
        model: the target.
    """

    def __init__(self, drafter: Drafter, model: Any) -> None:
        self._kind, self._most = drafter.schedule, drafter.max_tokens
        self._cheap = drafter.cheap
        self._measured = _MEASURED.of(model, drafter.model_dump_json())
        self._lengths: dict[int, int] = {}
        # Of each row, tokens that were accepted and expected to be.
        self._luck: dict[int, tuple[float, float]] = {}
        # By rows, seconds of a pass without drafts in this call, and of how many; by length, seconds of proposing.
        self._units: dict[int, tuple[float, int]] = {}
        self._drafting: dict[int, float] = {}
        self._without = self._with = 0
        self._warm = False

    def budgets(self, rows: Sequence[int], room: Sequence[int]) -> list[int]:
        """[R] most tokens of each row's draft.

        Args:
            rows: those that are to be drafted for.
            room: [R] tokens that each may still get, besides the one that every pass gives.
        """
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
        seconds: float,
        drafting: float,
    ) -> None:
        """What a pass gave.

        Args:
            drafts: a row, its draft.
            accepted: a row, how many of its drafted tokens were accepted.
            seconds: of the forward.
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
        longest = max(depths.values())
        if self._warm:  # the first pass of a call is much slower than those after it
            self._time(len(drafts), _shape(list(drafts.values())), seconds)
        self._warm = True
        known = self._drafting.get(longest, drafting)
        self._drafting[longest] = known + SMOOTHING * (drafting - known)
        self._without = 0 if not longest else self._without + 1
        self._with = 0 if longest else self._with + 1

    def forget(self, row: int) -> None:
        """A row is over."""
        self._lengths.pop(row, None)
        self._luck.pop(row, None)

    def _time(self, batch: int, shape: Shape, seconds: float) -> None:
        """Learn what a pass without drafts takes in this call, and what others take beside it in any."""
        expected, known = self._measured.cost(batch, shape), self._measured.count(batch, shape)
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
            self._measured.time(batch, shape, seen)

    def _best(self, rows: Sequence[int], drafts: Sequence[Draft]) -> int:
        """The length to which to cut these drafts for most tokens a second."""
        longest = min(self._most, max(map(len, drafts)))
        if self._without >= PROBE or self._is_cold(len(rows)):
            return 0
        gains = [self._gain(rows, drafts, length) for length in range(longest + 1)]
        first = 1 if self._with >= PROBE and longest else 0
        return max(range(first, longest + 1), key=gains.__getitem__)

    def _is_cold(self, batch: int) -> bool:
        """Whether passes without drafts must show first what others are measured beside."""
        _, passes = self._units.get(batch, (0.0, 0))
        return not passes and not (self._cheap and self._measured.knows(batch))

    def _gain(self, rows: Sequence[int], drafts: Sequence[Draft], length: int) -> float:
        """Expected tokens for the seconds of a pass without drafts."""
        cut = [_cut(draft, length) for draft in drafts]
        tokens = sum(self._tokens(row, draft) for row, draft in zip(rows, cut, strict=True))
        cost = self._measured.cost(len(rows), _shape(cut))
        if not self._cheap and length:
            cost += self._drafting.get(length, 0.0) / self._units[len(rows)][0]
        return tokens / cost

    def _tokens(self, row: int, draft: Draft) -> float:
        """Expected tokens of a row."""
        # Who says how likely a token is has seen how well the row is guessed.
        won, due = (1.0, 1.0) if draft.confidence else self._luck.get(row, (1.0, 1.0))
        total = reached = 1.0
        for place in range(draft.depth):
            reached *= 1.0 if draft.forced else min(1.0, self._measured.rate(draft, place) * won / due)
            total += reached
        return total


def _cut(draft: Draft, length: int) -> Draft:
    return draft if draft.forced else draft.pruned(length)


def _more(batch: int, shape: Shape) -> float:
    """Tokens of a forward for each row, besides the one that it has without drafts."""
    return shape[0] * shape[1] / batch - 1


def _shape(drafts: Sequence[Draft]) -> Shape:
    return sum(max(1, len(draft.leaves())) for draft in drafts), 1 + max(draft.depth for draft in drafts)
