"""Rotary position embeddings in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn the two halves of every head against each other (Su et al., 2021, arXiv:2104.09864).

    R rows, q tokens.

    Args:
        query: [R, Hq, q, D].
        key: [R, Hk, q, D].
        cos: [R, q, D], or [1, q, D] for all rows.
        sin: likewise.

    Returns:
        both, rotated.
    """

    def turned(heads: Tensor) -> Tensor:
        left, right = heads.chunk(2, dim=-1)
        return heads * cos.unsqueeze(1) + torch.cat([-right, left], dim=-1) * sin.unsqueeze(1)

    return turned(query), turned(key)
