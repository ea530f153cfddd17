"""The repetition penalty in Triton: what was read before is written over, so that no token is penalized twice."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 512  # of the tokens a program


def penalize_repeated(logits: Tensor, tokens: Tensor, start: Tensor | None, stop: Tensor, penalty: float) -> Tensor:
    """As the reference, but in float32; ``logits`` and ``tokens`` are contiguous in their last dimension."""
    output = logits.clone()
    positions, width = tokens.shape
    if width:
        _penalize[(triton.cdiv(width, _COLUMNS), positions)](
            logits,
            tokens,
            start,
            stop,
            output,
            logits.stride(0),
            tokens.stride(0),
            output.stride(0),
            logits.shape[1],
            penalty,
            COLUMNS=_COLUMNS,
            num_warps=4,
        )
    return output


@triton.jit
def _penalize(
    logits,
    tokens,
    start,
    stop,
    output,
    stride_l,
    stride_t,
    stride_o,
    vocab_size,
    penalty,
    COLUMNS: tl.constexpr,
):
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    occurred = column < tl.load(stop + row)
    if start is not None:
        occurred = occurred & (column >= tl.load(start + row))
    token = tl.load(tokens + row * stride_t + column, mask=occurred, other=0)
    occurred = occurred & (token < vocab_size)
    score = tl.load(logits + row * stride_l + token, mask=occurred, other=0.0).to(tl.float32)
    penalized = tl.where(score > 0, score / penalty, score * penalty)
    tl.store(output + row * stride_o + token, penalized.to(output.dtype.element_ty), mask=occurred)
