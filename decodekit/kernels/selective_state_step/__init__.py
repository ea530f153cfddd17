"""One token of a selective state space model (Mamba, Mamba-2)."""

from __future__ import annotations

import torch
from torch import Tensor

from decodekit.kernels import triton_runs
from decodekit.kernels.selective_state_step import reference

__all__ = ["selective_state_step"]


def selective_state_step(
    states: Tensor,
    slots: Tensor | None,
    hidden: Tensor,
    step: Tensor,
    a_log: Tensor | None,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    gate: Tensor | None = None,
    step_bias: Tensor | None = None,
    softplus: bool = True,
    limits: tuple[float, float] | None = None,
    a: Tensor | None = None,
    check: bool = True,
) -> Tensor:
    """See :func:`decodekit.kernels.selective_state_step.reference.selective_state_step`; one kernel on a GPU, in float32.

    Args:
        states: as there.
        slots: as there.
        hidden: as there.
        step: as there.
        a_log: as there.
        b: as there.
        c: as there.
        d: as there.
        gate: as there.
        step_bias: as there.
        softplus: as there.
        limits: as there.
        a: as there.
        check: look whether ``a`` is below 0, which waits for the GPU; a caller that has it from its logarithm needs not.

    Returns:
        as there.

    Raises:
        ValueError: neither or both of ``a_log`` and ``a`` are given, or ``a`` is not below 0: the state would grow forever.
    """
    if (a_log is None) == (a is None):
        raise ValueError("give either a_log or a")
    if a is not None and check and not bool((a < 0).all()):
        raise ValueError("a must be below 0, or the state grows without bound; give a_log, or a = -exp(a_log)")
    arguments = states, slots, hidden, step, a_log, b, c, d, gate, step_bias, softplus, limits, a
    if triton_runs(hidden.device) and hidden.dtype != torch.float64:
        from decodekit.kernels.selective_state_step import triton

        return triton.selective_state_step(*arguments)
    return reference.selective_state_step(*arguments)
