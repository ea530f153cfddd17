"""The gated delta rule: a state that forgets and is corrected by each token."""

from __future__ import annotations

import torch
from torch import Tensor

from decodekit.kernels import triton_runs
from decodekit.kernels.gated_delta import reference

__all__ = ["chunked_gated_delta", "gated_delta"]

_WIDEST = 512  # bytes of a query or a value whose chunks the GPU's shared memory holds


def gated_delta(
    states: Tensor,
    slots: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    scale: float | None = None,
    normalize: bool = False,
) -> Tensor:
    """See :func:`decodekit.kernels.gated_delta.reference.gated_delta`; one kernel on a GPU, in float32."""
    arguments = states, slots, query, key, value, decay, beta
    if triton_runs(value.device) and value.dtype != torch.float64:
        from decodekit.kernels.gated_delta import triton

        return triton.gated_delta(*arguments, scale=scale, normalize=normalize)
    return reference.gated_delta(*arguments, scale=scale, normalize=normalize)


def chunked_gated_delta(
    states: Tensor,
    slots: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    lengths: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
) -> Tensor:
    """See :func:`decodekit.kernels.gated_delta.reference.chunked_gated_delta`; three kernels on a GPU.

    Products there are of the dtype of ``value``, summed in float32. Heads of more than 512 bytes are computed as there.
    """
    arguments = states, slots, query, key, value, decay, beta
    fits = max(key.shape[-1], value.shape[-1]) * value.element_size() <= _WIDEST
    if fits and triton_runs(value.device) and value.dtype != torch.float64:
        from decodekit.kernels.gated_delta.chunked import triton

        return triton.chunked_gated_delta(*arguments, lengths=lengths, scale=scale, normalize=normalize)
    return reference.chunked_gated_delta(*arguments, lengths=lengths, scale=scale, normalize=normalize)
