"""RMSNorm in plain torch."""

from __future__ import annotations

from torch import Tensor


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Each row over its root mean square, times the weight (Zhang and Sennrich, 2019, arXiv:1910.07467).

    Args:
        hidden: [..., H].
        weight: [H].
        eps: added to the mean square.
        offset: added to the weight; 1 in Gemma.

    Returns:
        [..., H] of the dtype of ``hidden``; computed in float32.
    """
    wide = hidden.float()
    scaled = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return (scaled * (weight.float() + offset)).to(hidden.dtype)
