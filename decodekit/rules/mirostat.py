"""Mirostat: hold the surprise of the output at a target by moving the border of what may be sampled."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.protocols import Rule
from decodekit.core.types import Request, Rows


class Mirostat(Rule):
    """Keep the tokens of surprise mu or less, and the most likely one in any case; mu follows the surprise of the output.

    Basu et al., 2021, arXiv:2007.14966, in the form without an estimate of Zipf's exponent, known as version 2. Each row
    starts at mu = 2 tau, and every token of surprise S moves it by -eta (S - tau); S is -log2 of the probability with which
    the token was drawn, after all rules. Helps where long texts turn repetitive or incoherent; put it last. Cost: a
    softmax, and one more over each row's final logits.
    """

    cost: ClassVar[str] = "O(V)"
    sampling_only: ClassVar[bool] = True

    kind: Literal["mirostat"] = "mirostat"
    tau: float = Field(5.0, description="surprise that is aimed at, in bits a token", gt=0, allow_inf_nan=False)
    eta: float = Field(0.1, description="how fast the border follows", gt=0, allow_inf_nan=False)

    def init_state(self, request: Request) -> float:
        """Mu, the most surprise in bits that a token may have."""
        return 2 * self.tau

    def commit(self, state: float, token: int, logits: Tensor) -> float:
        wide = torch.promote_types(logits.dtype, torch.float32)
        surprise = -float(logits.log_softmax(-1, dtype=wide)[token]) / math.log(2)
        return state - self.eta * (surprise - self.tau)

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        log_probs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        mu = torch.tensor(rows.states, dtype=log_probs.dtype, device=logits.device).unsqueeze(-1)
        dropped = (log_probs < -mu * math.log(2)) & (logits < logits.amax(-1, keepdim=True))
        return torch.where(dropped, -math.inf, logits)
