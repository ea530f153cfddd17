"""Character and word n-gram F-score (chrF++), as sacrebleu's sentence score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from decodekit.core.ngrams import ChrF
from decodekit.core.protocols import Utility


class ChrfPlusPlus(Utility):
    """chrF++.

    Popović, 2017, aclanthology.org/W17-4770. Equal to sacrebleu 2.6. As chrF with single words and pairs of them, which makes
    word order count; of little use for languages that are written without spaces.
    """

    cost: ClassVar[str] = "each text counted once, then one matrix product an order"

    kind: Literal["chrfpp"] = "chrfpp"
    char_order: int = Field(6, ge=1, le=20, description="longest n-grams of characters")
    word_order: int = Field(2, ge=0, le=20, description="longest n-grams of words; 0 for none")
    beta: float = Field(2.0, gt=0, description="how many times more recall counts than precision")

    def pairwise(self, hypotheses: Sequence[str], references: Sequence[str]) -> Tensor:
        return self._score.pairwise(hypotheses, references)

    def aggregated(self, hypotheses: Sequence[str], references: Sequence[str], weights: Tensor) -> Tensor:
        return self._score.aggregated(hypotheses, references, weights)

    @property
    def _score(self) -> ChrF:
        return ChrF(self.char_order, self.word_order, self.beta)
