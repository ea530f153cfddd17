"""A causal depthwise convolution by slot in Triton: some channels of a row a program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decodekit.kernels import overlaps

CHANNELS = 512  # a program
FEW_CHANNELS = 128  # the same for few rows, which would leave most of the GPU idle
NUM_WARPS = 4


def conv_step(
    states: Tensor,
    slots: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """As the reference, in float32; bias and the last dimension of states and weight are contiguous."""
    rows, channels, tokens = hidden.shape
    # As it is given: where the tokens' channels adjoin, the output's do too.
    output = hidden.new_empty((rows, tokens, channels)).mT
    if not output.numel():
        return output
    most = FEW_CHANNELS if rows <= 8 else CHANNELS
    block = min(most, triton.next_power_of_2(channels))
    _convolve[(rows, triton.cdiv(channels, block))](
        states,
        slots,
        hidden,
        weight,
        bias,
        output,
        *states.stride()[:2],
        0 if slots is None else slots.stride(0),
        *hidden.stride(),
        weight.stride(0),
        tokens,
        channels,
        WIDTH=weight.shape[1],
        COLUMNS=triton.next_power_of_2(weight.shape[1]),
        BLOCK=block,
        SILU=silu,
        OVERLAP=(overlap := overlaps(hidden.device)),
        num_warps=NUM_WARPS,
        **({"launch_pdl": True} if overlap else {}),
    )
    return output


@triton.jit
def _slot(slots, row, stride):
    slot = row
    if slots is not None:
        slot = tl.load(slots + row * stride).to(tl.int64)
    return slot


@triton.jit
def _convolve(
    states,
    slots,
    hidden,
    weight,
    bias,
    output,
    stride_ss,
    stride_sc,
    stride_slot,
    stride_hr,
    stride_hc,
    stride_ht,
    stride_w,
    tokens,
    channels,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = _slot(slots, row, stride_slot)
    kept, column = channel < channels, tl.arange(0, COLUMNS)[None, :]
    output += row * tokens * channels + channel
    if slot < 0:
        for _ in range(tokens):
            tl.store(output, tl.zeros([BLOCK], output.dtype.element_ty), mask=kept)
            output += channels
    else:
        inside = kept[:, None] & (column < WIDTH)
        place = states + slot * stride_ss + channel[:, None].to(tl.int64) * stride_sc + column
        given = hidden + row * stride_hr + channel.to(tl.int64) * stride_hc
        weights = tl.load(weight + channel[:, None] * stride_w + column, mask=inside, other=0.0).to(tl.float32)
        added = tl.zeros([BLOCK], tl.float32)
        if bias is not None:
            added += tl.load(bias + channel, mask=kept, other=0.0).to(tl.float32)
        if WIDTH == 4:
            # Columns stay where they are while their numbers move on: each is read once, all of a channel at once.
            first, second, third, fourth = _columns(tl.load(place, mask=inside, other=0.0).to(tl.float32), BLOCK)
            one, two, three, four = _columns(weights, BLOCK)
            for token in range(tokens):
                first, second, third = second, third, fourth
                fourth = tl.load(given + token * stride_ht, mask=kept, other=0.0).to(tl.float32)
                result = first * one + second * two + third * three + fourth * four + added
                tl.store(output, _activated(result, SILU).to(output.dtype.element_ty), mask=kept)
                output += channels
            window = tl.join(tl.join(first, third), tl.join(second, fourth)).reshape([BLOCK, COLUMNS])
        else:
            window = tl.zeros([BLOCK, COLUMNS], tl.float32)
            for token in range(tokens):
                # Columns of the state, then of the new tokens.
                start = column + token + 1
                old = tl.load(place + token + 1, mask=inside & (start < WIDTH), other=0.0).to(tl.float32)
                new = given[:, None] + (start - WIDTH).to(tl.int64) * stride_ht
                window = old + tl.load(new, mask=inside & (start >= WIDTH), other=0.0).to(tl.float32)
                result = tl.sum(window * weights, 1) + added
                tl.store(output, _activated(result, SILU).to(output.dtype.element_ty), mask=kept)
                output += channels
        # A column may be read by another thread than it is written by.
        tl.debug_barrier()
        tl.store(place, window.to(states.dtype.element_ty), mask=inside)


@triton.jit
def _activated(result, SILU: tl.constexpr):
    if SILU:
        result = result / (1.0 + tl.exp(-result))
    return result


@triton.jit
def _columns(tile, BLOCK: tl.constexpr):
    """The columns of a tile of four."""
    even, odd = tl.split(tile.reshape([BLOCK, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth
