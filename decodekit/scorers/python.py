"""A Python function of prompt and text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from decodekit.core.candidates import Candidate
from decodekit.core.options import PythonFunction
from decodekit.core.protocols import Scorer
from decodekit.core.types import Need


class Python(Scorer):
    """``function(prompt, text)`` gives a number, or ``None`` for no score; higher is better.

    Given from Python only: a recipe file is data and names no code. To name a scorer of your own there, make it a plugin
    (``decodekit.v1.scorers``).
    """

    cost: ClassVar[str] = "1 call a candidate"
    needs: ClassVar[frozenset[Need | str]] = frozenset({Need.TOKENIZER})

    kind: Literal["python"] = "python"
    function: PythonFunction = Field(description="rates a text; given from Python")

    def score(self, prompt: str, candidates: Sequence[Candidate]) -> Sequence[float]:
        scores = [self.function(prompt, own.text) for own in candidates]
        return [float("nan") if score is None else float(score) for score in scores]
