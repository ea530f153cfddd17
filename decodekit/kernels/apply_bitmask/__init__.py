"""Exclude the tokens whose bits are not set."""

from __future__ import annotations

from torch import Tensor

from decodekit.kernels import triton_runs
from decodekit.kernels.apply_bitmask import reference

__all__ = ["apply_bitmask"]


def apply_bitmask(logits: Tensor, words: Tensor) -> None:
    """See :func:`decodekit.kernels.apply_bitmask.reference.apply_bitmask`; on a GPU only what is excluded is written."""
    if triton_runs(logits.device):
        from decodekit.kernels.apply_bitmask import triton

        triton.apply_bitmask(logits, words)
    else:
        reference.apply_bitmask(logits, words)
