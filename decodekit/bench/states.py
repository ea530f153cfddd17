"""Steps and chunks of recurrent states, beside fla where it is installed and else beside plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decodekit.bench.cases import Case
from decodekit.kernels.conv_step import conv_step
from decodekit.kernels.conv_step import reference as torch_conv
from decodekit.kernels.gated_delta import chunked_gated_delta, gated_delta
from decodekit.kernels.gated_delta import reference as torch_delta
from decodekit.kernels.selective_state_step import reference as torch_selective
from decodekit.kernels.selective_state_step import selective_state_step

HEADS, WIDTH = 32, 128
"""Of Qwen3-Next's gated DeltaNet."""
MAMBA_HEADS, MAMBA_WIDTH, MAMBA_STATE = 80, 64, 128
"""Of a Mamba-2 of 2.7 billion parameters."""
LENGTH = 8192
CHANNELS, COLUMNS = 8192, 4


def state_cases(device: torch.device) -> Iterator[Case]:
    """Each kernel of recurrent states, at several numbers of rows.

    Plain torch has the rows' own states: slots it would wait for the GPU for.
    """
    for rows in (1, 32, 256):
        yield _delta_step(rows, device)
    yield _delta_chunks(device)
    for rows in (1, 256):
        yield _selective(rows, device)
        yield _convolution(rows, device)


def _drawn(rows: int, tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    """Queries, keys, values, decays and betas."""
    normal = partial(torch.randn, device=device)
    query, key, value = normal(3, rows, tokens, HEADS, WIDTH).bfloat16()
    decay = -normal(rows, tokens, HEADS).exp() / 8
    return query, key, value, decay, normal(rows, tokens, HEADS).sigmoid().bfloat16()


def _delta_step(rows: int, device: torch.device) -> Case:
    given = _drawn(rows, 1, device)
    states = torch.randn(rows, HEADS, WIDTH, WIDTH, device=device)
    slots = torch.randperm(rows, device=device)
    ours = _normalized(gated_delta, states, slots, given)
    peer, theirs = _fla("fused_recurrent_gated_delta_rule", given, states)
    if theirs is None:
        theirs = _normalized(torch_delta.gated_delta, states.clone(), None, given)
    return Case("gated_delta", f"{rows} x {HEADS} heads", peer, ours, theirs, 2 * states.nbytes)


def _delta_chunks(device: torch.device) -> Case:
    given = _drawn(1, LENGTH, device)
    states = torch.zeros(1, HEADS, WIDTH, WIDTH, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    ours = _normalized(chunked_gated_delta, states, slots, given)
    peer, theirs = _fla("chunk_gated_delta_rule", given, states)
    if theirs is None:
        theirs = _normalized(torch_delta.chunked_gated_delta, states.clone(), None, given)
    # Queries, keys and values in, outputs out: what lies between is no part of the problem.
    return Case("chunked_gated_delta", f"1 x {LENGTH}", peer, ours, theirs, 4 * given[0].nbytes)


def _fla(name: str, given: tuple[Tensor, ...], states: Tensor) -> tuple[str, Callable[[], Any] | None]:
    try:
        from fla.ops import gated_delta_rule
    except ImportError:
        return "torch", None
    query, key, value, decay, beta = given
    options = {"g": decay, "beta": beta, "initial_state": states, "output_final_state": True}
    return "fla", partial(getattr(gated_delta_rule, name), query, key, value, **options, use_qk_l2norm_in_kernel=True)


def _normalized(
    op: Callable[..., Any], states: Tensor, slots: Tensor | None, given: tuple[Tensor, ...]
) -> Callable[[], Any]:
    return partial(op, states, slots, *given, normalize=True)


def _selective(rows: int, device: torch.device) -> Case:
    normal = partial(torch.randn, device=device)
    heads, width = MAMBA_HEADS, MAMBA_WIDTH
    states, slots = normal(rows, heads, width, MAMBA_STATE), torch.randperm(rows, device=device)
    hidden, step = normal(rows, heads, width).bfloat16(), normal(rows, heads).bfloat16()
    b, c = normal(2, rows, 1, MAMBA_STATE).bfloat16()
    arguments: tuple[Any, ...] = hidden, step, normal(heads), b, c, normal(heads)
    options: dict[str, Any] = {"step_bias": normal(heads)}
    ours = partial(selective_state_step, states, slots, *arguments, **options)
    theirs = partial(torch_selective.selective_state_step, states.clone(), None, *arguments, **options)
    shape = f"{rows} x {heads} x {width} x {MAMBA_STATE}"
    return Case("selective_state_step", shape, "torch", ours, theirs, 2 * states.nbytes)


def _convolution(rows: int, device: torch.device) -> Case:
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
    states, slots = normal(rows, CHANNELS, COLUMNS), torch.randperm(rows, device=device)
    arguments: tuple[Any, ...] = normal(rows, 1, CHANNELS).mT, normal(CHANNELS, COLUMNS), None, True
    ours = partial(conv_step, states, slots, *arguments)
    theirs = partial(torch_conv.conv_step, states.clone(), None, *arguments)
    nbytes = 2 * states.nbytes + 2 * arguments[0].nbytes + arguments[1].nbytes
    return Case("conv_step", f"{rows} x {CHANNELS}", "torch", ours, theirs, nbytes)
