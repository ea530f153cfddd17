"""Which tokens a contrast may choose from: those that the model itself finds likely enough."""

from __future__ import annotations

import math

from torch import Tensor


def implausible(log_probs: Tensor, share: float) -> Tensor:
    """[P, V] bool: the tokens below ``share`` of their position's top probability, and those without any.

    Li et al., 2022, arXiv:2210.15097, section 3.3.

    Args:
        log_probs: [P, V] log-probabilities of the model.
        share: 0 to 1; 0 keeps every token with a probability, 1 the top alone.
    """
    floor = log_probs.amax(-1, keepdim=True) + (math.log(share) if share else -math.inf)
    return (log_probs < floor) | (log_probs == -math.inf)
