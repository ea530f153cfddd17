"""The repetition penalty in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def penalize_repeated(logits: Tensor, tokens: Tensor, start: Tensor | None, stop: Tensor, penalty: float) -> Tensor:
    """Divide the positive logits of tokens that occurred by the penalty, and multiply the negative ones by it.

    Keskar et al., 2019, arXiv:1909.05858, section 4.1. How often a token occurred does not matter.

    Args:
        logits: [P, V]; not changed.
        tokens: [P, L] int64 ids; those of V and more are none of the logits'.
        start: [P] int64, the column of ``tokens`` from which on a token has occurred; ``None`` for the first.
        stop: [P] int64, the column before which it has.
        penalty: above 0; above 1 lowers the logits.

    Returns:
        [P, V].
    """
    column = torch.arange(tokens.shape[1], device=tokens.device)
    occurred = (column < stop.unsqueeze(-1)) & (tokens < logits.shape[-1])
    if start is not None:
        occurred &= column >= start.unsqueeze(-1)
    ids = tokens.clamp(max=logits.shape[-1] - 1)
    scores = logits.gather(1, ids)
    penalized = torch.where(scores > 0, scores / penalty, scores * penalty)
    # A penalty moves every score the same way, so that a token that occurs often is still penalized once.
    mode, nothing = ("amin", math.inf) if penalty > 1 else ("amax", -math.inf)
    return logits.scatter_reduce(1, ids, penalized.where(occurred, nothing), mode)
