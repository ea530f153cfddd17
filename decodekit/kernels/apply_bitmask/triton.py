"""Masks of bits over logits in Triton: reads the bits, writes what is excluded."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WORDS = 32  # a program; the fastest on an H200, of few positions and of many


def apply_bitmask(logits: Tensor, words: Tensor) -> None:
    """As the reference; both tensors are contiguous in their last dimension."""
    positions, vocab_size = logits.shape
    _mask[(triton.cdiv(vocab_size, 32 * _WORDS), positions)](
        logits, words, logits.stride(0), words.stride(0), vocab_size, WORDS=_WORDS, num_warps=4
    )


@triton.jit
def _mask(logits, words, stride_l, stride_w, vocab_size, WORDS: tl.constexpr):
    position, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * WORDS
    word = first + tl.arange(0, WORDS)
    bits = tl.load(words + position * stride_w + word, mask=word * 32 < vocab_size, other=-1)
    excluded = ((bits[:, None] >> tl.arange(0, 32)[None, :]) & 1) == 0
    # In one dimension threads write side by side.
    token = first * 32 + tl.arange(0, WORDS * 32)
    there = tl.reshape(excluded, [WORDS * 32]) & (token < vocab_size)
    tl.store(logits + position * stride_l + token, float("-inf"), mask=there)
