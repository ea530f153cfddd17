"""Two distributions held against each other, and the final layer's against those of early layers."""

from __future__ import annotations

import torch
from torch import Tensor

from decodekit.kernels import MOST_PROGRAMS, triton_runs
from decodekit.kernels.contrast import reference
from decodekit.kernels.contrast.reference import Divergence, Form

__all__ = ["Divergence", "Form", "contrast", "contrast_layers", "layer_divergence"]


def contrast(
    expert: Tensor,
    amateur: Tensor,
    weight: float | Tensor,
    form: Form = "logits",
    *,
    share: float = 0.0,
    temperature: float = 1.0,
) -> Tensor:
    """See :func:`decodekit.kernels.contrast.reference.contrast`; on a GPU at most two kernels, in float32."""
    if _kernels_run(expert):
        from decodekit.kernels.contrast import triton

        return triton.contrast(expert, amateur, weight, form, share=share, temperature=temperature)
    return reference.contrast(expert, amateur, weight, form, share=share, temperature=temperature)


def contrast_layers(
    final: Tensor, early: Tensor, *, share: float = 0.0, divergence: Divergence = "jsd"
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`decodekit.kernels.contrast.reference.contrast_layers`; on a GPU three kernels, in float32."""
    if _kernels_run(final):
        from decodekit.kernels.contrast import triton

        return triton.contrast_layers(final, early, share=share, divergence=divergence)
    return reference.contrast_layers(final, early, share=share, divergence=divergence)


def layer_divergence(final: Tensor, early: Tensor, divergence: Divergence = "jsd") -> Tensor:
    """See :func:`decodekit.kernels.contrast.reference.layer_divergence`; on a GPU in float32."""
    if _kernels_run(final):
        from decodekit.kernels.contrast import triton

        return triton.layer_divergence(final, early, divergence)
    return reference.layer_divergence(final, early, divergence)


def _kernels_run(logits: Tensor) -> bool:
    return triton_runs(logits.device) and logits.dtype != torch.float64 and len(logits) <= MOST_PROGRAMS
