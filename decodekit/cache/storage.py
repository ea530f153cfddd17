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

    def release(self, blocks: Tensor) -> None:
        """Nobody needs what these blocks, [n] int64, hold."""

    @property
    def device(self) -> torch.device:
        """Where they lie."""

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""


class FullStore:
    """K/V as they are: a tensor for the keys and one for the values, in full precision.

    All slots of a head lie together, so that what is gathered has the layout that attention reads fastest.

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
        self._block_size, self._dtype = block_size, keys.dtype
        self._keys, self._values = (
            torch.empty(
                (new.shape[1], num_blocks * block_size, new.shape[2]), dtype=dtype or new.dtype, device=new.device
            )
            for new in (keys, values)
        )

    @property
    def keys(self) -> Tensor:
        """[slots, H, D], a view that is contiguous in its last dimension."""
        return self._keys.transpose(0, 1)

    @property
    def values(self) -> Tensor:
        """[slots, H, Dv], a view that is contiguous in its last dimension."""
        return self._values.transpose(0, 1)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """See :class:`KVStore`."""
        for stored, new in ((self._keys, keys), (self._values, values)):
            stored.index_copy_(1, slots, new.transpose(0, 1).to(stored.dtype))

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`KVStore`."""
        flat = slots.flatten()
        keys, values = (
            stored.index_select(1, flat).unflatten(1, slots.shape).permute(1, 2, 0, 3).to(self._dtype)
            for stored in (self._keys, self._values)
        )
        return keys, values

    def copy(self, source: Tensor, target: Tensor) -> None:
        """See :class:`KVStore`."""
        for stored in (self._keys, self._values):
            blocks = stored.unflatten(1, (-1, self._block_size))
            blocks[:, target] = blocks[:, source]

    def seal(self, blocks: Tensor) -> None:
        """Full precision has nothing to do for a full block."""

    def release(self, blocks: Tensor) -> None:
        """The pool keeps its size."""

    @property
    def device(self) -> torch.device:
        """See :class:`KVStore`."""
        return self._keys.device

    @property
    def nbytes(self) -> int:
        """See :class:`KVStore`."""
        return self._keys.nbytes + self._values.nbytes
