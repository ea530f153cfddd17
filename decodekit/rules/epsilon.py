"""Epsilon: sample among the tokens of at least a fixed probability."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.protocols import Rule
from decodekit.core.types import Rows


class Epsilon(Rule):
    """Keep the tokens of probability epsilon or more, and the most likely one in any case.

    Hewitt, Manning and Liang, 2022, arXiv:2210.15191: an absolute threshold cuts what a smoothed model only seems to
    allow; the paper suggests 3e-4 to 9e-4. Cost: a softmax.
    """

    cost: ClassVar[str] = "O(V)"
    sampling_only: ClassVar[bool] = True
    capturable: ClassVar[bool] = True

    kind: Literal["epsilon"] = "epsilon"
    epsilon: float = Field(description="lowest probability that is kept, in (0, 1)", gt=0, lt=1)

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        dropped = (probabilities < self.epsilon) & (logits < logits.amax(-1, keepdim=True))
        return torch.where(dropped, -math.inf, logits)
