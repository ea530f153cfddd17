"""A causal convolution of new tokens, which keeps the columns it will need again."""

from __future__ import annotations

import torch
from torch import Tensor

from decodekit.kernels import triton_runs
from decodekit.kernels.conv_step import reference

__all__ = ["conv_step"]


def conv_step(
    states: Tensor,
    slots: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """See :func:`decodekit.kernels.conv_step.reference.conv_step`; one kernel on a GPU, in float32."""
    if triton_runs(hidden.device) and hidden.dtype != torch.float64:
        from decodekit.kernels.conv_step import triton

        return triton.conv_step(states, slots, hidden, weight, bias, silu)
    return reference.conv_step(states, slots, hidden, weight, bias, silu)
