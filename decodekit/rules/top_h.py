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


class TopH(Rule):
    """Keep the most likely tokens as long as the entropy of what is kept, renormalized, is at most h times the whole one.

    Potraghloo et al., 2025, arXiv:2509.02510, algorithm 1: the greedy answer to which tokens hold the most mass within that
    bound. An h of 1 changes nothing; among equally likely tokens the lowest ids come first. Helps at high temperatures.
    ``mode: compat`` gives the numbers of transformers, which adds up -p log p without renormalizing, over the 100 most
    likely tokens alone. Cost: a sort of the vocabulary.
    """

    cost: ClassVar[str] = "O(V log V)"
    sampling_only: ClassVar[bool] = True

    kind: Literal["top_h"] = "top_h"
    h: float = Field(description="share of the entropy to keep, in (0, 1]; 1 changes nothing", gt=0, le=1)
    mode: Literal["strict", "compat"] = Field("strict", description="strict is the paper's, compat as transformers")

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        vocab_size, wide = logits.shape[-1], torch.promote_types(logits.dtype, torch.float32)
        if self.mode == "compat":
            # One more than is looked at shows whether a tie crosses the border.
            leading = logits.topk(min(_COMPAT_TOKENS + 1, vocab_size)).values
            seen = leading[:, :_COMPAT_TOKENS].softmax(-1, dtype=wide)
            terms = torch.special.entr(seen)
            entropy, whole = terms.cumsum(-1), terms.sum(-1, keepdim=True)
        elif self.h == 1:
            return logits
        else:
            leading = logits.sort(-1, descending=True).values
            probabilities = leading.softmax(-1, dtype=torch.float64)
            mass, terms = probabilities.cumsum(-1), torch.special.entr(probabilities).cumsum(-1)
            # Of q = p / mass: -sum q log q = (-sum p log p) / mass + log mass.
            entropy, whole = terms / mass + mass.log(), terms[:, -1:]
        counts = (entropy > self.h * whole).cumsum(-1).eq(0).sum(-1, keepdim=True)
        return keep_largest(logits, counts.clamp_(min=1), leading)
