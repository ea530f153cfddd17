"""Constraints whose language is regular, so that they combine exactly."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field

from decodekit.core.constraint import CompiledConstraint
from decodekit.core.errors import UnsupportedConstraint
from decodekit.core.protocols import Constraint
from decodekit.core.vocabulary import Vocabulary
from decodekit.fsm.automaton import Automaton, Dfa
from decodekit.fsm.masks import CompiledAutomaton


class Regular(Constraint):
    """A constraint with an automaton: exact, without dead ends, and free to be combined with others of its sort."""

    @abstractmethod
    def automaton(self) -> Automaton:
        """The language.

        Raises:
            UnsupportedConstraint: it has a part that is not regular, or is too large; names the part.
            InputError: it is no language.
        """

    def is_regular(self) -> bool:
        """Whether there is an automaton; false for a combination with parts of other engines."""
        return True

    def compile(self, vocabulary: Vocabulary) -> CompiledConstraint:
        return CompiledAutomaton(self.automaton(), vocabulary)


class Combination(Regular):
    """A constraint made of constraints."""

    constraints: tuple[Constraint, ...] = Field(description="the constraints that it combines", min_length=1)

    def resolve(self, tokenizer: Any) -> Self:
        return self.model_copy(update={"constraints": tuple(each.resolve(tokenizer) for each in self.constraints)})


def is_regular(constraint: Constraint) -> bool:
    """Whether a constraint has an automaton."""
    return isinstance(constraint, Regular) and constraint.is_regular()


def automata(constraints: Sequence[Constraint], used_by: str) -> list[Dfa]:
    """The automata of constraints that are to be combined.

    Raises:
        UnsupportedConstraint: one has none; names it.
    """
    found = []
    for constraint in constraints:
        if not (isinstance(constraint, Regular) and constraint.is_regular()):
            raise UnsupportedConstraint(
                f"{used_by} combines regular constraints only (regex, choice, phrases and what they make up); "
                f"{constraint.kind!r} is none",
                (constraint.kind,),
            )
        found.append(Dfa(constraint.automaton()))
    return found
