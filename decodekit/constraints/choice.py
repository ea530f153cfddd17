"""Choice: the output is one of a list of texts."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from decodekit.fsm.algebra import Texts
from decodekit.fsm.automaton import Automaton
from decodekit.fsm.constraint import Regular


class Choice(Regular):
    """One of some texts, to the letter.

    Cost: one walk over the vocabulary for each place in a text met, then a copy of its mask.
    """

    cost: ClassVar[str] = "O(V) a new state"

    kind: Literal["choice"] = "choice"
    choices: tuple[str, ...] = Field(description="the texts", min_length=1)

    def automaton(self) -> Automaton:
        return Texts(self.choices)
