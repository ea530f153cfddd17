"""Copy blocks in Triton: one block of one head a program, read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_NUMBERS = 2048  # moved at a time


def block_copy(cache: Tensor, source: Tensor, target: Tensor, *, block_size: int) -> None:
    """As the reference; ``cache`` is contiguous in its last two dimensions."""
    heads, _, width = cache.shape
    if not len(source):
        return
    source, target = (blocks.to(cache.device).contiguous() for blocks in (source, target))
    _copy[(len(source), heads)](
        cache,
        source,
        target,
        cache.stride(0),
        SIZE=block_size * width,
        BLOCK=min(_NUMBERS, triton.next_power_of_2(block_size * width)),
        num_warps=4,
    )


@triton.jit
def _copy(cache, source, target, stride_h, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    copy, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    origin = cache + head * stride_h + tl.load(source + copy).to(tl.int64) * SIZE
    goal = cache + head * stride_h + tl.load(target + copy).to(tl.int64) * SIZE
    for start in range(0, SIZE, BLOCK):
        number = start + tl.arange(0, BLOCK)
        tl.store(goal + number, tl.load(origin + number, mask=number < SIZE), mask=number < SIZE)
