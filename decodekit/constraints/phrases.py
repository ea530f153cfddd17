"""Phrases: texts that the output contains, never contains, starts or ends with."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from decodekit.fsm.algebra import Difference, Intersection, any_text
from decodekit.fsm.automaton import Automaton, Dfa
from decodekit.fsm.constraint import Regular
from decodekit.fsm.regex import Regex
from decodekit.fsm.syntax import parse

Texts = tuple[Annotated[str, Field(min_length=1)], ...]


class Phrases(Regular):
    """All of ``contains``, nothing of ``never``, one of ``starts`` at the start and one of ``ends`` at the end.

    Phrases are compared to the letter, as text: however it is cut into tokens, a banned phrase cannot appear, also not inside
    a longer word.
    Cost: one walk over the vocabulary for each state met, then a copy of its mask.
    """

    cost: ClassVar[str] = "O(V) a new state"

    kind: Literal["phrases"] = "phrases"
    contains: Texts = Field((), description="texts that all appear")
    never: Texts = Field((), description="texts of which none appears")
    starts: Texts = Field((), description="the output starts with one of these")
    ends: Texts = Field((), description="the output ends with one of these")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not (self.contains or self.never or self.starts or self.ends):
            raise ValueError("phrases asks for nothing; give contains, never, starts or ends: [text, ...]")
        return self

    def automaton(self) -> Automaton:
        wanted = [_around(".*", (text,), ".*") for text in self.contains]
        if self.starts:
            wanted.append(_around("", self.starts, ".*"))
        if self.ends:
            wanted.append(_around(".*", self.ends, ""))
        kept = Intersection(wanted or [any_text()])
        return Difference(Dfa(kept), _around(".*", self.never, ".*")) if self.never else kept


def _around(before: str, texts: Texts, after: str) -> Dfa:
    return Dfa(Regex(parse(f"(?s){before}(?:{'|'.join(map(re.escape, texts))}){after}")))
