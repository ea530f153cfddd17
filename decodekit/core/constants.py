"""Tensors of a few numbers that are the same at every step."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=256)
def constant(values: tuple[int, ...] | tuple[float, ...], device: torch.device) -> Tensor:
    """These numbers on a device, never to be edited: made once, since a captured graph cannot copy them there."""
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)
