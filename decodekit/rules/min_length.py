"""Minimum length: no end before n tokens."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.constants import constant
from decodekit.core.protocols import Rule
from decodekit.core.tokens import check_ids
from decodekit.core.types import Rows


class MinLength(Rule):
    """Ban the tokens that end a sequence until the output has n tokens.

    The ``min_new_tokens`` of Hugging Face; stop strings are not affected. Cost: one pass over the logits.
    """

    cost: ClassVar[str] = "O(V)"
    capturable: ClassVar[bool] = True

    kind: Literal["min_length"] = "min_length"
    n: int = Field(description="fewest tokens of an output, its end not counted", ge=1)

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        if not rows.eos:
            return logits
        check_ids(rows.eos, logits.shape[-1], "min_length")
        unending = logits.index_fill(1, constant(rows.eos, logits.device, torch.int64), -math.inf)
        return torch.where((rows.positions < self.n).unsqueeze(-1), unending, logits)
