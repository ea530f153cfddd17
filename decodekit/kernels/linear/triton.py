"""Linear layers on few rows in Triton: a program streams some rows of a weight once, whatever the number of rows of the input.

Products are kept transposed, weights by rows of the input: the weights fill a matrix instruction, however few rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Tuning(NamedTuple):
    """How a product is cut: outputs and inputs a step, steps in flight, warps."""

    outputs: int
    inputs: int
    num_stages: int
    num_warps: int


def tuning(outputs: int) -> Tuning:
    """What was fastest on an H200 for so many outputs."""
    return Tuning(16, 256, 4, 4) if outputs <= 8192 else Tuning(32, 256, 4, 4)


GATED = Tuning(16, 256, 4, 4)
"""What was fastest on an H200 for the gated layer."""


def linear(
    hidden: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    residual: Tensor | None = None,
    cut: Tuning | None = None,
) -> Tensor:
    """As the reference; the last dimension of all tensors is contiguous."""
    rows, width = hidden.shape
    sizes = [len(weight) for weight in weights]
    output = hidden.new_empty((rows, sum(sizes)))
    cut = cut or tuning(sum(sizes))
    blocks = [triton.cdiv(size, cut.outputs) for size in sizes]
    first, second, third = [*weights, *[weights[0]] * (3 - len(weights))]
    sizes += [0] * (3 - len(sizes))
    blocks += [0] * (3 - len(blocks))
    own_biases = [*biases, *[None] * (3 - len(biases))]
    _linear[(sum(blocks),)](
        hidden,
        first,
        second,
        third,
        *own_biases,
        residual,
        output,
        rows,
        width,
        hidden.stride(0),
        first.stride(0),
        second.stride(0),
        third.stride(0),
        0 if residual is None else residual.stride(0),
        output.stride(0),
        *sizes,
        *blocks[:2],
        ROWS=max(16, triton.next_power_of_2(rows)),
        OUTPUTS=cut.outputs,
        INPUTS=cut.inputs,
        WHOLE=width % cut.inputs == 0,
        SEVERAL=len(weights) > 1,
        num_stages=cut.num_stages,
        num_warps=cut.num_warps,
    )
    return output


@triton.jit
def _linear(
    hidden,
    first,
    second,
    third,
    first_bias,
    second_bias,
    third_bias,
    residual,
    output,
    rows,
    width,
    stride_h,
    stride_first,
    stride_second,
    stride_third,
    stride_r,
    stride_o,
    first_size,
    second_size,
    third_size,
    first_blocks,
    second_blocks,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WHOLE: tl.constexpr,
    SEVERAL: tl.constexpr,
):
    block = tl.program_id(0)
    weight, stride_w, size, before = first, stride_first, first_size, 0 * block
    if SEVERAL:
        if block >= first_blocks + second_blocks:
            weight, stride_w, size, before = third, stride_third, third_size, first_size + second_size
            block -= first_blocks + second_blocks
        elif block >= first_blocks:
            weight, stride_w, size, before = second, stride_second, second_size, first_size
            block -= first_blocks
    place = block * OUTPUTS + tl.arange(0, OUTPUTS)
    row, column = tl.arange(0, ROWS), tl.arange(0, INPUTS)
    # Behind the last output, the last weight is read once more: a mask would cost every read.
    weights = weight + tl.minimum(place, size - 1).to(tl.int64)[:, None] * stride_w + column[None, :]
    inputs = hidden + tl.minimum(row, rows - 1)[None, :] * stride_h + column[:, None]
    result = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, width, INPUTS):
        if WHOLE:
            some = tl.load(weights, eviction_policy="evict_first")
            given = tl.load(inputs)
        else:
            some = tl.load(weights, mask=(start + column < width)[None, :], other=0.0)
            given = tl.load(inputs, mask=(start + column < width)[:, None], other=0.0)
        result = tl.dot(some, given, result, input_precision="ieee")
        weights += INPUTS
        inputs += INPUTS
    there = place < size
    if first_bias is not None:
        bias = tl.load(first_bias + place, mask=there & (before == 0), other=0.0).to(tl.float32)
        if SEVERAL:
            if second_bias is not None:
                bias += tl.load(second_bias + place, mask=there & (before == first_size), other=0.0).to(tl.float32)
            if third_bias is not None:
                bias += tl.load(third_bias + place, mask=there & (before == first_size + second_size), other=0.0).to(
                    tl.float32
                )
        result += bias[:, None]
    kept = there[:, None] & (row < rows)[None, :]
    if residual is not None:
        added = residual + row[None, :] * stride_r + place[:, None] + before
        result += tl.load(added, mask=kept, other=0.0).to(tl.float32)
    tl.store(output + row[None, :] * stride_o + place[:, None] + before, result.to(output.dtype.element_ty), mask=kept)


def gated_linear(hidden: Tensor, gate: Tensor, up: Tensor, cut: Tuning | None = None) -> Tensor:
    """As the reference; the last dimension of all tensors is contiguous, and the weights have the same strides."""
    rows, width = hidden.shape
    size = len(gate)
    output = hidden.new_empty((rows, size))
    cut = cut or GATED
    _gated[(triton.cdiv(size, cut.outputs),)](
        hidden,
        gate,
        up,
        output,
        rows,
        width,
        hidden.stride(0),
        gate.stride(0),
        size,
        ROWS=max(16, triton.next_power_of_2(rows)),
        OUTPUTS=cut.outputs,
        INPUTS=cut.inputs,
        WHOLE=width % cut.inputs == 0,
        num_stages=cut.num_stages,
        num_warps=cut.num_warps,
    )
    return output


@triton.jit
def _gated(
    hidden,
    gate,
    up,
    output,
    rows,
    width,
    stride_h,
    stride_w,
    size,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    place = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row, column = tl.arange(0, ROWS), tl.arange(0, INPUTS)
    # Behind the last output, the last weight is read once more: a mask would cost every read.
    offset = tl.minimum(place, size - 1).to(tl.int64)[:, None] * stride_w + column[None, :]
    gates, ups = gate + offset, up + offset
    inputs = hidden + tl.minimum(row, rows - 1)[None, :] * stride_h + column[:, None]
    opened, passed = tl.zeros([OUTPUTS, ROWS], tl.float32), tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, width, INPUTS):
        if WHOLE:
            some, others = tl.load(gates, eviction_policy="evict_first"), tl.load(ups, eviction_policy="evict_first")
            given = tl.load(inputs)
        else:
            there = start + column < width
            some = tl.load(gates, mask=there[None, :], other=0.0)
            others = tl.load(ups, mask=there[None, :], other=0.0)
            given = tl.load(inputs, mask=there[:, None], other=0.0)
        opened = tl.dot(some, given, opened, input_precision="ieee")
        passed = tl.dot(others, given, passed, input_precision="ieee")
        gates += INPUTS
        ups += INPUTS
        inputs += INPUTS
    result = opened / (1.0 + tl.exp(-opened)) * passed
    kept = (place < size)[:, None] & (row < rows)[None, :]
    tl.store(output + row[None, :] * size + place[:, None], result.to(output.dtype.element_ty), mask=kept)
