"""Copy blocks, in plain torch."""

from __future__ import annotations

from torch import Tensor


def block_copy(cache: Tensor, source: Tensor, target: Tensor, *, block_size: int) -> None:
    """Copy the blocks ``source[i]`` to ``target[i]``.

    Args:
        cache: [H, S, D], changed in place; slot ``s`` is token ``s % block_size`` of block ``s // block_size``.
        source: [n] int64.
        target: [n] int64, different from each other and from every source.
        block_size: tokens a block.
    """
    blocks = cache.unflatten(1, (-1, block_size))
    blocks[:, target] = blocks[:, source]
