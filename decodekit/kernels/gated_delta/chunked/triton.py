"""The gated delta rule by chunks in Triton.

Of each chunk by itself: what its tokens would write into an empty state and what they read of another one, both through the
inverse of a triangular matrix. Then from chunk to chunk, some columns of a state a program: what they write into the chunk's
state, and the next one's. Then outputs, of each chunk by itself again.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from decodekit.kernels.gated_delta.reference import CHUNK
from decodekit.kernels.gated_delta.triton import slot_of


class Tuning(NamedTuple):
    """Columns of a state a program, its warps, and the stages of its loop."""

    columns: int
    num_warps: int
    num_stages: int


SCAN = Tuning(32, 4, 2)
"""For the part of the chunked form that goes from chunk to chunk."""
SHOW = Tuning(64, 4, 2)
"""For its outputs."""
PREPARE_WARPS = 4
PRECISION = "tf32x3"
"""Of products of float32: about 21 bits."""


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
    scan: Tuning = SCAN,
    show: Tuning = SHOW,
    precision: str | None = None,
) -> Tensor:
    """As the reference; the last dimension of states, queries, keys and values is contiguous."""
    rows, tokens, heads, values = value.shape
    keys, chunks = key.shape[3], triton.cdiv(tokens, CHUNK)
    output = value.new_empty(value.shape)
    if not output.numel():
        return output
    # Of each token what it would write into an empty state, later what it writes; and what it reads of the chunk's state.
    errors = value.new_empty((rows, chunks * CHUNK, heads, values))
    reads = value.new_empty((rows, chunks * CHUNK, heads, keys))
    starts = value.new_empty((rows, chunks, heads, keys, values))
    sizes = tokens, chunks, heads, heads // key.shape[2]
    block = max(16, triton.next_power_of_2(keys))
    options = {"K": keys, "V": values, "BLOCK": block, "CHUNK": CHUNK, "NORMALIZE": normalize}
    # Halves are rounded to 8 or 11 bits anyway: for the inverse of theirs 11 suffice.
    options["PRECISION"] = precision or (PRECISION if value.element_size() > 2 else "tf32")
    strides = [*key.stride()[:3], *decay.stride()]
    _prepare[(rows * chunks * heads,)](
        slots,
        key,
        value,
        decay,
        beta,
        lengths,
        errors,
        reads,
        0 if slots is None else slots.stride(0),
        *strides,
        *value.stride()[:3],
        *beta.stride(),
        *sizes,
        VALUES=max(16, triton.next_power_of_2(values)),
        **options,
        num_warps=PREPARE_WARPS,
    )
    columns = max(16, min(scan.columns, triton.next_power_of_2(values)))
    parts = triton.cdiv(values, columns)
    _scan[(rows * heads * parts,)](
        states,
        slots,
        key,
        decay,
        lengths,
        errors,
        reads,
        starts,
        *states.stride()[:3],
        0 if slots is None else slots.stride(0),
        *strides,
        *sizes,
        PARTS=parts,
        COLUMNS=columns,
        **options,
        num_warps=scan.num_warps,
        num_stages=scan.num_stages,
    )
    columns = max(16, min(show.columns, triton.next_power_of_2(values)))
    parts = triton.cdiv(values, columns)
    _show[(rows * chunks * heads * parts,)](
        slots,
        query,
        key,
        decay,
        lengths,
        errors,
        starts,
        output,
        0 if slots is None else slots.stride(0),
        *query.stride()[:3],
        *strides,
        *sizes,
        keys**-0.5 if scale is None else scale,
        PARTS=parts,
        COLUMNS=columns,
        **options,
        num_warps=show.num_warps,
        num_stages=show.num_stages,
    )
    return output


@triton.jit
def _length(lengths, row, tokens):
    length = tokens
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + row), tokens).to(tl.int32)
    return length


@triton.jit
def _total(decay, token, length, stride_dt):
    """The logarithm of what remains of the chunk's first state after each token."""
    return tl.cumsum(tl.load(decay + token.to(tl.int64) * stride_dt, mask=token < length, other=0.0).to(tl.float32), 0)


@triton.jit
def _rows(
    source, token, length, stride_t, dtype: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, NORMALIZE: tl.constexpr
):
    """[CHUNK, BLOCK] queries or keys as they are given, and what multiplies each: products of halves would be rounded more."""
    line = tl.arange(0, BLOCK)
    inside = (token < length)[:, None] & (line < K)[None, :]
    some = tl.load(source + token[:, None].to(tl.int64) * stride_t + line[None, :], mask=inside, other=0.0)
    wide = some.to(tl.float32)
    square = tl.sum(wide * wide, 1)
    shrink = tl.where(square > 0, tl.rsqrt(square + 1e-6), 0.0) if NORMALIZE else tl.zeros_like(square) + 1.0
    return some.to(dtype), shrink


