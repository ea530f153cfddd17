"""None of: the output satisfies not one of some constraints."""

from __future__ import annotations

from typing import ClassVar, Literal

from decodekit.fsm.algebra import Difference, Union, any_text
from decodekit.fsm.automaton import Automaton, Dfa
from decodekit.fsm.constraint import Combination, automata


class NoneOf(Combination):
    """Every text but those of some regular constraints; ``all_of: [a, none_of: [b]]`` is a without b.

    Cost: one walk over the vocabulary for each state met, then a copy of its mask.
    """

    cost: ClassVar[str] = "O(V) a new state"

    kind: Literal["none_of"] = "none_of"

    def automaton(self) -> Automaton:
        return Difference(any_text(), Dfa(Union(automata(self.constraints, self.kind))))
