"""Divide rows by their root mean square."""

from __future__ import annotations

from torch import Tensor

from decodekit.kernels import triton_runs
from decodekit.kernels.rms_norm import reference

__all__ = ["rms_norm"]


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """See :func:`decodekit.kernels.rms_norm.reference.rms_norm`; one kernel on a GPU."""
    if triton_runs(hidden.device):
        from decodekit.kernels.rms_norm import triton

        return triton.rms_norm(hidden, weight, eps, offset)
    return reference.rms_norm(hidden, weight, eps, offset)
