"""One token of a selective state space model by slot, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


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
) -> Tensor:
    """The new state ``exp(step a) S + step x b^T`` and the output ``S c + d x``, with x of ``hidden``.

    Mamba (Gu and Dao, 2023, arXiv:2312.00752, algorithm 2) has states of D channels, each with a row of ``a`` and a time step
    of its own; Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060, section 7) H heads of P channels, which share a number and a step.

    Args:
        states: [S, D, N] or [S, H, P, N], of single precision or less (double here), written in place at the slots; all
            others stay.
        slots: [R] int64, each row's state, different from each other; -1: none, the row's output is zero. ``None``: the
            rows' own numbers.
        hidden: [R, D] or [R, H, P].
        step: [R, D], or [R, H] or [R, H, P]: time steps before bias, softplus and limits.
        a_log: [D, N], or [H] or [H, P, N]: the logarithm of -a, which is below 0 so that states fade.
        b: [R, N], or [R, G, N], each for H / G consecutive heads.
        c: as ``b``.
        d: [D], or [H] or [H, P]: how much of the input is added to the output.
        gate: of the shape of ``hidden``; its SiLU multiplies the output.
        step_bias: [D], or [H] or [H, P].
        softplus: of the time steps, after the bias.
        limits: what the time steps are clamped to in the end.
        a: instead of ``a_log``.

    Returns:
        Of the shape and dtype of ``hidden``; computed in float32, or in float64 where ``hidden`` is.
    """
    dtype = torch.promote_types(torch.float32, hidden.dtype)

    def wide(own: Tensor, dimensions: int) -> Tensor:
        return (own if own.dim() == dimensions else own.unsqueeze(-1)).to(dtype)

    channels = hidden.dim() - 1  # dimensions of them
    state = (states if slots is None else states[slots.clamp(min=0)]).to(dtype)
    given = hidden.to(dtype)
    time = wide(step, 1 + channels)
    if step_bias is not None:
        time = time + wide(step_bias, channels)
    if softplus:
        time = torch.nn.functional.softplus(time)
    if limits is not None:
        time = time.clamp(*limits)
    rate = a.to(dtype) if a_log is None and a is not None else -a_log.to(dtype).exp()  # type: ignore[union-attr]
    rate = rate[:, None, None] if rate.dim() == 1 else rate
    if channels == 2:
        b, c = (own.repeat_interleave(hidden.shape[1] // own.shape[1], 1) for own in (b, c))
    b, c = (own.to(dtype).unsqueeze(-2) for own in (b, c))
    state = state * (time[..., None] * rate).exp() + (time * given)[..., None] * b
    output = (state * c).sum(-1)
    if d is not None:
        output = output + wide(d, channels) * given
    if gate is not None:
        output = output * torch.nn.functional.silu(gate.to(dtype))
    if slots is None:
        states.copy_(state)
        return output.to(hidden.dtype)
    there = slots >= 0
    states[slots[there]] = state[there].to(states.dtype)
    return torch.where(there.view(-1, *[1] * channels), output, 0).to(hidden.dtype)
