"""BLEU of sentences, as sacrebleu's sentence score with effective order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from decodekit.core.extras import optional_module
from decodekit.core.ngrams import count_ngrams, mean_counts, shared_count, shared_counts
from decodekit.core.protocols import Utility

ORDERS = 4


class Bleu(Utility):
    """BLEU.

    Papineni et al., 2002, aclanthology.org/P02-1040; smoothed by powers of two where an order has no match, shorter orders
    alone where a sentence has no longer ones. Tokens and the score are sacrebleu's (extra ``metrics``). Precise about words:
    on single sentences it is coarser than chrF, and most pairs of free texts score near 0.
    """

    cost: ClassVar[str] = "each text counted once, then one matrix product an order"

    kind: Literal["bleu"] = "bleu"
    tokenize: Literal["13a", "intl", "char", "zh", "none"] = Field("13a", description="sacrebleu's tokenizer")
    lowercase: bool = Field(False, description="ignore case")

    @override
    def resolve(self, tokenizer: Any) -> Self:
        self._metric()
        return self

    def pairwise(self, hypotheses: Sequence[str], references: Sequence[str]) -> Tensor:
        metric = self._metric()
        known = {text: self._counts(metric, text) for text in (*hypotheses, *references)}
        ours, theirs = [known[text] for text in hypotheses], [known[text] for text in references]
        shared = torch.stack(
            [shared_counts([own[n] for own in ours], [own[n] for own in theirs]) for n in range(ORDERS)], dim=-1
        )  # [N, M, orders]
        lengths = [own[0].total() for own in theirs]
        scores = [
            [_score(metric, row, own, length) for row, length in zip(rows, lengths, strict=True)]
            for rows, own in zip(shared.tolist(), ours, strict=True)
        ]
        return torch.tensor(scores, dtype=torch.float64)

    @override
    def aggregated(self, hypotheses: Sequence[str], references: Sequence[str], weights: Tensor) -> Tensor:
        metric = self._metric()
        theirs = [self._counts(metric, text) for text in references]
        mean = [mean_counts(order, weights.tolist()) for order in zip(*theirs, strict=True)]
        length = sum(mean[0].values())
        scores = []
        for own in (self._counts(metric, text) for text in hypotheses):
            shared = [shared_count(one, other) for one, other in zip(own, mean, strict=True)]
            scores.append(_score(metric, shared, own, length))
        return torch.tensor(scores, dtype=torch.float64)

    def _metric(self) -> Any:
        sacrebleu = optional_module("sacrebleu.metrics.bleu", extra="metrics", used_by=self.kind)
        return sacrebleu.BLEU(tokenize=self.tokenize, lowercase=self.lowercase, effective_order=True)

    def _counts(self, metric: Any, text: str) -> list[Counter[Hashable]]:
        words = metric.tokenizer((text.lower() if self.lowercase else text).rstrip()).split()
        return [count_ngrams(words, order + 1) for order in range(ORDERS)]


def _score(metric: Any, shared: Sequence[float], own: Sequence[Counter[Hashable]], length: float) -> float:
    """Of the matches by order, beside a reference of this many words."""
    totals = [counts.total() for counts in own]
    words = totals[0]
    # The length of an aggregated reference is a fraction, which sacrebleu's own brevity penalty does not take.
    score = metric.compute_bleu([*shared], totals, words, 0, smooth_method="exp", effective_order=True).score
    return float(score) * (math.exp(1 - length / words) if 0 < words < length else 1.0)
