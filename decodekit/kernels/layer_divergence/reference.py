"""Jensen-Shannon divergence of candidate layers, in plain torch."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["jsd", "official"]


def layer_divergence(final: Tensor, early: Tensor, divergence: Divergence = "jsd") -> Tensor:
    """Divergence in nats between each early layer q and the final layer p, with M = (p + q) / 2.

    Args:
        final: [P, V] log-probabilities of the final layer.
        early: [C, P, V] log-probabilities of the candidate layers.
        divergence: ``jsd`` is 1/2 KL(p, M) + 1/2 KL(q, M); ``official`` is 1/2 KL(M, p) + 1/2 KL(M, q), what the code
            published with DoLa computes.

    Returns:
        [C, P].
    """
    mixture = torch.logaddexp(final, early) - math.log(2)

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        # A token without mass in a adds nothing, also where b has none (there the difference is NaN).
        return torch.where(log_a == -math.inf, 0.0, log_a.exp() * (log_a - log_b)).sum(-1)

    if divergence == "jsd":
        return 0.5 * (kl(final, mixture) + kl(early, mixture))
    return 0.5 * (kl(mixture, final) + kl(mixture, early))
