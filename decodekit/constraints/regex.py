"""Regex: the whole output matches a regular expression."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from decodekit.fsm.automaton import Automaton
from decodekit.fsm.constraint import Regular
from decodekit.fsm.regex import Regex as RegexAutomaton
from decodekit.fsm.syntax import parse


class Regex(Regular):
    """Texts that ``re.fullmatch`` of Python accepts, look-around, anchors and flags (``(?i)``) among them.

    Refused by name: backreferences, conditional and atomic groups, possessive quantifiers, look-around inside a look-behind,
    and patterns of more than 100,000 characters, repetitions written out.
    Cost: one walk over the vocabulary for each state met, then a copy of its mask.
    """

    cost: ClassVar[str] = "O(V) a new state"

    kind: Literal["regex"] = "regex"
    pattern: str = Field(description="a regular expression of Python's re")

    def automaton(self) -> Automaton:
        return RegexAutomaton(parse(self.pattern))
