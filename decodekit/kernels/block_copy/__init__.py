"""Copy whole blocks of K/V from one place to another."""

from __future__ import annotations

from torch import Tensor

from decodekit.kernels import triton_runs
from decodekit.kernels.block_copy import reference

__all__ = ["block_copy"]


def block_copy(cache: Tensor, source: Tensor, target: Tensor, *, block_size: int) -> None:
    """See :func:`decodekit.kernels.block_copy.reference.block_copy`; one Triton kernel on a GPU."""
    if triton_runs(cache.device):
        from decodekit.kernels.block_copy import triton

        triton.block_copy(cache, source, target, block_size=block_size)
    else:
        reference.block_copy(cache, source, target, block_size=block_size)
