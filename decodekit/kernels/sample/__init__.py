"""Draw a token of each row: temperature, top-k, top-p, min-p and the pick in one go."""

from __future__ import annotations

from torch import Tensor

from decodekit.kernels import triton_runs
from decodekit.kernels.sample import reference

__all__ = ["sample"]


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    counters: Tensor,
    logprobs: Tensor | None = None,
    broken: Tensor | None = None,
) -> Tensor:
    """See :func:`decodekit.kernels.sample.reference.sample`; on a GPU Triton kernels, which sort nothing."""
    if triton_runs(logits.device):
        from decodekit.kernels.sample import triton

        return triton.sample(logits, temperature, top_k, top_p, min_p, seeds, counters, logprobs, broken)
    return reference.sample(logits, temperature, top_k, top_p, min_p, seeds, counters, logprobs, broken)
