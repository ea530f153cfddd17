"""Scatter K/V by slot, in plain torch."""

from __future__ import annotations

from torch import Tensor


def kv_write(key_cache: Tensor, value_cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store the K/V of N tokens, rounded to the dtype of the caches; all other slots stay as they are.

    Args:
        key_cache: [S, H, D], written in place.
        value_cache: [S, H, Dv], written in place.
        slots: [N] int64, different from each other; on a GPU with Triton, a token of slot -1 is left out.
        keys: [N, H, D].
        values: [N, H, Dv].
    """
    key_cache.index_copy_(0, slots, keys.to(key_cache.dtype))
    value_cache.index_copy_(0, slots, values.to(value_cache.dtype))
