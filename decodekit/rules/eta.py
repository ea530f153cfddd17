"""Eta: sample among the tokens above a probability that falls where entropy is high."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.protocols import Rule
from decodekit.core.types import Rows


class Eta(Rule):
    """Keep the tokens of probability min(epsilon, sqrt(epsilon) exp(-entropy)) or more, and the most likely one anyway.

    Hewitt, Manning and Liang, 2022, arXiv:2210.15191, with the paper's alpha = sqrt(epsilon). Unlike a fixed threshold it
    leaves an unsure model its many rare tokens. Cost: a softmax.
    """

    cost: ClassVar[str] = "O(V)"
    sampling_only: ClassVar[bool] = True
    capturable: ClassVar[bool] = True

    kind: Literal["eta"] = "eta"
    epsilon: float = Field(description="the threshold where entropy is low, in (0, 1)", gt=0, lt=1)

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        entropy = torch.special.entr(probabilities).sum(-1, keepdim=True)
        eta = (math.sqrt(self.epsilon) * (-entropy).exp()).clamp(max=self.epsilon)
        dropped = (probabilities < eta) & (logits < logits.amax(-1, keepdim=True))
        return torch.where(dropped, -math.inf, logits)
