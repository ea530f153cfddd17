"""Concat: the output is made of parts, one after the other."""

from __future__ import annotations

from functools import reduce
from typing import ClassVar, Literal

from pydantic import Field

from decodekit.core.protocols import Constraint
from decodekit.fsm.algebra import Concatenation
from decodekit.fsm.automaton import Automaton, Dfa
from decodekit.fsm.constraint import Combination, automata


class Concat(Combination):
    """A text of the first regular constraint, then one of the second, and so on, wherever they may be cut.

    A part's anchors and look-around see that part alone.
    Cost: one walk over the vocabulary for each state met, then a copy of its mask.
    """

    cost: ClassVar[str] = "O(V) a new state"

    kind: Literal["concat"] = "concat"
    constraints: tuple[Constraint, ...] = Field(description="the parts in order", min_length=2)

    def automaton(self) -> Automaton:
        first, *others, last = automata(self.constraints, self.kind)
        return Concatenation(reduce(lambda before, part: Dfa(Concatenation(before, part)), others, first), last)
