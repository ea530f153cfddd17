"""Masks of bits over logits in Triton: reads the bits, writes what is excluded."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WORDS = 128  # a program


def apply_bitmask(logits: Tensor, words: Tensor) -> None:
    """As the reference; both tensors are contiguous in their last dimension."""
    positions, vocab_size = logits.shape
    _mask[(triton.cdiv(vocab_size, 32 * _WORDS), positions)](
        logits, words, logits.stride(0), words.stride(0), vocab_size, WORDS=_WORDS, num_warps=4
    )


@triton.jit
def _mask(logits, words, stride_l, stride_w, vocab_size, WORDS: tl.constexpr):
    position = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(words + position * stride_w + word, mask=word * 32 < vocab_size, other=-1)
    place = tl.arange(0, 32)
    token = word[:, None] * 32 + place[None, :]
    excluded = ((bits[:, None] >> place[None, :]) & 1) == 0
    tl.store(logits + position * stride_l + token, float("-inf"), mask=excluded & (token < vocab_size))
