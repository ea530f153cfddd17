"""Linear layers on few rows: several at once, the residual added, or gated."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from decodekit.kernels import triton_runs
from decodekit.kernels.linear import reference

__all__ = ["MOST_ROWS", "gated_linear", "linear"]

MOST_ROWS = 64
"""Beyond these torch's own product is as fast."""


def linear(
    hidden: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    residual: Tensor | None = None,
) -> Tensor:
    """See :func:`decodekit.kernels.linear.reference.linear`; on a GPU in one kernel, which reads the weights once."""
    if triton_runs(hidden.device) and hidden.shape[0] <= MOST_ROWS:
        from decodekit.kernels.linear import triton

        return triton.linear(hidden, weights, biases, residual)
    return reference.linear(hidden, weights, biases, residual)


def gated_linear(hidden: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """See :func:`decodekit.kernels.linear.reference.gated_linear`; on a GPU in one kernel, which reads the weights once."""
    if triton_runs(hidden.device) and hidden.shape[0] <= MOST_ROWS:
        from decodekit.kernels.linear import triton

        return triton.gated_linear(hidden, gate, up)
    return reference.gated_linear(hidden, gate, up)
