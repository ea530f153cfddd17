"""Linear layers on few rows in Triton: a program streams some rows of a weight once, whatever the number of rows of the input.

One row is multiplied by ordinary arithmetic, which leaves room for many small programs. For more, products are kept transposed,
weights by rows of the input: the weights fill a matrix instruction, however few rows there are. Weights do not depend on what
runs before, so that a program fetches its first ones while it waits for the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decodekit.kernels import overlaps


class Tuning(NamedTuple):
    """How a product is cut: outputs and inputs a step, steps in flight (for one row: unrolled), warps, and how it is computed.

    ``dot`` is by matrix instructions, which is the only way for several rows.
    """

    outputs: int
    inputs: int
    num_stages: int
    num_warps: int
    dot: bool = True


def tuning(rows: int, outputs: int, inputs: int) -> Tuning:
    """What was fastest on an H200 for so many rows, outputs and inputs."""
    if outputs > 32768:
        return Tuning(128, 128, 3, 8) if rows <= 16 else Tuning(64, 128, 4, 4)
    if rows == 1:
        return Tuning(8, 1024, 1, 8, dot=False) if outputs > 4096 else Tuning(16, 512, 2, 8, dot=False)
    if rows <= 16:
        return Tuning(16, 512, 3, 2)
    if outputs > 4096:
        return Tuning(64, 128, 5, 8)
    return Tuning(32, 256, 4, 2)


def gated_tuning(rows: int) -> Tuning:
    """What was fastest on an H200 for so many rows of the gated layer."""
    return Tuning(128, 128, 3, 8) if rows <= 32 else Tuning(64, 128, 3, 4)


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
    cut = cut or tuning(rows, sum(sizes), width)
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
        SEVERAL=len(weights) > 1,
        **_options(hidden, cut),
    )
    return output


def gated_linear(hidden: Tensor, gate: Tensor, up: Tensor, cut: Tuning | None = None) -> Tensor:
    """As the reference; the last dimension of all tensors is contiguous, and the weights have the same strides."""
    rows, width = hidden.shape
    size = len(gate)
    output = hidden.new_empty((rows, size))
    cut = cut or gated_tuning(rows)
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
        **_options(hidden, cut),
    )
    return output


def _options(hidden: Tensor, cut: Tuning) -> dict[str, Any]:
    rows, width = hidden.shape
    # Programs with much shared memory leave no room for the next kernel's: that one only gets in the way.
    overlap = overlaps(hidden.device) and not cut.dot
    return {
        "ROWS": max(16 if cut.dot else 1, triton.next_power_of_2(rows)),
        "OUTPUTS": cut.outputs,
        "INPUTS": cut.inputs,
        "UNROLL": cut.num_stages,
        "WHOLE": width % cut.inputs == 0,
        "OVERLAP": overlap,
        # Single precision takes twice the shared memory.
        "num_stages": max(1, cut.num_stages * 2 // hidden.element_size()) if cut.dot else 1,
        "num_warps": cut.num_warps,
        **({"launch_pdl": True} if overlap else {}),
    }


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
    SEVERAL: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    UNROLL: tl.constexpr,
    WHOLE: tl.constexpr,
    OVERLAP: tl.constexpr,
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
    place, row = block * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    # Behind the last output, the last weight is read once more: a mask would cost every read.
    weights = weight + tl.minimum(place, size - 1).to(tl.int64)[:, None] * stride_w
    if OVERLAP:
        gdc_launch_dependents()
        _prefetch(weights, width, INPUTS, UNROLL)
        gdc_wait()
    if ROWS == 1:
        result = _row(hidden, weights, width, OUTPUTS, INPUTS, UNROLL, WHOLE)[:, None]
    else:
        result = _rows(hidden, weights, rows, width, stride_h, ROWS, OUTPUTS, INPUTS, WHOLE)
    there = place < size
    if first_bias is not None:
        result += _bias(first_bias, place, size, before, 0)[:, None]
    if SEVERAL:
        if second_bias is not None:
            result += _bias(second_bias, place, size, before, first_size)[:, None]
        if third_bias is not None:
            result += _bias(third_bias, place, size, before, first_size + second_size)[:, None]
    kept = there[:, None] & (row < rows)[None, :]
    if residual is not None:
        added = residual + row[None, :] * stride_r + place[:, None] + before
        result += tl.load(added, mask=kept, other=0.0).to(tl.float32)
    tl.store(output + row[None, :] * stride_o + place[:, None] + before, result.to(output.dtype.element_ty), mask=kept)


@triton.jit
def _bias(bias, place, size, before, own):
    """The bias of the layer whose outputs begin at ``own``, where these do."""
    return tl.load(bias + place, mask=place < tl.where(before == own, size, 0), other=0.0).to(tl.float32)


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
    UNROLL: tl.constexpr,
    WHOLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    place, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    # Behind the last output, the last weight is read once more: a mask would cost every read.
    offset = tl.minimum(place, size - 1).to(tl.int64)[:, None] * stride_w
    if OVERLAP:
        gdc_launch_dependents()
        _prefetch(gate + offset, width, INPUTS, UNROLL)
        _prefetch(up + offset, width, INPUTS, UNROLL)
        gdc_wait()
    if ROWS == 1:
        opened, passed = _row_twice(hidden, gate + offset, up + offset, width, OUTPUTS, INPUTS, UNROLL, WHOLE)
        opened, passed = opened[:, None], passed[:, None]
    else:
        opened, passed = _rows_twice(
            hidden, gate + offset, up + offset, rows, width, stride_h, ROWS, OUTPUTS, INPUTS, WHOLE
        )
    result = opened / (1.0 + tl.exp(-opened)) * passed
    kept = (place < size)[:, None] & (row < rows)[None, :]
    tl.store(output + row[None, :] * size + place[:, None], result.to(output.dtype.element_ty), mask=kept)


@triton.jit
def _prefetch(weights, width, INPUTS: tl.constexpr, STEPS: tl.constexpr):
    """Fetch the weights of the first steps into the L2 cache, by lines of 128 bytes."""
    line: tl.constexpr = 1024 // weights.dtype.element_ty.primitive_bitwidth
    for step in tl.static_range(STEPS):
        column = step * INPUTS + tl.arange(0, INPUTS // line) * line
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1];\n\tmov.u32 $0, 0;",
            "=r,l",
            [(weights + tl.minimum(column, width - 1)[None, :]).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _tile(source, start, width, column, WHOLE: tl.constexpr):
    if WHOLE:
        tile = tl.load(source + start + column, eviction_policy="evict_first")
    else:
        tile = tl.load(source + start + column, mask=start + column < width, other=0.0)
    return tile


@triton.jit
def _given(inputs, start, width, column, there, WHOLE: tl.constexpr):
    """Rows of the input; those that are only there to fill a matrix instruction are not fetched."""
    if not WHOLE:
        there = there & (start + column < width)
    return tl.load(inputs + start + column, mask=there, other=0.0)


@triton.jit
def _row(
    hidden,
    weights,
    width,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    UNROLL: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """[OUTPUTS] products with one row."""
    column = tl.arange(0, INPUTS)[None, :]
    result = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in tl.range(0, width, INPUTS, loop_unroll_factor=UNROLL):
        given = tl.load(hidden + start + column, mask=start + column < width, other=0.0).to(tl.float32)
        result += _tile(weights, start, width, column, WHOLE).to(tl.float32) * given
    return tl.sum(result, 1)


@triton.jit
def _row_twice(
    hidden,
    gates,
    ups,
    width,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    UNROLL: tl.constexpr,
    WHOLE: tl.constexpr,
):
    column = tl.arange(0, INPUTS)[None, :]
    opened, passed = tl.zeros([OUTPUTS, INPUTS], tl.float32), tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in tl.range(0, width, INPUTS, loop_unroll_factor=UNROLL):
        given = tl.load(hidden + start + column, mask=start + column < width, other=0.0).to(tl.float32)
        opened += _tile(gates, start, width, column, WHOLE).to(tl.float32) * given
        passed += _tile(ups, start, width, column, WHOLE).to(tl.float32) * given
    return tl.sum(opened, 1), tl.sum(passed, 1)


@triton.jit
def _rows(
    hidden,
    weights,
    rows,
    width,
    stride_h,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """[OUTPUTS, ROWS] products."""
    row, column = tl.arange(0, ROWS), tl.arange(0, INPUTS)
    inputs, there = hidden + row[None, :] * stride_h, (row < rows)[None, :]
    result = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, width, INPUTS):
        some = _tile(weights, start, width, column[None, :], WHOLE)
        given = _given(inputs, start, width, column[:, None], there, WHOLE)
        result = tl.dot(some, given, result, input_precision="ieee")
    return result


@triton.jit
def _rows_twice(
    hidden,
    gates,
    ups,
    rows,
    width,
    stride_h,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    row, column = tl.arange(0, ROWS), tl.arange(0, INPUTS)
    inputs, there = hidden + row[None, :] * stride_h, (row < rows)[None, :]
    opened, passed = tl.zeros([OUTPUTS, ROWS], tl.float32), tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, width, INPUTS):
        some = _tile(gates, start, width, column[None, :], WHOLE)
        others = _tile(ups, start, width, column[None, :], WHOLE)
        given = _given(inputs, start, width, column[:, None], there, WHOLE)
        opened = tl.dot(some, given, opened, input_precision="ieee")
        passed = tl.dot(others, given, passed, input_precision="ieee")
    return opened, passed
