"""Keep the tokens whose logit lies within n standard deviations of the best one."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decodekit import Rows, Rule


class TopNSigma(Rule):
    """Top-n-sigma sampling.

    Tang et al., 2024, arXiv:2411.07641, section 3: a token stays when its logit is at least max - n * sigma, sigma being the
    standard deviation of the logits. The kept set does not change with temperature. Cost: two passes over [P, V].
    """

    cost: ClassVar[str] = "two passes over the vocabulary"
    sampling_only: ClassVar[bool] = True
    capturable: ClassVar[bool] = True

    kind: Literal["top_n_sigma"] = "top_n_sigma"
    n: float = Field(1.0, gt=0, description="standard deviations below the best logit that are kept")

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        """[P, V] to [P, V]; tokens that are already masked do not count towards sigma."""
        values = logits.to(torch.promote_types(logits.dtype, torch.float32))
        legal = values > -torch.inf
        count = legal.sum(-1, keepdim=True)
        mean = values.where(legal, 0.0).sum(-1, keepdim=True) / count
        sigma = ((values - mean).where(legal, 0.0).square().sum(-1, keepdim=True) / count).sqrt()
        return logits.masked_fill(values < values.amax(-1, keepdim=True) - self.n * sigma, -torch.inf)
