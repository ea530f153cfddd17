"""Whether what takes the place of a model's own computation gives the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor

CLOSE = 2e-2  # of two computations in half precision


def close(left: Tensor, right: Tensor, apart: float = CLOSE) -> bool:
    """Whether the norm of the difference is small beside that of ``left``."""
    return bool((left.float() - right.float()).norm() <= apart * left.float().norm())


def waves(*shape: int, device: torch.device | None = None) -> Tensor:
    """Numbers of all kinds without a random generator, whose state is the caller's."""
    count = torch.Size(shape).numel()
    return torch.arange(count, device=device).mul(0.7).sin().mul(2).reshape(shape)
