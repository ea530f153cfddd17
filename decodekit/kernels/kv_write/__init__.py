"""Write the K/V of new tokens into their slots."""

from __future__ import annotations

from torch import Tensor

from decodekit.kernels import triton_runs
from decodekit.kernels.kv_write import reference

__all__ = ["kv_write"]


def kv_write(key_cache: Tensor, value_cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """See :func:`decodekit.kernels.kv_write.reference.kv_write`; one Triton kernel on a GPU."""
    if triton_runs(key_cache.device):
        from decodekit.kernels.kv_write import triton

        triton.kv_write(key_cache, value_cache, slots, keys, values)
    else:
        reference.kv_write(key_cache, value_cache, slots, keys, values)
