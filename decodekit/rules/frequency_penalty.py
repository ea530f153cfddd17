"""Frequency penalty: the more often a token occurred, the less likely it becomes."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.protocols import Rule
from decodekit.core.types import Rows, Scope


class FrequencyPenalty(Rule):
    """Lower the logit of each token by the penalty times how often it already occurred.

    The ``frequency_penalty`` of the OpenAI API, where the prompt does not count. A negative penalty encourages
    repetition. Cost: one pass over the logits and one over the history.
    """

    cost: ClassVar[str] = "O(V + L)"
    capturable: ClassVar[bool] = True

    kind: Literal["frequency_penalty"] = "frequency_penalty"
    penalty: float = Field(
        description="each occurrence lowers the logit by it; negative encourages repetition", ge=-2, le=2
    )
    scope: Scope = Field("output", description="where occurrences count: prompt, output or both")

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        if self.penalty == 0:
            return logits
        counts = rows.counts(logits.shape[-1], self.scope)
        # The counts are float32, so that the difference is too; it is rounded once.
        return torch.sub(logits, counts, alpha=self.penalty).to(logits.dtype)
