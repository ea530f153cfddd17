"""Min-p: sample among the tokens that are not much less likely than the best one."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.protocols import Rule
from decodekit.core.types import Rows


class MinP(Rule):
    """Keep the tokens at least p times as likely as the most likely one.

    Nguyen et al., 2024, arXiv:2407.01082, section 3. A confident model keeps few tokens, an unsure one many. Cost: two
    passes over the logits; no softmax, as z >= max z + log p says the same.
    """

    cost: ClassVar[str] = "O(V)"
    sampling_only: ClassVar[bool] = True
    capturable: ClassVar[bool] = True

    kind: Literal["min_p"] = "min_p"
    p: float = Field(description="share of the best token's probability, in (0, 1]", gt=0, le=1)

    def as_filter(self) -> tuple[Literal["min_p"], float]:
        """See the base."""
        return "min_p", self.p

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        best = logits.amax(-1, keepdim=True).to(torch.promote_types(logits.dtype, torch.float32))
        return torch.where(logits < best + math.log(self.p), -math.inf, logits)
