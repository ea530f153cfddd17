"""One token of a selective state space model in Triton: a state is read once and written once, some channels a program."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decodekit.kernels import overlaps


class Tuning(NamedTuple):
    """Numbers of a state a program, and its warps."""

    numbers: int
    num_warps: int


CUT = Tuning(1024, 1)
"""What was fastest on an H200, for one row and for 256."""


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
    cut: Tuning = CUT,
) -> Tensor:
    """As the reference, in float32."""
    rate = a if a_log is None else a_log
    assert rate is not None, "give either a_log or a"
    output = hidden.new_empty(hidden.shape)
    if not output.numel():
        return output
    if hidden.dim() == 2:
        # Mamba: channels of one head.
        states, hidden, step, b, c = (own.unsqueeze(1) for own in (states, hidden, step, b, c))
        rate = rate.unsqueeze(0)
        d, step_bias = (None if own is None else own.unsqueeze(0) for own in (d, step_bias))
        gate = None if gate is None else gate.unsqueeze(1)
    rows, heads, channels = hidden.shape
    numbers = states.shape[3]
    rate = rate[:, None, None].expand(heads, channels, numbers) if rate.dim() == 1 else rate
    step = step.unsqueeze(-1).expand(hidden.shape) if step.dim() == 2 else step
    d, step_bias = (
        own.unsqueeze(-1).expand(heads, channels) if own is not None and own.dim() == 1 else own
        for own in (d, step_bias)
    )
    line = triton.next_power_of_2(numbers)
    block = min(max(1, cut.numbers // line), triton.next_power_of_2(channels))
    parts = triton.cdiv(channels, block)
    _advance[(rows * heads * parts,)](
        states,
        slots,
        hidden,
        step,
        rate,
        b,
        c,
        d,
        gate,
        step_bias,
        output,
        *states.stride(),
        0 if slots is None else slots.stride(0),
        *hidden.stride(),
        *step.stride(),
        *rate.stride(),
        *b.stride(),
        *c.stride(),
        *((0, 0) if d is None else d.stride()),
        *((0, 0, 0) if gate is None else gate.stride()),
        *((0, 0) if step_bias is None else step_bias.stride()),
        heads,
        heads // b.shape[1],
        *(limits or (0.0, 0.0)),
        P=channels,
        N=numbers,
        PARTS=parts,
        BLOCK=block,
        LINE=line,
        LOG=a_log is not None,
        ALIKE=rate.stride()[1:] == (0, 0),
        SOFTPLUS=softplus,
        LIMITED=limits is not None,
        OVERLAP=(overlap := overlaps(hidden.device)),
        num_warps=cut.num_warps,
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
def _softplus(number):
    """The logarithm of 1 + exp(number), by a series of atanh: beside 1, small exponentials would be rounded away."""
    small = tl.exp(-tl.abs(number))
    ratio = small / (2.0 + small)
    square = ratio * ratio
    series = 1.0 / 17 + tl.zeros_like(square)
    for term in tl.static_range(7, -1, -1):
        series = series * square + 1.0 / (2 * term + 1)
    return tl.maximum(number, 0.0) + 2.0 * ratio * series


@triton.jit
def _advance(
    states,
    slots,
    hidden,
    step,
    rate,
    b,
    c,
    d,
    gate,
    step_bias,
    output,
    stride_ss,
    stride_sh,
    stride_sp,
    stride_sn,
    stride_slot,
    stride_hr,
    stride_hh,
    stride_hp,
    stride_tr,
    stride_th,
    stride_tp,
    stride_ah,
    stride_ap,
    stride_an,
    stride_br,
    stride_bg,
    stride_bn,
    stride_cr,
    stride_cg,
    stride_cn,
    stride_dh,
    stride_dp,
    stride_gr,
    stride_gh,
    stride_gp,
    stride_bias_h,
    stride_bias_p,
    heads,
    group,
    lowest,
    highest,
    P: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LINE: tl.constexpr,
    LOG: tl.constexpr,
    ALIKE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    LIMITED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    head, row = (program // PARTS % heads).to(tl.int64), (program // PARTS // heads).to(tl.int64)
    channel, place = (program % PARTS * BLOCK + tl.arange(0, BLOCK)).to(tl.int64), tl.arange(0, LINE)
    kept = channel < P
    slot = _slot(slots, row, stride_slot)
    outputs = output + (row * heads + head) * P + channel
    if slot < 0:
        tl.store(outputs, tl.zeros([BLOCK], output.dtype.element_ty), mask=kept)
    else:
        # Masks that are always true would break up wide reads.
        whole: tl.constexpr = PARTS * BLOCK == P and LINE == N
        inside = kept[:, None] & (place < N)[None, :]
        cells = states + slot * stride_ss + head * stride_sh + channel[:, None] * stride_sp + place[None, :] * stride_sn
        state = tl.load(cells) if whole else tl.load(cells, mask=inside, other=0.0)
        state = state.to(tl.float32)
        given = hidden + row * stride_hr + head * stride_hh + channel * stride_hp
        x = tl.load(given, mask=kept, other=0.0).to(tl.float32)
        time = tl.load(step + row * stride_tr + head * stride_th + channel * stride_tp, mask=kept, other=0.0).to(
            tl.float32
        )
        if step_bias is not None:
            added = step_bias + head * stride_bias_h + channel * stride_bias_p
            time += tl.load(added, mask=kept, other=0.0).to(tl.float32)
        if SOFTPLUS:
            time = _softplus(time)
        if LIMITED:
            time = tl.minimum(tl.maximum(time, lowest), highest)
        if ALIKE:
            speed = tl.load(rate + head * stride_ah).to(tl.float32)
            if LOG:
                speed = -tl.exp(speed)
            state = state * tl.exp(time * speed)[:, None]
        else:
            rates = rate + head * stride_ah + channel[:, None] * stride_ap + place[None, :] * stride_an
            speeds = tl.load(rates, mask=inside, other=0.0).to(tl.float32)
            if LOG:
                speeds = -tl.exp(speeds)
            state = state * tl.exp(time[:, None] * speeds)
        shared = head // group
        own_b = b + row * stride_br + shared * stride_bg + place * stride_bn
        own_b = tl.load(own_b, mask=place < N, other=0.0).to(tl.float32)
        own_c = c + row * stride_cr + shared * stride_cg + place * stride_cn
        own_c = tl.load(own_c, mask=place < N, other=0.0).to(tl.float32)
        state += (time * x)[:, None] * own_b[None, :]
        if whole:
            tl.store(cells, state.to(states.dtype.element_ty))
        else:
            tl.store(cells, state.to(states.dtype.element_ty), mask=inside)
        result = tl.sum(state * own_c[None, :], 1)
        if d is not None:
            result += x * tl.load(d + head * stride_dh + channel * stride_dp, mask=kept, other=0.0).to(tl.float32)
        if gate is not None:
            opened = tl.load(gate + row * stride_gr + head * stride_gh + channel * stride_gp, mask=kept, other=0.0)
            opened = opened.to(tl.float32)
            result = result * opened / (1.0 + tl.exp(-opened))
        tl.store(outputs, result.to(output.dtype.element_ty), mask=kept)
