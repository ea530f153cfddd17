"""Top-H: sample among the most likely tokens while their entropy stays within a share of the whole."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.protocols import Rule
from decodekit.core.types import Rows
from decodekit.kernels.keep_largest import keep_largest

_COMPAT_TOKENS = 100
"""What transformers looks at."""
_FIRST = 1024
"""Tokens that are sorted at first: more than most positions need."""


class TopH(Rule):
    """Keep the most likely tokens as long as the entropy of what is kept, renormalized, is at most h times the whole one.

    Potraghloo et al., 2025, arXiv:2509.02510, algorithm 1: the greedy answer to which tokens hold the most mass within that
    bound. An h of 1 changes nothing; among equally likely tokens the lowest ids come first. Helps at high temperatures.
    ``mode: compat`` gives the numbers of transformers, which adds up -p log p without renormalizing, over the 100 most
    likely tokens alone. Cost: a softmax and a sort of the tokens that may be kept.
    """

    cost: ClassVar[str] = "O(V log V)"
    sampling_only: ClassVar[bool] = True
    capturable: ClassVar[bool] = True

    kind: Literal["top_h"] = "top_h"
    h: float = Field(description="share of the entropy to keep, in (0, 1]; 1 changes nothing", gt=0, le=1)
    mode: Literal["strict", "compat"] = Field("strict", description="strict is the paper's, compat as transformers")

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        if self.mode == "compat":
            return self._compat(logits)
        if self.h == 1:
            return logits
        vocab_size = logits.shape[-1]
        log_probs = logits.log_softmax(-1, dtype=torch.float64)
        bound = self.h * torch.special.entr(log_probs.exp()).sum(-1, keepdim=True)
        # On a GPU a look at the result would make the host wait.
        size = vocab_size if logits.is_cuda else min(_FIRST, vocab_size)
        while True:
            leading, ids = logits.topk(size)
            probabilities = log_probs.gather(1, ids).exp()
            mass, terms = probabilities.cumsum(-1), torch.special.entr(probabilities).cumsum(-1)
            # Of q = p / mass: -sum q log q = (-sum p log p) / mass + log mass.
            counts = _leading_count(terms / mass + mass.log() <= bound)
            if size == vocab_size or int(counts.max()) < size:
                return keep_largest(logits, counts, leading)
            size = min(8 * size, vocab_size)

    def _compat(self, logits: Tensor) -> Tensor:
        # One more than is looked at shows whether a tie crosses the border.
        leading = logits.topk(min(_COMPAT_TOKENS + 1, logits.shape[-1])).values
        probabilities = leading[:, :_COMPAT_TOKENS].softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        terms = torch.special.entr(probabilities)
        return keep_largest(logits, _leading_count(terms.cumsum(-1) <= self.h * terms.sum(-1, keepdim=True)), leading)


def _leading_count(kept: Tensor) -> Tensor:
    """[P, 1] how many columns of [P, K] hold before the first that does not, at least 1."""
    return kept.int().cumprod(-1).sum(-1, keepdim=True).clamp_(min=1)
