"""Linear layers in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def linear(
    hidden: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    residual: Tensor | None = None,
) -> Tensor:
    """``hidden W^T + b`` of one to three layers, side by side.

    Args:
        hidden: [M, K].
        weights: [N, K] each.
        biases: [N] each, or ``None``.
        residual: [M, sum of N] added to it, in float32; ``None``: nothing.

    Returns:
        [M, sum of N] of the dtype of ``hidden``.
    """
    parts = [functional.linear(hidden, *own) for own in zip(weights, biases, strict=True)]
    output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return output if residual is None else (output.float() + residual.float()).to(output.dtype)


def gated_linear(hidden: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """``silu(hidden G^T) * (hidden U^T)`` (Shazeer, 2020, arXiv:2002.05202, SwiGLU).

    Args:
        hidden: [M, K].
        gate: [N, K].
        up: [N, K].

    Returns:
        [M, N] of the dtype of ``hidden``.
    """
    return functional.silu(functional.linear(hidden, gate)) * functional.linear(hidden, up)
