"""Top-p (nucleus): sample among the fewest tokens that hold the mass p."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.protocols import Rule
from decodekit.core.types import Rows
from decodekit.kernels.keep_largest import keep_largest

_ROUNDING = 1e-4
"""Far more mass than a float32 softmax over a vocabulary can lose."""


class TopP(Rule):
    """Keep the smallest set of most likely tokens whose probabilities sum to at least p.

    Holtzman et al., 2020, arXiv:1904.09751, section 3.1. A p of 1 changes nothing, a tiny p keeps exactly the most
    likely token; among equally likely tokens the lowest ids come first. Cost: a softmax, and a sort of the tokens that
    may belong to the nucleus.
    """

    cost: ClassVar[str] = "O(V log V)"
    sampling_only: ClassVar[bool] = True
    capturable: ClassVar[bool] = True

    kind: Literal["top_p"] = "top_p"
    p: float = Field(description="mass to keep, in (0, 1]; 1 changes nothing", gt=0, le=1)

    def as_filter(self) -> tuple[Literal["top_p"], float]:
        """See the base."""
        return "top_p", self.p

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        if self.p == 1:
            return logits
        probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        leading = self._leading(logits, probabilities)
        # Weights relative to the best token's: the whole row weighs 1 / (the best token's probability).
        weights = (leading.to(probabilities.dtype) - leading[:, :1]).exp_()
        wanted = self.p / probabilities.amax(-1, keepdim=True).double()
        # float64 keeps the sum exact enough for p near 1, and cumsum adds in order: no row depends on its neighbours.
        counts = torch.searchsorted(weights.cumsum(-1, dtype=torch.float64), wanted) + 1
        return keep_largest(logits, counts.clamp_(max=leading.shape[1]), leading)

    def _leading(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        """[P, K] the largest logits of each row, largest first; K is more than any row's nucleus needs."""
        vocab_size = logits.shape[-1]
        size = vocab_size
        if not logits.is_cuda:
            # Tokens below this probability weigh less than 1 - p together, so that the nucleus lies among the others.
            negligible = max(1 - self.p - _ROUNDING, 0) / vocab_size
            size = min(int((probabilities >= negligible).sum(-1).max()) + 1, vocab_size)
        return logits.topk(size).values
