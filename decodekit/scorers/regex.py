"""1 for a text in which a regular expression is found, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from decodekit.core.candidates import Candidate
from decodekit.core.options import Pattern
from decodekit.core.protocols import Scorer
from decodekit.core.types import Need


class Regex(Scorer):
    """A verifier of form: it says that an answer looks right, not that it is."""

    cost: ClassVar[str] = "1 search a candidate"
    needs: ClassVar[frozenset[Need | str]] = frozenset({Need.TOKENIZER})

    kind: Literal["regex"] = "regex"
    pattern: Pattern = Field(description="in Python's syntax; it may match anywhere, ^ and $ tie it to the ends")

    def score(self, prompt: str, candidates: Sequence[Candidate]) -> Sequence[float]:
        return [float(re.search(self.pattern, own.text) is not None) for own in candidates]
