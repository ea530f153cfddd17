"""K/V that are dequantized as they are read: codes and scales of full blocks, the numbers of those still being filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LARGEST_BLOCK = 64
"""Most tokens a block: the keys that the kernel reads at a time."""


@dataclass(frozen=True, eq=False)
class QuantizedKV:
    """The keys, or the values, of one layer in blocks; it stands where a cache [S, H, D] would.

    Codes and scales are those of ``quantize`` in ``kernels/kv_quantize``, which says how numbers lie in bytes. All tensors are
    contiguous.

    Attributes:
        codes: [S, H, B] uint8.
        scales: of keys [blocks, L, H, D], of a channel in a block; of values [S, L, H, 1], of a token. 2 bytes each: lowest and
            highest number of a group (L is 2), or its power of two (L is 1).
        residual: [P, block_size, H, D] blocks that are not quantized.
        places: [blocks] int32, where each block lies in ``residual``; -1: it is quantized.
        kind: ``int8``, ``fp8``, ``int4`` or ``int2``.
        read: the numbers of slots [N] int64: [N, H, D], in plain torch.
    """

    codes: Tensor
    scales: Tensor
    residual: Tensor
    places: Tensor
    kind: str
    read: Callable[[Tensor], Tensor]

    @property
    def shape(self) -> torch.Size:
        """(S, H, D)."""
        return torch.Size((*self.codes.shape[:2], self.residual.shape[3]))

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers."""
        return self.residual.dtype

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.residual.shape[1]


KV = Tensor | QuantizedKV
"""Keys or values: [S, H, D]."""


def in_place(keys: QuantizedKV, values: QuantizedKV) -> dict[str, Any]:
    """What the kernel is given of both beside their codes."""
    return {
        "key_scales": keys.scales,
        "value_scales": values.scales,
        "key_pool": keys.residual,
        "value_pool": values.residual,
        "places": keys.places,
        "KIND": keys.kind,
        "KEY_BYTES": keys.codes.shape[2],
        "VALUE_BYTES": values.codes.shape[2],
        "LARGEST": min(torch.finfo(keys.dtype).max, torch.finfo(torch.float32).max),
    }


def why_torch(cache: QuantizedKV) -> str | None:
    """Why the kernel does not read such K/V; ``None``: it does."""
    size = cache.block_size
    if size > LARGEST_BLOCK or size & (size - 1):
        return f"quantized blocks of {size} tokens"
    if cache.kind == "fp8" and cache.codes.is_cuda and torch.cuda.get_device_capability(cache.codes.device) < (8, 9):
        return "fp8 on a GPU without it"
    return None
