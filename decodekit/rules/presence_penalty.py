"""Presence penalty: make tokens that already occurred less likely by a fixed amount."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.protocols import Rule
from decodekit.core.types import Rows, Scope


class PresencePenalty(Rule):
    """Lower the logit of each token that already occurred by the penalty, however often it did.

    The ``presence_penalty`` of the OpenAI API, where the prompt does not count. A negative penalty encourages
    repetition. Cost: one pass over the logits and one over the history.
    """

    cost: ClassVar[str] = "O(V + L)"
    capturable: ClassVar[bool] = True

    kind: Literal["presence_penalty"] = "presence_penalty"
    penalty: float = Field(
        description="lowers the logit of what occurred by it; negative encourages repetition", ge=-2, le=2
    )
    scope: Scope = Field("output", description="where occurrences count: prompt, output or both")

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        if self.penalty == 0:
            return logits
        counts = rows.counts(logits.shape[-1], self.scope).clamp_(max=1)
        # The counts are float32, so that the difference is too; it is rounded once.
        return torch.sub(logits, counts, alpha=self.penalty).to(logits.dtype)
