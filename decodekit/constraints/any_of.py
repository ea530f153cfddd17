"""Any of: the output satisfies one of some constraints."""

from __future__ import annotations

from typing import ClassVar, Literal

from decodekit.core.constraint import CompiledConstraint
from decodekit.core.vocabulary import Vocabulary
from decodekit.fsm.algebra import Union
from decodekit.fsm.automaton import Automaton
from decodekit.fsm.constraint import Combination, automata, is_regular
from decodekit.fsm.mixed import CompiledAny


class AnyOf(Combination):
    """What any constraint allows, of any kind.

    Cost: the masks of the members that can still go on.
    """

    cost: ClassVar[str] = "O(V) a new state"

    kind: Literal["any_of"] = "any_of"

    def is_regular(self) -> bool:
        return all(map(is_regular, self.constraints))

    def automaton(self) -> Automaton:
        return Union(automata(self.constraints, self.kind))

    def compile(self, vocabulary: Vocabulary) -> CompiledConstraint:
        if self.is_regular():
            return super().compile(vocabulary)
        return CompiledAny([each.compile(vocabulary) for each in self.constraints], vocabulary)
