"""How far each early layer's distribution is from the final one."""

from __future__ import annotations

import torch
from torch import Tensor

from decodekit.kernels import triton_runs
from decodekit.kernels.layer_divergence import reference
from decodekit.kernels.layer_divergence.reference import Divergence

__all__ = ["Divergence", "layer_divergence"]


def layer_divergence(final: Tensor, early: Tensor, divergence: Divergence = "jsd") -> Tensor:
    """See :func:`decodekit.kernels.layer_divergence.reference.layer_divergence`; one pass over both on a GPU, in float32."""
    if triton_runs(final.device) and final.dtype != torch.float64:
        from decodekit.kernels.layer_divergence import triton

        return triton.layer_divergence(final, early, divergence)
    return reference.layer_divergence(final, early, divergence)
