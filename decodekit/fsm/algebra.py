"""Languages made of languages: union, intersection, difference, concatenation, fixed texts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from decodekit.fsm import syntax
from decodekit.fsm.automaton import DEAD, Automaton, Dfa
from decodekit.fsm.characters import common_classes
from decodekit.fsm.regex import Regex

Live = tuple[tuple[int, int], ...]
"""The members of a union that can still go on, each with its state."""


def any_text() -> Dfa:
    """Every text."""
    return Dfa(Regex(syntax.ANY_TEXT))


class Union(Automaton):
    """The texts of any member."""

    def __init__(self, members: Iterable[Dfa]) -> None:
        self.members = tuple(members)
        self.byte_class = common_classes(member.byte_class for member in self.members)
        self.trim = all(member.trim for member in self.members)
        self.start: Live = tuple((index, Dfa.start) for index in range(len(self.members)))

    def step(self, state: Live, byte: int) -> Live | None:
        self.work += len(state)
        stepped = ((index, self.members[index].step(here, byte)) for index, here in state)
        return tuple(pair for pair in stepped if pair[1] != DEAD) or None

    def accepts(self, state: Live) -> bool:
        return any(self.members[index].accepting[here] for index, here in state)

    def least(self, state: Live) -> int:
        return min(self.members[index].least[here] for index, here in state)


class Intersection(Automaton):
    """The texts that all members have."""

    trim = False

    def __init__(self, members: Iterable[Dfa]) -> None:
        self.members = tuple(members)
        self.byte_class = common_classes(member.byte_class for member in self.members)
        self.start: tuple[int, ...] = (Dfa.start,) * len(self.members)

    def step(self, state: tuple[int, ...], byte: int) -> tuple[int, ...] | None:
        after = []
        for member, here in zip(self.members, state, strict=True):
            if (there := member.step(here, byte)) == DEAD:
                return None
            after.append(there)
        return tuple(after)

    def accepts(self, state: tuple[int, ...]) -> bool:
        return all(member.accepting[here] for member, here in zip(self.members, state, strict=True))

    def least(self, state: tuple[int, ...]) -> int:
        return max(member.least[here] for member, here in zip(self.members, state, strict=True))


class Difference(Automaton):
    """The texts of one language that another does not have."""

    trim = False

    def __init__(self, kept: Dfa, removed: Dfa) -> None:
        self._kept, self._removed = self.members = kept, removed
        self.byte_class = common_classes([kept.byte_class, removed.byte_class])
        self.start = (Dfa.start, Dfa.start)

    def step(self, state: tuple[int, int], byte: int) -> tuple[int, int] | None:
        kept = self._kept.step(state[0], byte)
        return None if kept == DEAD else (kept, self._removed.step(state[1], byte))

    def accepts(self, state: tuple[int, int]) -> bool:
        return self._kept.accepting[state[0]] and not self._removed.accepting[state[1]]

    def least(self, state: tuple[int, int]) -> int:
        return self._kept.least[state[0]]


class Concatenation(Automaton):
    """A text of the first language and one of the second after it, wherever the first may end."""

    def __init__(self, first: Dfa, second: Dfa) -> None:
        self._first, self._second = self.members = first, second
        self.byte_class = common_classes([first.byte_class, second.byte_class])
        self.trim = first.trim and second.trim
        self.start = self._entered(Dfa.start, frozenset())

    def _entered(self, first: int, second: frozenset[int]) -> tuple[int, frozenset[int]]:
        return first, second | {Dfa.start} if self._first.accepting[first] else second

    def step(self, state: tuple[int, frozenset[int]], byte: int) -> tuple[int, frozenset[int]] | None:
        self.work += len(state[1])
        first = self._first.step(state[0], byte)
        second = frozenset(self._second.step(here, byte) for here in state[1]) - {DEAD}
        return self._entered(first, second) if first != DEAD or second else None

    def accepts(self, state: tuple[int, frozenset[int]]) -> bool:
        return any(self._second.accepting[here] for here in state[1])

    def least(self, state: tuple[int, frozenset[int]]) -> int:
        lengths = [self._second.least[here] for here in state[1]]
        if state[0] != DEAD:
            lengths.append(self._first.least[state[0]] + self._second.least[Dfa.start])
        return min(lengths)


class Texts(Automaton):
    """A finite set of texts; states are places in their common tree of bytes."""

    trim = True

    def __init__(self, texts: Iterable[str]) -> None:
        self._after: list[dict[int, int]] = [{}]
        self._ends: set[int] = set()
        for text in texts:
            here = 0
            for byte in text.encode():
                if (after := self._after[here].get(byte)) is None:
                    after = self._after[here][byte] = len(self._after)
                    self._after.append({})
                here = after
            self._ends.add(here)
        # A child has a higher number than its parent.
        self._least = [0] * len(self._after)
        for here in reversed(range(len(self._after))):
            ways = [1 + self._least[after] for after in self._after[here].values()]
            self._least[here] = 0 if here in self._ends else min(ways)
        self.start = 0
        self.byte_class = np.arange(256, dtype=np.intp)

    def step(self, state: int, byte: int) -> int | None:
        return self._after[state].get(byte)

    def accepts(self, state: int) -> bool:
        return state in self._ends

    def least(self, state: int) -> int:
        return self._least[state]
