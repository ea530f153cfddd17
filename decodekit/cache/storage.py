"""Where the K/V of one layer lie: slots of a pool's blocks, written and gathered by index."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class KVStore(Protocol):
    """The K/V of one layer. Slot ``s`` is token ``s % block_size`` of block ``s // block_size``.

    Shapes: N tokens, R rows, T columns, H K/V heads, D and Dv the widths of a head's key and value.
    """

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` [N, H, D] and ``values`` [N, H, Dv] in ``slots`` [N] int64.

        A write into a sealed block means that a sequence was rolled back into it: the tokens before stay as they are.
        """

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Gather ``slots`` [R, T]: keys [R, T, H, D] and values [R, T, H, Dv], of the dtype they were written in.

        Read only: they may be views of the storage.
        """

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks, [n] int64 each; no block is both a source and a target."""

    def seal(self, blocks: Tensor) -> None:
        """These blocks, [n] int64, are full of committed tokens that no step will take back."""

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""


class FullStore:
    """K/V as they are: a tensor for the keys and one for the values, in full precision.

    Args:
        num_blocks: blocks of the pool.
        block_size: tokens a block.
        keys: [N, H, D] the first keys, for their width, dtype and device.
        values: [N, H, Dv] the first values.
        dtype: what to keep them in; ``None`` keeps the model's.
    """

    def __init__(
        self, num_blocks: int, block_size: int, keys: Tensor, values: Tensor, dtype: torch.dtype | None = None
    ) -> None:
        slots = num_blocks * block_size
        self._block_size, self._dtype = block_size, keys.dtype
        self.keys = torch.empty((slots, *keys.shape[1:]), dtype=dtype or keys.dtype, device=keys.device)
        self.values = torch.empty((slots, *values.shape[1:]), dtype=dtype or values.dtype, device=values.device)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """See :class:`KVStore`."""
        self.keys.index_copy_(0, slots, keys.to(self.keys.dtype))
        self.values.index_copy_(0, slots, values.to(self.values.dtype))

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`KVStore`."""
        flat = slots.flatten()
        keys, values = (
            stored.index_select(0, flat).unflatten(0, slots.shape).to(self._dtype) for stored in (self.keys, self.values)
        )
        return keys, values

    def copy(self, source: Tensor, target: Tensor) -> None:
        """See :class:`KVStore`."""
        for stored in (self.keys, self.values):
            blocks = stored.view(-1, self._block_size, *stored.shape[1:])
            blocks[target] = blocks[source]

    def seal(self, blocks: Tensor) -> None:
        """Full precision has nothing to do for a full block."""

    @property
    def nbytes(self) -> int:
        """See :class:`KVStore`."""
        return self.keys.nbytes + self.values.nbytes