@triton.jit
def _between(total, CHUNK: tl.constexpr):
    """[CHUNK, CHUNK] what remains at a token of what an earlier one, or itself, has written; 0 of what later ones do."""
    earlier = tl.arange(0, CHUNK)[:, None] >= tl.arange(0, CHUNK)[None, :]
    # Masked before exp, which has no room for the others.
    return tl.exp(tl.where(earlier, total[:, None] - total[None, :], float("-inf")))


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Of the identity plus a strictly lower triangular matrix.

    Blocks of 16 on the diagonal are inverted row by row, all at once. With their inverse D and the rest L, the whole is
    ``(I + DL)^-1 D``, and ``DL`` to the fourth is zero.
    """
    left, right = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    diagonal = left // 16 == right // 16
    inverse = tl.where(diagonal, -lower, 0.0)
    for step in range(1, 16):
        chosen = left % 16 == step
        own = tl.sum(tl.where(chosen, inverse, 0.0), 0)
        own += tl.sum(own[:, None] * tl.where(left % 16 < step, inverse, 0.0), 0)
        inverse = tl.where(chosen & diagonal, own[None, :], inverse)
    inverse += tl.where(left == right, 1.0, 0.0)
    rest = tl.dot(inverse, tl.where(diagonal, 0.0, lower), input_precision=PRECISION)
    square = tl.dot(rest, rest, input_precision=PRECISION)
    series = tl.where(left == right, 1.0, 0.0) - rest + square - tl.dot(rest, square, input_precision=PRECISION)
    return tl.dot(series, inverse, input_precision=PRECISION)


@triton.jit
def _prepare(
    slots,
    key,
    value,
    decay,
    beta,
    lengths,
    errors,
    reads,
    stride_slot,
    stride_kr,
    stride_kt,
    stride_kh,
    stride_dr,
    stride_dt,
    stride_dh,
    stride_vr,
    stride_vt,
    stride_vh,
    stride_br,
    stride_bt,
    stride_bh,
    tokens,
    chunks,
    heads,
    group,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.program_id(0)
    head, chunk = (program % heads).to(tl.int64), program // heads % chunks
    row = (program // heads // chunks).to(tl.int64)
    length = _length(lengths, row, tokens)
    if (slot_of(slots, row, stride_slot) >= 0) & (chunk * CHUNK < length):
        dtype: tl.constexpr = errors.dtype.element_ty
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        total = _total(decay + row * stride_dr + head * stride_dh, token, length, stride_dt)
        shares = beta + row * stride_br + head * stride_bh + token.to(tl.int64) * stride_bt
        share = tl.load(shares, mask=token < length, other=0.0).to(tl.float32)
        own_keys = key + row * stride_kr + (head // group) * stride_kh
        k, shrink = _rows(own_keys, token, length, stride_kt, dtype, K, BLOCK, NORMALIZE)
        products = tl.dot(k, tl.trans(k), input_precision=PRECISION) * (shrink[:, None] * shrink[None, :])
        later = tl.arange(0, CHUNK)[:, None] > tl.arange(0, CHUNK)[None, :]
        lower = tl.where(later, products * _between(total, CHUNK) * share[:, None], 0.0)
        inverse = _inverse(lower, CHUNK, PRECISION)
        line, column = tl.arange(0, BLOCK), tl.arange(0, VALUES)
        written = (row * chunks * CHUNK + token[:, None]) * heads + head
        factors = (inverse * (share * tl.exp(total) * shrink)[None, :]).to(dtype)
        read = tl.dot(factors, k, input_precision=PRECISION)
        tl.store(reads + written * K + line[None, :], read.to(dtype), mask=(line < K)[None, :])
        own_values = (
            value + row * stride_vr + head * stride_vh + token[:, None].to(tl.int64) * stride_vt + column[None, :]
        )
        v = tl.load(own_values, mask=(token < length)[:, None] & (column < V)[None, :], other=0.0)
        error = tl.dot((inverse * share[None, :]).to(dtype), v.to(dtype), input_precision=PRECISION)
        tl.store(errors + written * V + column[None, :], error.to(dtype), mask=(column < V)[None, :])


@triton.jit
def _scan(
    states,
    slots,
    key,
    decay,
    lengths,
    errors,
    reads,
    starts,
    stride_ss,
    stride_sh,
    stride_sk,
    stride_slot,
    stride_kr,
    stride_kt,
    stride_kh,
    stride_dr,
    stride_dt,
    stride_dh,
    tokens,
    chunks,
    heads,
    group,
    K: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.program_id(0)
    head = (program // PARTS % heads).to(tl.int64)
    row = (program // PARTS // heads).to(tl.int64)
    slot = slot_of(slots, row, stride_slot)
    if slot >= 0:
        dtype: tl.constexpr = errors.dtype.element_ty
        length = _length(lengths, row, tokens)
        line, column = tl.arange(0, BLOCK), program % PARTS * COLUMNS + tl.arange(0, COLUMNS)
        inside = (line < K)[:, None] & (column < V)[None, :]
        place = states + slot * stride_ss + head * stride_sh + line[:, None].to(tl.int64) * stride_sk + column[None, :]
        state = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        decays = decay + row * stride_dr + head * stride_dh
        own_keys = key + row * stride_kr + (head // group) * stride_kh
        start = starts + (row * chunks * heads + head) * K * V + line[:, None] * V + column[None, :]
        for chunk in range(tl.cdiv(length, CHUNK)):
            tl.store(start, state.to(dtype), mask=inside)
            start += heads * K * V
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            total = _total(decays, token, length, stride_dt)
            last = tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, total, 0.0), 0)
            written = (row * chunks * CHUNK + token[:, None]) * heads + head
            read = tl.load(reads + written * K + line[None, :], mask=(line < K)[None, :], other=0.0)
            error_place = errors + written * V + column[None, :]
            error = tl.load(error_place, mask=(column < V)[None, :], other=0.0).to(tl.float32)
            error -= tl.dot(read, state.to(dtype), input_precision=PRECISION)
            tl.store(error_place, error.to(dtype), mask=(column < V)[None, :])
            k, shrink = _rows(own_keys, token, length, stride_kt, dtype, K, BLOCK, NORMALIZE)
            error = (error * (tl.exp(last - total) * shrink)[:, None]).to(dtype)
            state = state * tl.exp(last) + tl.dot(tl.trans(k), error, input_precision=PRECISION)
        tl.store(place, state.to(states.dtype.element_ty), mask=inside)


@triton.jit
def _show(
    slots,
    query,
    key,
    decay,
    lengths,
    errors,
    starts,
    output,
    stride_slot,
    stride_qr,
    stride_qt,
    stride_qh,
    stride_kr,
    stride_kt,
    stride_kh,
    stride_dr,
    stride_dt,
    stride_dh,
    tokens,
    chunks,
    heads,
    group,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.program_id(0)
    head, chunk = (program // PARTS % heads).to(tl.int64), program // PARTS // heads % chunks
    row = (program // PARTS // heads // chunks).to(tl.int64)
    length = _length(lengths, row, tokens)
    token, column = chunk * CHUNK + tl.arange(0, CHUNK), program % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    output += ((row * tokens + token[:, None]) * heads + head) * V + column[None, :]
    kept = (token < tokens)[:, None] & (column < V)[None, :]
    if (slot_of(slots, row, stride_slot) >= 0) & (chunk * CHUNK < length):
        dtype: tl.constexpr = errors.dtype.element_ty
        line = tl.arange(0, BLOCK)
        total = _total(decay + row * stride_dr + head * stride_dh, token, length, stride_dt)
        own_queries = query + row * stride_qr + (head // group) * stride_qh
        own_keys = key + row * stride_kr + (head // group) * stride_kh
        q, shrink_q = _rows(own_queries, token, length, stride_qt, dtype, K, BLOCK, NORMALIZE)
        k, shrink = _rows(own_keys, token, length, stride_kt, dtype, K, BLOCK, NORMALIZE)
        attention = tl.dot(q, tl.trans(k), input_precision=PRECISION) * shrink[None, :] * _between(total, CHUNK)
        place = starts + ((row * chunks + chunk) * heads + head) * K * V + line[:, None] * V + column[None, :]
        start = tl.load(place, mask=(line < K)[:, None] & (column < V)[None, :], other=0.0)
        result = tl.dot(q, start, input_precision=PRECISION) * tl.exp(total)[:, None]
        written = (row * chunks * CHUNK + token[:, None]) * heads + head
        error = tl.load(errors + written * V + column[None, :], mask=(column < V)[None, :], other=0.0)
        result += tl.dot(attention.to(dtype), error, input_precision=PRECISION)
        result = tl.where((token < length)[:, None], result * (shrink_q * scale)[:, None], 0.0)
        tl.store(output, result.to(output.dtype.element_ty), mask=kept)
    else:
        tl.store(output, tl.zeros([CHUNK, COLUMNS], output.dtype.element_ty), mask=kept)
