"""Character n-gram F-score (chrF), as sacrebleu's sentence score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from decodekit.core.ngrams import ChrF
from decodekit.core.protocols import Utility


class Chrf(Utility):
    """chrF.

    Popović, 2015, aclanthology.org/W15-3049. Equal to sacrebleu 2.6. A good default for text in any language: it needs no
    tokenizer and follows inflection; it rewards form, not meaning.
    """

    cost: ClassVar[str] = "each text counted once, then one matrix product an order"

    kind: Literal["chrf"] = "chrf"
    char_order: int = Field(6, ge=1, le=20, description="longest n-grams of characters")
    word_order: int = Field(0, ge=0, le=20, description="longest n-grams of words; 0 for none")
    beta: float = Field(2.0, gt=0, description="how many times more recall counts than precision")

    def pairwise(self, hypotheses: Sequence[str], references: Sequence[str]) -> Tensor:
        return self._score.pairwise(hypotheses, references)

    def aggregated(self, hypotheses: Sequence[str], references: Sequence[str], weights: Tensor) -> Tensor:
        return self._score.aggregated(hypotheses, references, weights)

    @property
    def _score(self) -> ChrF:
        return ChrF(self.char_order, self.word_order, self.beta)
