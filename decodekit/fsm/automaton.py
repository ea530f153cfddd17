"""What an automaton over bytes is, and its determinisation as far as it is used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decodekit.core.errors import UnsupportedConstraint

DEAD = 0
"""The state of a ``Dfa`` from which no text can be completed."""

_BYTES_OF_UTF8 = [byte for byte in range(0xF5) if byte not in (0xC0, 0xC1)]
_UNKNOWN = -1
_WORK_A_STEP, _WORK_A_STATE = 2, 20
MOST_STATES = 200_000
WORK_AT_ONCE = 400_000
"""About a second's worth, in parts of states that steps look at."""


class Automaton(ABC):
    """A deterministic automaton whose states are values, computed when they are asked for.

    Attributes:
        byte_class: [256]; bytes of one class lead to the same state, from any state.
        start: the state before the first byte.
        trim: from every state some text can be completed; when false, dead ends must be searched for.
        members: the automata that it asks.
        work: how many parts of states its steps have looked at so far, beyond one a step.
    """

    byte_class: NDArray[np.intp]
    start: Any
    trim: bool
    members: tuple[Dfa, ...] = ()
    work: int = 0

    @abstractmethod
    def step(self, state: Any, byte: int) -> Any:
        """The state after ``byte``; ``None`` when no text goes on like this."""

    @abstractmethod
    def accepts(self, state: Any) -> bool:
        """Whether the text may end here."""

    @abstractmethod
    def least(self, state: Any) -> int:
        """A lower bound of the bytes until the text may end, which a byte lowers by at most 1."""


class Dfa:
    """The states and steps of an automaton met so far, numbered from 1.

    Args:
        automaton: what is determinised.
        spelt: the bytes that tokens can spell; no others are ever read.

    Attributes:
        byte_class: [256] the column of ``table`` of each byte.
        table: [at least states, classes] the state after a byte of each class; -1 where it was never asked for.
        only_bytes: the byte of each class, ``None`` for classes of several or of none that is spelt.
        accepting: whether the text may end, by state.
        least: a lower bound of the bytes until it may, by state.
    """

    start = 1

    def __init__(self, automaton: Automaton, spelt: Iterable[int] = range(256)) -> None:
        self._automaton = automaton
        self.byte_class = automaton.byte_class
        self._columns: list[int] = self.byte_class.tolist()
        by_class: dict[int, list[int]] = {column: [] for column in self._columns}
        for byte in spelt:
            by_class[self._columns[byte]].append(byte)
        self._examples = [by_class[column][0] if by_class[column] else None for column in sorted(by_class)]
        self.only_bytes = [by_class[column][0] if len(by_class[column]) == 1 else None for column in sorted(by_class)]
        unspelt = {self._columns[byte] for byte in _BYTES_OF_UTF8 if not by_class[self._columns[byte]]}
        self.trim = automaton.trim and not unspelt
        self.table = np.full((64, len(by_class)), _UNKNOWN, dtype=np.int32)
        self.table[DEAD] = DEAD
        self.accepting: list[bool] = [False]
        self.least: list[int] = [0]
        self._values: list[Any] = [None]
        self._numbers: dict[Hashable, int] = {None: DEAD}
        self._live: list[bool | None] = [False]
        self._work_left = WORK_AT_ONCE
        self._number(automaton.start)

    def __len__(self) -> int:
        """The states so far, the dead one counted."""
        return len(self._values)

    def step(self, state: int, byte: int) -> int:
        """The state after ``byte``; ``DEAD`` is certain only when the automaton is trim, ask ``is_live`` otherwise."""
        return self.step_class(state, self._columns[byte])

    def step_class(self, state: int, column: int) -> int:
        """As ``step``, for any byte of a class.

        Raises:
            UnsupportedConstraint: more states or steps than allowed.
        """
        after = self.table.item(state, column)
        if after == _UNKNOWN:
            before = self._automaton.work
            byte = self._examples[column]
            after = DEAD if byte is None else self._number(self._automaton.step(self._values[state], byte))
            self.table[state, column] = after
            self._work_left -= _WORK_A_STEP + self._automaton.work - before
            if self._work_left < 0:
                raise self._too_large("the work allowed for one token")
        return after

    def refill(self) -> None:
        """Allow ``WORK_AT_ONCE`` again, here and in the automata that this one asks."""
        self._work_left = WORK_AT_ONCE
        for member in self._automaton.members:
            member.refill()

    def is_live(self, state: int) -> bool:
        """Whether some text can be completed from here."""
        if self.trim:
            return state != DEAD
        if self._live[state] is None:
            self._search(state)
        return bool(self._live[state])

    def _number(self, value: Any) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self._values)
            self._work_left -= _WORK_A_STATE
            if number > MOST_STATES:
                raise self._too_large(f"{MOST_STATES:,} states")
            if number == len(self.table):
                self.table = np.concatenate([self.table, np.full_like(self.table, _UNKNOWN)])
            self._values.append(value)
            accepts = self._automaton.accepts(value)
            self.accepting.append(accepts)
            self.least.append(self._automaton.least(value))
            self._live.append(True if accepts else None)
        return number

    def _search(self, state: int) -> None:
        """Depth first to a state known to be live; settles every state on the way.

        Depth first because long texts are completed by a straight run: breadth first would meet all of theirs.
        """
        came_from: dict[int, list[int]] = {state: []}
        stack = [(state, iter(range(self.table.shape[1])))]
        live = None
        while stack and live is None:
            here, columns = stack[-1]
            for column in columns:
                after = self.step_class(here, column)
                if after in came_from:
                    came_from[after].append(here)
                elif self._live[after]:
                    live = here
                    break
                elif self._live[after] is None:
                    came_from[after] = [here]
                    stack.append((after, iter(range(self.table.shape[1]))))
                    break
            else:
                stack.pop()
        # Those left on the stack lead to the live one. The others were searched to their ends: they are dead, unless they
        # lead back to one of these.
        alive = [] if live is None else [live]
        for number in came_from:
            self._live[number] = False
        while alive:
            here = alive.pop()
            if not self._live[here]:
                self._live[here] = True
                alive.extend(came_from[here])

    def _too_large(self, limit: str) -> UnsupportedConstraint:
        return UnsupportedConstraint(
            f"the automaton of this constraint needs more than {limit}; repeat less, or combine fewer parts", ("size",)
        )
