"""Rotate queries and keys to their positions."""

from __future__ import annotations

from torch import Tensor

from decodekit.kernels import triton_runs
from decodekit.kernels.rotary import reference

__all__ = ["rotary"]


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`decodekit.kernels.rotary.reference.rotary`; one kernel on a GPU."""
    if triton_runs(query.device):
        from decodekit.kernels.rotary import triton

        return triton.rotary(query, key, cos, sin)
    return reference.rotary(query, key, cos, sin)
