"""Repetition penalty: make tokens that already occurred less likely."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from decodekit.core.protocols import Rule
from decodekit.core.types import Rows, Scope
from decodekit.kernels.repetition_penalty import penalize_repeated


class RepetitionPenalty(Rule):
    """Divide the positive logits of tokens that already occurred by the penalty, and multiply the negative ones by it.

    Keskar et al., 2019, arXiv:1909.05858, section 4.1; a penalty above 1 lowers the score whatever its sign. How often
    a token occurred does not matter. Cost: one pass over the logits and one over the history.
    """

    cost: ClassVar[str] = "O(V + L)"
    capturable: ClassVar[bool] = True

    kind: Literal["repetition_penalty"] = "repetition_penalty"
    penalty: float = Field(
        description="above 1 discourages repetition, below 1 encourages it", gt=0, allow_inf_nan=False
    )
    scope: Scope = Field("both", description="where a token must have occurred: prompt, output or both")

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        if self.penalty == 1:
            return logits
        start = rows.prompt_lengths if self.scope == "output" else None
        stop = rows.prompt_lengths if self.scope == "prompt" else rows.lengths
        return penalize_repeated(logits, rows.tokens, start, stop, self.penalty)
