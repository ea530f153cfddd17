"""Propose what followed the last tokens where they stood before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from decodekit.core.drafts import Draft, DraftHost, DraftRow, DraftState
from decodekit.core.protocols import Drafter


class Ngram(Drafter):
    """Prompt lookup: the longest run of last tokens that stands earlier in prompt or output, and what came after it.

    Saxena, 2023, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding). Helps where the output repeats the
    prompt: summaries, edits, retrieval; of no use for text that does not.

    Cost: a search through the history a row and pass; no model.
    """

    cost: ClassVar[str] = "a search through the history a pass"

    kind: Literal["ngram"] = "ngram"
    max_ngram: int = Field(3, ge=1, le=64, description="most last tokens that must match")
    min_ngram: int = Field(1, ge=1, le=64, description="fewest last tokens that must match")

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is more than max_ngram {self.max_ngram}")
        return self

    def start(self, host: DraftHost) -> DraftState:
        """It keeps nothing."""
        return _Lookup(self)


class _Lookup(DraftState):
    def __init__(self, options: Ngram) -> None:
        self._options = options

    def propose(self, rows: Sequence[DraftRow], budgets: Sequence[int]) -> Sequence[Draft]:
        return [Draft(self._continuation(row.ids, budget)) for row, budget in zip(rows, budgets, strict=True)]

    def _continuation(self, ids: Sequence[int], budget: int) -> Sequence[int]:
        """What followed the latest earlier place of the longest match."""
        for size in range(min(self._options.max_ngram, len(ids) - 1), self._options.min_ngram - 1, -1):
            tail = ids[-size:]
            for start in range(len(ids) - size - 1, -1, -1):
                if ids[start : start + size] == tail:
                    return ids[start + size : start + size + budget]
        return ()
