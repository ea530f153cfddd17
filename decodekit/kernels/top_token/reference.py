"""The largest logit of a row in plain torch."""

from __future__ import annotations

from torch import Tensor


def top_token(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, and its token: of equal ones the first.

    Args:
        logits: [P, V]; NaN counts as the largest.

    Returns:
        [P] of the logits' dtype, and [P] int64.
    """
    top, tokens = logits.max(-1)
    return top, tokens
