"""Contrasts of distributions, in plain torch."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["jsd", "official"]
Form = Literal["logits", "ratio", "guided"]


def contrast(
    expert: Tensor,
    amateur: Tensor,
    weight: float | Tensor,
    form: Form = "logits",
    *,
    share: float = 0.0,
    temperature: float = 1.0,
) -> Tensor:
    """What an expert says, with what an amateur says subtracted, on the tokens that the expert finds plausible.

    Args:
        expert: [P, V] logits z_e; a token without any (-inf) gets -inf.
        amateur: [P, V] logits z_a; a token that it alone excludes gets no finite number.
        weight: w of all positions, or [P].
        form: ``logits`` is (1 + w) z_e - w z_a (O'Brien and Lewis, 2023, arXiv:2309.09117, section 2; Shi et al., 2023,
            arXiv:2305.14739, section 2.2), ``ratio`` is log p_e - w log p_a (Li et al., 2022, arXiv:2210.15097, eq. 2),
            ``guided`` is log p_a + w (log p_e - log p_a) (Sanchez et al., 2023, arXiv:2306.17806, eq. 7).
        share: 0 to 1; tokens below this share of the expert's top probability get -inf, 0 keeps all (Li et al., section 3.3).
        temperature: divides the amateur's logits.

    Returns:
        [P, V].
    """
    if temperature != 1:
        amateur = amateur / temperature
    if isinstance(weight, Tensor):
        weight = weight.unsqueeze(-1)
    log_probs = expert.log_softmax(-1) if share or form != "logits" else expert
    if form == "logits":
        scores = (1 + weight) * expert - weight * amateur
    elif form == "ratio":
        scores = log_probs - weight * amateur.log_softmax(-1)
    else:
        negative = amateur.log_softmax(-1)
        scores = negative + weight * (log_probs - negative)
    return scores.masked_fill(_implausible(log_probs, share), -math.inf)


def contrast_layers(
    final: Tensor, early: Tensor, *, share: float = 0.0, divergence: Divergence = "jsd"
) -> tuple[Tensor, Tensor, Tensor]:
    """The final layer's log-probabilities, less those of the early layer whose distribution diverges most from it.

    Chuang et al., 2023, arXiv:2309.03883, eq. 1-6. The layer is chosen for each position, the first of equal ones.

    Args:
        final: [P, V] logits of the final layer.
        early: [C, P, V] logits of the candidate layers.
        share: 0 to 1; tokens below this share of the final layer's top probability get -inf, 0 keeps all.
        divergence: see :func:`layer_divergence`.

    Returns:
        [P, V] the contrast; [P] int64, which candidate was chosen; and [P] its divergence in nats.
    """
    final, early = final.log_softmax(-1), early.log_softmax(-1)
    apart = _divergence(final, early, divergence)
    chosen = apart.argmax(0)
    premature = early[chosen, torch.arange(len(chosen), device=chosen.device)]
    scores = (final - premature).masked_fill(_implausible(final, share), -math.inf)
    return scores, chosen, apart.gather(0, chosen.unsqueeze(0)).squeeze(0)


def layer_divergence(final: Tensor, early: Tensor, divergence: Divergence = "jsd") -> Tensor:
    """Divergence in nats between each early layer's distribution q and the final layer's p, with M = (p + q) / 2.

    Args:
        final: [P, V] logits of the final layer.
        early: [C, P, V] logits of the candidate layers.
        divergence: ``jsd`` is 1/2 KL(p, M) + 1/2 KL(q, M); ``official`` is 1/2 KL(M, p) + 1/2 KL(M, q), what the code
            published with DoLa computes.

    Returns:
        [C, P].
    """
    return _divergence(final.log_softmax(-1), early.log_softmax(-1), divergence)


def _divergence(final: Tensor, early: Tensor, divergence: Divergence) -> Tensor:
    mixture = torch.logaddexp(final, early) - math.log(2)

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        # A token without mass in a adds nothing, also where b has none (there the difference is NaN).
        return torch.where(log_a == -math.inf, 0.0, log_a.exp() * (log_a - log_b)).sum(-1)

    if divergence == "jsd":
        return 0.5 * (kl(final, mixture) + kl(early, mixture))
    return 0.5 * (kl(mixture, final) + kl(mixture, early))


def _implausible(log_probs: Tensor, share: float) -> Tensor:
    """[P, V] bool: the tokens below ``share`` of their position's top probability, and those without any."""
    without = log_probs == -math.inf
    return (log_probs < log_probs.amax(-1, keepdim=True) + math.log(share)) | without if share else without
