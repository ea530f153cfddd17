"""RMSNorm in Triton: a row a program, read once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decodekit.kernels import overlaps


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """As the reference; the last dimension is contiguous."""
    width = hidden.shape[-1]
    rows = hidden.reshape(-1, width)
    output = hidden.new_empty(hidden.shape)
    size = triton.next_power_of_2(width)
    _norm[(len(rows),)](
        rows,
        weight,
        output,
        rows.stride(0),
        width,
        eps,
        offset,
        SIZE=size,
        OVERLAP=(overlap := overlaps(hidden.device)),
        num_warps=max(1, min(16, size // 512)),
        **({"launch_pdl": True} if overlap else {}),
    )
    return output


@triton.jit
def _norm(hidden, weight, output, stride, width, eps, offset, SIZE: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    there = place < width
    given = tl.load(hidden + row * stride + place, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(weight + place, mask=there, other=0.0).to(tl.float32) + offset
    result = given * tl.rsqrt(tl.sum(given * given, 0) / width + eps) * scale
    tl.store(output + row * width + place, result.to(output.dtype.element_ty), mask=there)
