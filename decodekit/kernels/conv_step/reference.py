"""A causal depthwise convolution by slot, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def conv_step(
    states: Tensor,
    slots: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """Convolve one token or a few of each row, each channel by itself, with the columns before them.

    Args:
        states: [S, C, k] the last k columns of each row, written in place at the slots; all others stay.
        slots: [R] int64, each row's state, different from each other; -1: none, the row's output is zero. ``None``: the
            rows' own numbers.
        hidden: [R, C, T], T at least 1.
        weight: [C, k]; the last column is the newest token's.
        bias: [C].
        silu: apply SiLU to the result.

    Returns:
        [R, C, T] of the dtype of ``hidden``; computed in float32, or in float64 where ``hidden`` is.
    """
    dtype, width = torch.promote_types(torch.float32, hidden.dtype), weight.shape[1]
    state = states if slots is None else states[slots.clamp(min=0)]
    columns = torch.cat([state.to(dtype), hidden.to(dtype)], -1)
    output = torch.einsum("rctk,ck->rct", columns[..., 1:].unfold(-1, width, 1), weight.to(dtype))
    if bias is not None:
        output = output + bias.to(dtype)[:, None]
    if silu:
        output = torch.nn.functional.silu(output)
    if slots is None:
        states.copy_(columns[..., -width:])
        return output.to(hidden.dtype)
    there = slots >= 0
    states[slots[there]] = columns[there, :, -width:].to(states.dtype)
    return torch.where(there[:, None, None], output, 0).to(hidden.dtype)
