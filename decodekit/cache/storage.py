"""Where the K/V of one layer lie: slots of a pool's blocks, written and gathered by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from decodekit.kernels import triton_runs
from decodekit.kernels.block_copy import block_copy
from decodekit.kernels.kv_write import kv_write


class KVStore(Protocol):
    """The K/V of one layer. Slot ``s`` is token ``s % block_size`` of block ``s // block_size``.

    Shapes: N tokens, R rows, T columns, H K/V heads, D and Dv the widths of a head's key and value.
    """

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` [N, H, D] and ``values`` [N, H, Dv] in ``slots`` [N] int64.

        A write into a sealed block means that a sequence was rolled back into it: the tokens before stay as they are.
        """

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Gather ``slots`` [R, T]: keys [R, T, H, D] and values [R, T, H, Dv], of the model's dtype."""

    def gather(self, slots: Tensor) -> list[Tensor]:
        """The same, [R, H, T, D] and [R, H, T, Dv]; or both in one, as :meth:`FullStore.join` has them."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks, [n] int64 each; no block is both a source and a target."""

    def grow(self, num_blocks: int) -> None:
        """Have room for at least so many blocks, with what is in those that there are."""

    def seal(self, blocks: Tensor) -> None:
        """These blocks, [n] int64, are full of committed tokens that no step will take back."""

    def release(self, blocks: Tensor) -> None:
        """Nobody needs what these blocks, [n] int64, hold."""

    def save(self, blocks: Tensor) -> list[tuple[Tensor, ...]]:
        """What each of these blocks, [n] int64, holds, in the form it is stored in. They may be views: copy them."""

    def load(self, blocks: Tensor, saved: Sequence[Sequence[Tensor]]) -> None:
        """These blocks, [n] int64, hold what :meth:`save` gave for n blocks."""

    @property
    def device(self) -> torch.device:
        """Where they lie."""

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""


class FullStore:
    """K/V as they are, in full precision.

    All slots of a head lie together, so that what is gathered has the layout that attention reads fastest.

    Args:
        num_blocks: blocks to have room for.
        block_size: tokens a block.
        keys: [N, H, D] the first keys, for their width, dtype and device.
        values: [N, H, Dv] the first values.
        dtype: what to keep them in; ``None`` keeps the model's.

    Attributes:
        joins: keys and values are written and gathered as one: both are of one width, and no kernel takes them apart.
    """

    def __init__(
        self, num_blocks: int, block_size: int, keys: Tensor, values: Tensor, dtype: torch.dtype | None = None
    ) -> None:
        self._block_size, self._dtype = block_size, keys.dtype
        self._heads = keys.shape[1]
        # Of one width they lie in one tensor, and every read and write is one operation instead of two.
        joined = keys.shape[2] == values.shape[2]
        self.joins = joined and not triton_runs(keys.device)
        shapes = [(self._heads + values.shape[1], keys.shape[2])] if joined else [keys.shape[1:], values.shape[1:]]
        with torch.inference_mode(False):
            self._stored = [
                torch.empty((heads, num_blocks * block_size, width), dtype=dtype or keys.dtype, device=keys.device)
                for heads, width in shapes
            ]

    @property
    def keys(self) -> Tensor:
        """[slots, H, D], a view that is contiguous in its last dimension."""
        return self._stored[0][: self._heads].transpose(0, 1)

    @property
    def values(self) -> Tensor:
        """[slots, H, Dv], a view that is contiguous in its last dimension."""
        last = self._stored[-1]
        return (last[self._heads :] if len(self._stored) == 1 else last).transpose(0, 1)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """See :class:`KVStore`."""
        if triton_runs(self.device):
            kv_write(self.keys, self.values, slots, keys, values)
            return
        if self.joins:
            self.write_joined(slots, self.join(keys, values))
            return
        for stored, part in zip(self._stored, (keys, values), strict=True):
            stored.index_copy_(1, slots, part.transpose(0, 1).to(stored.dtype))

    def join(self, keys: Tensor, values: Tensor) -> Tensor:
        """Keys and values [N, H, ..., D] as they are kept, [N, H + H, ..., D]."""
        joined, dtype = torch.cat([keys, values], dim=1), self._stored[0].dtype
        return joined if joined.dtype == dtype else joined.to(dtype)

    def write_joined(self, slots: Tensor, joined: Tensor) -> None:
        """As :meth:`write`, of what :meth:`join` gave for [N, H, D]."""
        self._stored[0].index_copy_(1, slots, joined.transpose(0, 1))

    def split(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """What :meth:`gather` gave, or a part of its columns, as keys and values."""
        if len(parts) == 1:
            return parts[0].narrow(1, 0, self._heads), parts[0].narrow(1, self._heads, parts[0].shape[1] - self._heads)
        return parts[0], parts[1]

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`KVStore`."""
        keys, values = self.split(self.gather(slots))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def gather(self, slots: Tensor) -> list[Tensor]:
        """See :class:`KVStore`."""
        flat = slots.flatten()
        parts = [stored.index_select(1, flat).unflatten(1, slots.shape) for stored in self._stored]
        parts = [part.transpose(0, 1).to(self._dtype) for part in parts]
        return parts if self.joins or len(parts) == 2 else [*parts[0].tensor_split([self._heads], dim=1)]

    def copy(self, source: Tensor, target: Tensor) -> None:
        """See :class:`KVStore`."""
        for stored in self._stored:
            block_copy(stored, source, target, block_size=self._block_size)

    def grow(self, num_blocks: int) -> None:
        """See :class:`KVStore`."""
        if (missing := num_blocks * self._block_size - self._stored[0].shape[1]) > 0:
            with torch.inference_mode(False):
                self._stored = [
                    torch.cat([stored, stored.new_empty((len(stored), missing, stored.shape[2]))], dim=1)
                    for stored in self._stored
                ]

    def save(self, blocks: Tensor) -> list[tuple[Tensor, ...]]:
        """See :class:`KVStore`."""
        return [tuple(stored[:, block] for stored in self._by_block()) for block in blocks.tolist()]

    def load(self, blocks: Tensor, saved: Sequence[Sequence[Tensor]]) -> None:
        """See :class:`KVStore`."""
        for stored, parts in zip(self._by_block(), zip(*saved, strict=True), strict=True):
            stored[:, blocks] = torch.stack(parts, dim=1)

    def _by_block(self) -> list[Tensor]:
        """[H, blocks, block_size, D] each."""
        return [stored.unflatten(1, (-1, self._block_size)) for stored in self._stored]

    def seal(self, blocks: Tensor) -> None:
        """Full precision has nothing to do for a full block."""

    def release(self, blocks: Tensor) -> None:
        """The pool keeps its size."""

    @property
    def device(self) -> torch.device:
        """See :class:`KVStore`."""
        return self._stored[0].device

    @property
    def nbytes(self) -> int:
        """See :class:`KVStore`."""
        return sum(stored.nbytes for stored in self._stored)
