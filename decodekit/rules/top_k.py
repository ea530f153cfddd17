"""Top-k: sample among the k most likely tokens."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.errors import InputError
from decodekit.core.protocols import Rule
from decodekit.core.types import Rows
from decodekit.kernels.keep_largest import keep_largest


class TopK(Rule):
    """Keep exactly the k most likely tokens; of tokens that tie for the last place, those with the lowest ids.

    Fan, Lewis and Dauphin, 2018, arXiv:1805.04833, section 5.1. Cost: one partial sort of the logits.
    """

    cost: ClassVar[str] = "O(V log k)"
    sampling_only: ClassVar[bool] = True
    capturable: ClassVar[bool] = True

    kind: Literal["top_k"] = "top_k"
    k: int = Field(description="how many tokens are kept; at most the vocabulary", ge=1)

    def as_filter(self) -> tuple[Literal["top_k"], float]:
        """See the base."""
        return "top_k", self.k

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        positions, vocab_size = logits.shape
        if self.k > vocab_size:
            raise InputError(
                f"top_k: k={self.k} is more than the {vocab_size} tokens of the vocabulary; lower k or drop top_k"
            )
        if self.k == vocab_size:
            return logits
        counts = torch.full((positions, 1), self.k, device=logits.device)
        # One more than k shows whether a tie crosses the border.
        return keep_largest(logits, counts, logits.topk(self.k + 1).values)
