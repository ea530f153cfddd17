"""How many tokens to draft: what a pass costs against how many tokens it is likely to give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from decodekit.core.protocols import Drafter

SMOOTHING = 0.2
"""Weight of a new measurement in a running mean."""

PROBE = 16
"""Passes after which what was given up is tried again."""

PRIOR_COST = 0.12
"""Seconds of one more token in a pass, relative to a pass of one, before it has been measured."""

PRIOR_ACCEPTANCE = 0.6


class Schedule:
    """The length of drafts.

    Expected tokens a pass at acceptance a and g drafts: (1 - a^(g+1)) / (1 - a) (Leviathan et al., 2023, arXiv:2211.17192,
    eq. 1). ``dynamic`` takes the g that gives most tokens a second by what was measured, which may be none, and tries again
    every ``PROBE`` passes.

    Args:
        drafter: its ``schedule`` and ``max_tokens``.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._kind, self._most = drafter.schedule, drafter.max_tokens
        self._lengths: dict[int, int] = {}
        self._acceptance: dict[int, float] = {}
        self._shared = PRIOR_ACCEPTANCE
        self._seconds: dict[tuple[int, int], float] = {}
        self._drafting: dict[int, float] = {}
        self._idle = 0

    def budgets(self, rows: Sequence[int], room: Sequence[int]) -> list[int]:
        """[R] most tokens of each row's draft.

        Args:
            rows: those that are to be drafted for.
            room: [R] tokens that each may still get, besides the one that every pass gives.
        """
        if self._kind == "dynamic":
            most = self._best(rows)
            budgets = [most] * len(rows)
        elif self._kind == "heuristic":
            budgets = [self._lengths.get(row, self._most) for row in rows]
        else:
            budgets = [self._most] * len(rows)
        return [max(0, min(budget, own)) for budget, own in zip(budgets, room, strict=True)]

    def observe(self, drafted: Mapping[int, int], accepted: Mapping[int, int], seconds: float, drafting: float) -> None:
        """What a pass gave.

        Args:
            drafted: a row, the depth of its draft.
            accepted: a row, how many of its drafted tokens were accepted.
            seconds: of the forward.
            drafting: seconds that proposing took.
        """
        for row, count in drafted.items():
            if not count:
                continue
            hits = accepted[row]
            # The token after the last accepted one was tried and failed, if there was one.
            tried = min(count, hits + 1)
            rate = hits / tried
            self._acceptance[row] = _mean(self._acceptance.get(row, self._shared), rate)
            self._shared = _mean(self._shared, rate)
            length = self._lengths.get(row, self._most)
            self._lengths[row] = min(self._most, length + 2) if hits == count else max(1, length - 1)
        key = (len(drafted), max(drafted.values(), default=0))
        known = self._seconds.get(key)
        self._seconds[key] = seconds if known is None else _mean(known, seconds)
        self._drafting[key[1]] = _mean(self._drafting.get(key[1], drafting), drafting)

    def _best(self, rows: Sequence[int]) -> int:
        self._idle += 1
        batch = len(rows)
        if (batch, 0) not in self._seconds:
            return 0  # what a plain pass costs has to be known before any can be called faster
        if self._idle >= PROBE:
            self._idle = 0
            return self._most
        rates = [self._acceptance.get(row, self._shared) for row in rows]
        gains = [self._tokens(rates, length) / self._cost(batch, length) for length in range(self._most + 1)]
        best = max(range(self._most + 1), key=gains.__getitem__)
        if best:
            self._idle = 0
        return best

    def _tokens(self, rates: Sequence[float], length: int) -> float:
        return sum(sum(rate**place for place in range(length + 1)) for rate in rates)

    def _cost(self, batch: int, length: int) -> float:
        """Seconds of a pass over so many drafted tokens: as measured, or on the line through what was."""
        plain = self._seconds[batch, 0]
        drafting = self._drafting.get(length, 0.0)
        if (batch, length) in self._seconds:
            return self._seconds[batch, length] + drafting
        measured = [(own, seconds) for (rows, own), seconds in self._seconds.items() if rows == batch and own]
        if not measured:
            return plain * (1 + PRIOR_COST * length) + drafting
        nearest, seconds = min(measured, key=lambda item: abs(item[0] - length))
        return plain + max(0.0, seconds - plain) / nearest * length + drafting


def _mean(known: float, new: float) -> float:
    return known + SMOOTHING * (new - known)
