"""No-repeat n-gram: no n tokens in a row occur twice."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.protocols import Rule
from decodekit.core.types import Rows, Scope


class NoRepeatNgram(Rule):
    """Ban each token that would complete an n-gram which already occurred.

    Paulus, Xiong and Socher, 2018, arXiv:1705.04304, section 2.5. An n-gram occurred if all its tokens lie in the
    scope; the n - 1 tokens before the next one may lie anywhere. Cost: n passes over the history.
    """

    cost: ClassVar[str] = "O(V + n L)"
    capturable: ClassVar[bool] = True

    kind: Literal["no_repeat_ngram"] = "no_repeat_ngram"
    n: int = Field(description="length of the n-grams in tokens; 1 lets no token occur twice", ge=1)
    scope: Scope = Field("both", description="where the first occurrence must lie: prompt, output or both")

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        if rows.tokens.shape[1] < self.n:
            return logits
        ngrams = rows.tokens.unfold(1, self.n, 1)
        inside = rows.within(self.scope).unfold(1, self.n, 1).all(-1)
        last, reached = (values[:, self.n - 1 :] for values in rows.occurrences(logits.shape[-1], self.scope))
        repeats = inside & reached & (ngrams[..., :-1] == rows.tail(self.n - 1).unsqueeze(1)).all(-1)
        return logits.scatter_reduce(1, last, torch.where(repeats, -math.inf, math.inf).to(logits.dtype), "amin")
