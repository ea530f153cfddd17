"""The largest logit of a row in Triton: of parts of the vocabulary first, then of these."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 2048  # of the vocabulary a program


def top_token(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference; ``logits`` are contiguous in their last dimension."""
    rows, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, _TOKENS)
    parts = logits.new_empty((rows, chunks))
    places = logits.new_empty((rows, chunks), dtype=torch.int64)
    top, tokens = logits.new_empty(rows), logits.new_empty(rows, dtype=torch.int64)
    _parts[(chunks, rows)](logits, parts, places, logits.stride(0), vocab_size, TOKENS=_TOKENS, num_warps=4)
    _whole[(rows,)](parts, places, top, tokens, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1)
    return top, tokens


@triton.jit
def _order(number):
    """Of float32, an int32 of the same order; NaN comes last."""
    bits = (number + 0.0).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return tl.where(number != number, 2147483647, bits ^ ((bits >> 31) & 0x7FFFFFFF))  # noqa: PLR0124  only NaN differs from itself


@triton.jit
def _parts(logits, parts, places, stride, vocab_size, TOKENS: tl.constexpr):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    number = tl.load(logits + row * stride + token, mask=token < vocab_size, other=float("-inf"))
    key = _order(number.to(tl.float32))
    place = tl.min(tl.where(key == tl.max(key, 0), token, 2147483647), 0)
    to = row * tl.num_programs(0) + chunk
    tl.store(parts + to, tl.load(logits + row * stride + place))
    tl.store(places + to, place.to(tl.int64))


@triton.jit
def _whole(parts, places, top, tokens, chunks, CHUNKS: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    number = tl.load(parts + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    key = tl.where(chunk < chunks, _order(number.to(tl.float32)), -2147483648)
    first = tl.min(tl.where(key == tl.max(key, 0), chunk, CHUNKS), 0)
    tl.store(top + row, tl.load(parts + row * chunks + first))
    tl.store(tokens + row, tl.load(places + row * chunks + first))
