"""ROUGE: the F-measure of shared n-grams, or of the longest common subsequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from decodekit.core.extras import optional_module
from decodekit.core.protocols import Utility


class Rouge(Utility):
    """ROUGE.

    Lin, 2004, aclanthology.org/W04-1013, as the package rouge-score computes it (extra ``metrics``), times 100. Made for
    summaries in English: other scripts have no words for its tokenizer, and score 0.
    """

    cost: ClassVar[str] = "O(length^2) a pair for rougeL, O(length) for the others"

    kind: Literal["rouge"] = "rouge"
    variant: Literal["rouge1", "rouge2", "rougeL"] = Field("rougeL", description="what is counted")
    stem: bool = Field(False, description="compare stems of words")

    @override
    def resolve(self, tokenizer: Any) -> Self:
        self._modules()
        return self

    def pairwise(self, hypotheses: Sequence[str], references: Sequence[str]) -> Tensor:
        scoring, words = self._modules()
        scorer = scoring.RougeScorer([self.variant], tokenizer=_Remembering(words.DefaultTokenizer(self.stem)))
        scores = [[scorer.score(own, other)[self.variant].fmeasure for other in references] for own in hypotheses]
        return 100 * torch.tensor(scores, dtype=torch.float64)

    def _modules(self) -> tuple[Any, Any]:
        return (
            optional_module("rouge_score.rouge_scorer", extra="metrics", used_by=self.kind),
            optional_module("rouge_score.tokenizers", extra="metrics", used_by=self.kind),
        )


class _Remembering:
    """A tokenizer that reads each text once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenize = cache(tokenizer.tokenize)
