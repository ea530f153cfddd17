"""The gated delta rule in plain torch: token by token, and by chunks in the WY representation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK = 64
"""Tokens that the chunked form takes at a time."""
_EPS = 1e-6  # added to a squared length


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
    """One token or a few of each row, in turn (Yang et al., 2024, arXiv:2412.06464, equation 10).

    With ``S = exp(decay) S'``, the state before a token after its decay, the state after it is
    ``S + beta k (v - S^T k)^T`` and the output its product with ``scale q``.

    Args:
        states: [S, H, K, V], of single precision or less (double here), written in place at the slots; all others stay.
        slots: [R] int64, each row's state, different from each other; -1: none, the row's output is zero. ``None``: the
            rows' own numbers.
        query: [R, T, Hk, K], T at least 1; each of its heads serves H / Hk consecutive heads of the state.
        key: [R, T, Hk, K].
        value: [R, T, H, V].
        decay: [R, T, H], the logarithm of what remains of the state, in nats and at most 0.
        beta: [R, T, H], how much of a value's error is written.
        scale: of the queries; ``K ** -0.5`` by default.
        normalize: divide queries and keys by their length (the square root of their squares' sum and 1e-6) first.

    Returns:
        [R, T, H, V] of the dtype of ``value``; computed in float32, or in float64 where ``value`` is.
    """
    state, query, key, wide, decay, beta = _prepare(states, slots, query, key, value, decay, beta, scale, normalize)
    outputs = []
    for token in range(value.shape[1]):
        state = state * decay[:, :, token, None, None].exp()
        error = wide[:, :, token] - torch.einsum("rhkv,rhk->rhv", state, key[:, :, token])
        state = state + key[:, :, token, :, None] * (beta[:, :, token, None] * error)[:, :, None]
        outputs.append(torch.einsum("rhkv,rhk->rhv", state, query[:, :, token]))
    output = torch.stack(outputs, 1)
    return _finish(states, slots, state, output, value)


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
    """The same for many tokens, in chunks whose updates are a product of matrices (ibid., section 3.3).

    Args:
        states: as in :func:`gated_delta`; what they hold is what the rows begin with.
        slots: as there.
        query: as there.
        key: as there.
        value: as there.
        decay: as there.
        beta: as there.
        lengths: [R] int64, how many of the T tokens a row has, the first ones; all by default. Outputs of the others are zero.
        scale: as there.
        normalize: as there.

    Returns:
        as there.
    """
    tokens = value.shape[1]
    if lengths is not None:
        # A token that neither decays nor writes leaves the state as it is.
        there = (torch.arange(tokens, device=value.device) < lengths[:, None])[:, :, None]
        decay, beta = (torch.where(there, own, 0) for own in (decay, beta))
    state, query, key, wide, decay, beta = _prepare(states, slots, query, key, value, decay, beta, scale, normalize)
    padding = -tokens % CHUNK

    def chunks(own: Tensor) -> Tensor:
        """[R, H, T, ...] as [R, H, chunks, CHUNK, ...]."""
        return torch.nn.functional.pad(own, (0, 0, 0, padding)).unflatten(2, (-1, CHUNK))

    query, key, wide = map(chunks, (query, key, wide))
    decay, beta = (chunks(own[..., None]) for own in (decay, beta))
    total = decay.squeeze(-1).cumsum(-1)
    causal = total.new_ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    # Behind the diagonal a difference may exceed what exp can hold.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -math.inf).exp()
    lower = (beta * key @ key.mT * between).tril(-1)
    grown = torch.cat([beta * wide, beta * key * total.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(lower, grown, upper=False, unitriangular=True)
    targets, reads = solved.split([wide.shape[-1], key.shape[-1]], -1)
    attention = query @ key.mT * between
    outputs = []
    for chunk in range(total.shape[2]):
        own = total[:, :, chunk, :, None]
        errors = targets[:, :, chunk] - reads[:, :, chunk] @ state
        outputs.append(query[:, :, chunk] * own.exp() @ state + attention[:, :, chunk] @ errors)
        last = own[:, :, -1:]
        state = state * last.exp() + (key[:, :, chunk] * (last - own).exp()).mT @ errors
    output = torch.cat(outputs, 2)[:, :, :tokens].transpose(1, 2)
    if lengths is not None:
        output = torch.where(there[..., None], output, 0)
    return _finish(states, slots, state, output, value)


def _prepare(
    states: Tensor,
    slots: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    scale: float | None,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All in the dtype of the computation, [R, H, ...]."""
    dtype = torch.promote_types(torch.float32, value.dtype)
    group = value.shape[2] // query.shape[2]
    query, key = (own.to(dtype).repeat_interleave(group, 2).transpose(1, 2) for own in (query, key))
    if normalize:
        query, key = (own * (own.square().sum(-1, keepdim=True) + _EPS).rsqrt() for own in (query, key))
    query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    value, decay, beta = (own.to(dtype).transpose(1, 2) for own in (value, decay, beta))
    state = (states if slots is None else states[slots.clamp(min=0)]).to(dtype)
    return state, query, key, value, decay, beta


def _finish(states: Tensor, slots: Tensor | None, state: Tensor, output: Tensor, value: Tensor) -> Tensor:
    if slots is None:
        states.copy_(state)
        return output.to(value.dtype)
    there = slots >= 0
    states[slots[there]] = state[there].to(states.dtype)
    return torch.where(there[:, None, None, None], output, 0).to(value.dtype)
