"""Move the scores of tokens that already occurred, each once."""

from __future__ import annotations

import torch
from torch import Tensor

from decodekit.kernels import MOST_PROGRAMS, triton_runs
from decodekit.kernels.repetition_penalty import reference

__all__ = ["penalize_repeated"]


def penalize_repeated(logits: Tensor, tokens: Tensor, start: Tensor | None, stop: Tensor, penalty: float) -> Tensor:
    """See :func:`decodekit.kernels.repetition_penalty.reference.penalize_repeated`; on a GPU a copy and one kernel."""
    if triton_runs(logits.device) and logits.dtype != torch.float64 and len(logits) <= MOST_PROGRAMS:
        from decodekit.kernels.repetition_penalty import triton

        return triton.penalize_repeated(logits, tokens, start, stop, penalty)
    return reference.penalize_repeated(logits, tokens, start, stop, penalty)
