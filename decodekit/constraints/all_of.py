"""All of: the output satisfies every one of some constraints."""

from __future__ import annotations

from typing import ClassVar, Literal

from decodekit.core.constraint import CompiledConstraint
from decodekit.core.vocabulary import Vocabulary
from decodekit.fsm.algebra import Intersection
from decodekit.fsm.automaton import Automaton
from decodekit.fsm.constraint import Combination, automata, is_regular
from decodekit.fsm.masks import CompiledAutomaton
from decodekit.fsm.mixed import CompiledAll


class AllOf(Combination):
    """What all constraints allow, of any kind: ``[json_schema, regex, phrases]``.

    The regular ones among them become one automaton: exact, without dead ends. With those of other engines only the masks
    are intersected: no wrong text is let through, but a row may come to where no text goes on.
    Cost: the members' masks, and a walk over the vocabulary for each state met.
    """

    cost: ClassVar[str] = "O(V) a new state"

    kind: Literal["all_of"] = "all_of"

    def is_regular(self) -> bool:
        return all(map(is_regular, self.constraints))

    def automaton(self) -> Automaton:
        return Intersection(automata(self.constraints, self.kind))

    def compile(self, vocabulary: Vocabulary) -> CompiledConstraint:
        if self.is_regular():
            return super().compile(vocabulary)
        members = [each.compile(vocabulary) for each in self.constraints if not is_regular(each)]
        if regular := [each for each in self.constraints if is_regular(each)]:
            members.insert(0, CompiledAutomaton(Intersection(automata(regular, self.kind)), vocabulary))
        return CompiledAll(members, vocabulary)
