"""Masks of bits over logits, in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def apply_bitmask(logits: Tensor, words: Tensor) -> None:
    """Set the logits of excluded tokens to ``-inf``.

    Args:
        logits: [P, V], changed in place.
        words: [P, ceil(V / 32)] int32; token t may come if bit ``t % 32`` of word ``t // 32`` is set.
    """
    bits = words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -math.inf)
