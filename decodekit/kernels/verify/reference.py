"""Rejection sampling of drafted siblings, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def verify(p: Tensor, drafted: Sequence[int], q: Tensor, accepts: Sequence[float]) -> tuple[int | None, Tensor]:
    """Which drafted token is taken, and from what the next one is drawn where none is: both together are distributed as ``p``.

    Leviathan et al., 2023, arXiv:2211.17192, algorithm 1: a token that was drawn from q is accepted with min(1, p / q), and
    after a rejection the target is norm(max(p - q, 0)), a vector. Siblings are tried in turn, each against what the ones
    before it left (Miao et al., 2024, arXiv:2305.09781, section 4.3).

    Args:
        p: [V] the target's probabilities; need not sum to one.
        drafted: [C] tokens, each drawn from its row of ``q``, which may depend on those before it.
        q: [C, V] the distributions they were drawn from; rows need not sum to one.
        accepts: [C] uniforms in [0, 1).

    Returns:
        the place of the accepted token among the drafted ones, or ``None``; and [V] float64, what is left of the target.
    """
    left = p.double() / p.double().sum()
    drawn_from = q.double() / q.double().sum(-1, keepdim=True)
    for place, (token, own, accept) in enumerate(zip(drafted, drawn_from, accepts, strict=True)):
        residual = (left - own).clamp(min=0)
        mass = residual.sum()
        # Rounding may leave nothing of a target that equals q, where rejection has no probability either.
        if accept * own[token] < left[token] or not mass > 0:
            return place, left
        left = residual / mass
    return None, left
