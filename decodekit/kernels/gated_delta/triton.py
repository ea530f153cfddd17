"""The gated delta rule in Triton: a state is read once and written once, some of its columns (of V) a program.

The columns of a state do not depend on each other. What a token reads from them and what it shows of them are sums over the
same numbers, so that both are formed before the state is written.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decodekit.kernels import overlaps


class Tuning(NamedTuple):
    """Columns of a state a program, and its warps."""

    columns: int
    num_warps: int


def tuning(states: int, keys: int) -> Tuning:
    """What was fastest on an H200 for so many states, rows times heads, with so many rows (of K) each."""
    return Tuning(16, 1) if states <= 64 and keys <= 128 else Tuning(max(16, min(64, 8192 // keys)), 4)


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
    cut: Tuning | None = None,
) -> Tensor:
    """As the reference, in float32; the last dimension of states, queries, keys and values is contiguous."""
    rows, tokens, heads, values = value.shape
    keys = key.shape[3]
    output = value.new_empty(value.shape)
    if not output.numel():
        return output
    cut = cut or tuning(rows * heads, triton.next_power_of_2(keys))
    columns = min(cut.columns, triton.next_power_of_2(values))
    parts = triton.cdiv(values, columns)
    _step[(rows * heads * parts,)](
        states,
        slots,
        query,
        key,
        value,
        decay,
        beta,
        output,
        *states.stride()[:3],
        0 if slots is None else slots.stride(0),
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *decay.stride(),
        *beta.stride(),
        tokens,
        heads,
        heads // key.shape[2],
        keys**-0.5 if scale is None else scale,
        K=keys,
        V=values,
        PARTS=parts,
        COLUMNS=columns,
        BLOCK=triton.next_power_of_2(keys),
        NORMALIZE=normalize,
        OVERLAP=(overlap := overlaps(value.device)),
        num_warps=cut.num_warps,
        **({"launch_pdl": True} if overlap else {}),
    )
    return output


@triton.jit
def slot_of(slots, row, stride):
    """The number of a row's state."""
    slot = row
    if slots is not None:
        slot = tl.load(slots + row * stride).to(tl.int64)
    return slot


@triton.jit
def _add(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _step(
    states,
    slots,
    query,
    key,
    value,
    decay,
    beta,
    output,
    stride_ss,
    stride_sh,
    stride_sk,
    stride_slot,
    stride_qr,
    stride_qt,
    stride_qh,
    stride_kr,
    stride_kt,
    stride_kh,
    stride_vr,
    stride_vt,
    stride_vh,
    stride_dr,
    stride_dt,
    stride_dh,
    stride_br,
    stride_bt,
    stride_bh,
    tokens,
    heads,
    group,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    head = program // PARTS % heads
    row = (program // PARTS // heads).to(tl.int64)
    slot = slot_of(slots, row, stride_slot)
    line, column = tl.arange(0, BLOCK), program % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    # Masks that are always true would break up wide reads.
    whole: tl.constexpr = BLOCK == K and PARTS * COLUMNS == V
    inside, kept = line < K, column < V
    output += (row * tokens * heads + head) * V + column
    query += row * stride_qr + (head // group).to(tl.int64) * stride_qh + line
    key += row * stride_kr + (head // group).to(tl.int64) * stride_kh + line
    value += row * stride_vr + head.to(tl.int64) * stride_vh + column
    decay += row * stride_dr + head.to(tl.int64) * stride_dh
    beta += row * stride_br + head.to(tl.int64) * stride_bh
    # On their way while the slot is: where a state lies is known only then.
    q, k, v, left, share = _token(query, key, value, decay, beta, inside, kept)
    if slot < 0:
        for _ in range(tokens):
            tl.store(output, tl.zeros([COLUMNS], output.dtype.element_ty), mask=kept)
            output += heads * V
    else:
        place = states + slot * stride_ss + head.to(tl.int64) * stride_sh
        place += line[:, None].to(tl.int64) * stride_sk + column[None, :]
        if whole:
            state = tl.load(place).to(tl.float32)
        else:
            state = tl.load(place, mask=inside[:, None] & kept[None, :], other=0.0).to(tl.float32)
        for token in range(tokens):
            if NORMALIZE:
                kk, qq, qk = tl.reduce((k * k, q * q, q * k), 0, _add_three)
                shrink_k, shrink_q = tl.rsqrt(kk + 1e-6), tl.rsqrt(qq + 1e-6) * scale
            else:
                qk = tl.sum(q * k, 0)
                shrink_k, shrink_q = 1.0, scale
            read, shown = tl.reduce((state * k[:, None], state * q[:, None]), 0, _add)
            written = share * (v - read * (left * shrink_k)) * shrink_k
            result = (shown * left + written * qk) * shrink_q
            state = state * left + k[:, None] * written[None, :]
            tl.store(output, result.to(output.dtype.element_ty), mask=kept)
            output += heads * V
            # The next one, and behind the last that once more.
            ahead = tl.minimum(tokens - 1 - token, 1)
            query += ahead * stride_qt
            key += ahead * stride_kt
            value += ahead * stride_vt
            decay += ahead * stride_dt
            beta += ahead * stride_bt
            q, k, v, left, share = _token(query, key, value, decay, beta, inside, kept)
        if whole:
            tl.store(place, state.to(states.dtype.element_ty))
        else:
            tl.store(place, state.to(states.dtype.element_ty), mask=inside[:, None] & kept[None, :])


@triton.jit
def _token(query, key, value, decay, beta, inside, kept):
    """Query, key, value, what remains of the state and how much is written."""
    q = tl.load(query, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(key, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(value, mask=kept, other=0.0).to(tl.float32)
    return q, k, v, tl.exp(tl.load(decay).to(tl.float32)), tl.load(beta).to(tl.float32)
