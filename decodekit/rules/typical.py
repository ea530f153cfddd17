"""Typical: sample among the tokens about as surprising as the distribution is on average."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.protocols import Rule
from decodekit.core.types import Rows

_FIRST = 1024
"""Tokens that are sorted at first: more than most positions need."""


class Typical(Rule):
    """Keep the tokens whose information content is closest to the entropy, until they hold the mass p.

    Meister et al., 2022, arXiv:2202.00666. The most likely token goes too where it says less than is to be
    expected. Tokens that deviate as much as the last one kept are kept with it. A p of 1 changes nothing. Helps against
    bland and repetitive text. Cost: a softmax and a sort of the tokens that may be kept.
    """

    cost: ClassVar[str] = "O(V log V)"
    sampling_only: ClassVar[bool] = True
    keeps_best: ClassVar[bool] = False
    capturable: ClassVar[bool] = True

    kind: Literal["typical"] = "typical"
    p: float = Field(description="mass to keep, in (0, 1]; 1 changes nothing", gt=0, le=1)

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        if self.p == 1:
            return logits
        log_probs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        probabilities = log_probs.exp()
        entropy = torch.special.entr(probabilities).sum(-1, keepdim=True)
        deviation = (log_probs + entropy).abs()
        vocab_size = logits.shape[-1]
        # On a GPU a look at the result would make the host wait.
        size = vocab_size if logits.is_cuda else min(_FIRST, vocab_size)
        while True:
            ordered, ids = deviation.topk(size, largest=False)
            # float64 keeps the sum exact enough for p near 1, and cumsum adds in order: no row depends on its neighbours.
            mass = probabilities.gather(1, ids).cumsum(-1, dtype=torch.float64)
            last = (mass < self.p).sum(-1, keepdim=True)
            if size == vocab_size or int(last.max()) < size:
                break
            size = min(8 * size, vocab_size)
        return torch.where(deviation > ordered.gather(1, last.clamp_(max=size - 1)), -math.inf, logits)
