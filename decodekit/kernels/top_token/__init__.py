"""The most likely token of each row."""

from __future__ import annotations

from torch import Tensor

from decodekit.kernels import triton_runs
from decodekit.kernels.top_token import reference

__all__ = ["top_token"]


def top_token(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`decodekit.kernels.top_token.reference.top_token`; on a GPU many programs share a row."""
    if triton_runs(logits.device) and logits.element_size() <= 4:
        from decodekit.kernels.top_token import triton

        return triton.top_token(logits)
    return reference.top_token(logits)
