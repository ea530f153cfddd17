"""K/V of one layer in 8, 4 or 2 bits a number: full blocks are quantized, blocks still being filled are not.

After KIVI (Liu et al., 2024, arXiv:2402.02750): keys by channel, since a few channels hold the outliers, values by token.
A group never leaves its block: the scale of a key channel is that of the block's tokens in one head, so blocks are shared,
copied and freed as they are, and no row depends on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from decodekit.core.errors import InputError, nearest
from decodekit.kernels.kv_quantize import BITS, dequantize, quantize
from decodekit.kernels.paged_attention import QuantizedKV


class QuantizedStore:
    """A ``KVStore`` whose sealed blocks are quantized.

    A block that was written and not sealed is *residual*: it lies in a small pool in full precision, which grows and
    shrinks with what is in it. ``seal`` quantizes it; whoever seals late has a residual window. A write into a quantized
    block (a sequence was rolled back into it) makes it residual again, with the tokens before the write as they were read
    until then. Sealed once more, values keep these very numbers, and so do keys if the block holds the same; where a new
    token changes the range of a channel, the earlier keys of that channel lose up to half a step once more.

    A number's error is that of ``quantize`` in ``kernels/kv_quantize``: half a step of its group. NaN or infinity in an
    integer kind spreads over its group (a key: that channel of its head in the block; a value: that head of its token), and
    nothing else.

    Args:
        num_blocks: blocks to have room for.
        block_size: tokens a block.
        keys: [N, H, D] the first keys, for their width, dtype and device.
        values: [N, H, Dv] the first values.
        kind: ``int8``, ``fp8`` (e4m3), ``int4`` or ``int2``.

    Raises:
        InputError: the kind is none of these.
    """

    def __init__(self, num_blocks: int, block_size: int, keys: Tensor, values: Tensor, kind: str) -> None:
        if kind not in BITS:
            raise InputError(f"unknown quantization {kind!r}: {nearest(str(kind), BITS)}")
        self._block_size = block_size
        self._quantized = (
            _QuantizedBlocks(num_blocks, block_size, keys, kind, by_channel=True),
            _QuantizedBlocks(num_blocks, block_size, values, kind, by_channel=False),
        )
        with torch.inference_mode(False):
            self._residual = tuple(part.new_zeros((0, block_size, *part.shape[1:])) for part in (keys, values))
            # Where each block lies in the residual pool; -1: it is quantized, or was never written.
            self._places = torch.full((num_blocks,), -1, dtype=torch.int32, device=keys.device)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` [N, H, D] and ``values`` [N, H, Dv] in ``slots`` [N] int64.

        Who writes the first token of a block begins it anew: nothing that it held is kept.
        """
        blocks = slots // self._block_size
        quantized = blocks[self._places[blocks] < 0]
        if len(quantized):
            begun = blocks[slots % self._block_size == 0]
            self._make_residual(quantized.unique(), begun)
        target = self._places[blocks] * self._block_size + slots % self._block_size
        for pool, numbers in zip(self._residual, (keys, values), strict=True):
            pool.flatten(0, 1).index_copy_(0, target, numbers.detach())

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Gather ``slots`` [R, T]: keys [R, T, H, D] and values [R, T, H, Dv], of the dtype they were written in.

        Only these tokens are dequantized. Those of residual blocks are exact.
        """
        flat = slots.flatten()
        keys, values = (self._read(part, flat).unflatten(0, slots.shape) for part in range(2))
        return keys, values

    @property
    def keys(self) -> QuantizedKV:
        """[slots, H, D], to be dequantized where they are read; until the next change."""
        return self._in_place(0)

    @property
    def values(self) -> QuantizedKV:
        """[slots, H, Dv], as the keys."""
        return self._in_place(1)

    def gather(self, slots: Tensor) -> list[Tensor]:
        """The same, [R, H, T, D] and [R, H, T, Dv]."""
        return [part.transpose(1, 2) for part in self.read(slots)]

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks, [n] int64 each; no block is both a source and a target. Codes are copied as they are."""
        source, target = source.to(self._places.device), target.to(self._places.device)
        self._places[target] = -1
        places = self._places[source]
        quantized, residual = places < 0, places >= 0
        for blocks in self._quantized:
            blocks.copy(source[quantized], target[quantized])
        free = self._room(int(residual.sum()))
        for pool in self._residual:
            pool[free] = pool[places[residual]]
        self._places[target[residual]] = free

    def grow(self, num_blocks: int) -> None:
        """Have room for at least so many blocks, with what is in those that there are."""
        if (missing := num_blocks - len(self._places)) > 0:
            for blocks in self._quantized:
                blocks.grow(num_blocks)
            with torch.inference_mode(False):
                self._places = torch.cat([self._places, self._places.new_full((missing,), -1)])

    def seal(self, blocks: Tensor) -> None:
        """Quantize these blocks, [n] int64, which are full of committed tokens; those that are quantized stay as they are."""
        blocks = blocks.to(self._places.device)
        residual = blocks[self._places[blocks] >= 0]
        if not len(residual):
            return
        for quantized, pool in zip(self._quantized, self._residual, strict=True):
            quantized.write(residual, pool[self._places[residual]])
        self.release(residual)

    def release(self, blocks: Tensor) -> None:
        """What these blocks, [n] int64, have in full precision is no longer needed: they were sealed or freed."""
        self._places[blocks.to(self._places.device)] = -1
        residual = (self._places >= 0).nonzero().squeeze(1)
        if len(self._residual[0]) > 2 * len(residual):
            with torch.inference_mode(False):
                pools = tuple(pool[self._places[residual]] for pool in self._residual)
                places = torch.full_like(self._places, -1)
                places[residual] = torch.arange(len(residual), dtype=places.dtype, device=places.device)
            vars(self).update(_residual=pools, _places=places)  # one call: an interrupt comes before or after it

    def save(self, blocks: Tensor) -> list[tuple[Tensor, ...]]:
        """What each of these blocks, [n] int64, holds: codes and scales, or if it is residual its numbers."""
        places = self._places[blocks.to(self._places.device)].tolist()
        return [
            tuple(pool[place] for pool in self._residual)
            if place >= 0
            else tuple(part for quantized in self._quantized for part in quantized.save(block))
            for block, place in zip(blocks.tolist(), places, strict=True)
        ]

    def load(self, blocks: Tensor, saved: Sequence[Sequence[Tensor]]) -> None:
        """These blocks, [n] int64, hold what :meth:`save` gave for n blocks."""
        keys, values = self._quantized
        residual = torch.tensor([len(parts) == len(self._residual) for parts in saved])
        blocks = blocks.to(self._places.device)
        self._places[blocks] = -1
        for block, parts in zip(blocks.tolist(), saved, strict=True):
            if len(parts) > len(self._residual):
                keys.load(block, *parts[:2])
                values.load(block, *parts[2:])
        places = self._room(int(residual.sum()))
        for place, parts in zip(places.tolist(), (p for p in saved if len(p) == len(self._residual)), strict=True):
            for pool, part in zip(self._residual, parts, strict=True):
                pool[place] = part
        self._places[blocks[residual.to(blocks.device)]] = places

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self._places.device

    @property
    def nbytes(self) -> int:
        """Bytes held on the device: codes and scales of all blocks, the residual pool, and where blocks lie in it."""
        held = sum(blocks.nbytes for blocks in self._quantized) + sum(pool.nbytes for pool in self._residual)
        return held + self._places.nbytes

    def _in_place(self, part: int) -> QuantizedKV:
        blocks = self._quantized[part]
        return QuantizedKV(
            blocks.codes,
            blocks.scales,
            self._residual[part],
            self._places,
            kind=blocks.kind,
            read=partial(self._read, part),
        )

    def _read(self, part: int, slots: Tensor) -> Tensor:
        """The keys or the values of ``slots`` [N]."""
        blocks, pool = self._quantized[part], self._residual[part]
        places = self._places[slots // self._block_size]
        quantized, residual = (places < 0).nonzero().squeeze(1), (places >= 0).nonzero().squeeze(1)
        source = places[residual] * self._block_size + slots[residual] % self._block_size
        numbers = pool.new_empty((len(slots), *pool.shape[2:]))
        numbers.index_copy_(0, quantized, blocks.read(slots[quantized]))
        numbers.index_copy_(0, residual, pool.flatten(0, 1).index_select(0, source))
        return numbers

    def _make_residual(self, blocks: Tensor, begun: Tensor) -> None:
        free = self._room(len(blocks))
        kept = torch.isin(blocks, begun, invert=True)
        offsets = torch.arange(self._block_size, device=blocks.device)
        slots = blocks[kept].unsqueeze(1) * self._block_size + offsets
        for quantized, pool in zip(self._quantized, self._residual, strict=True):
            pool[free[kept]] = quantized.read(slots.flatten()).unflatten(0, slots.shape)
        self._places[blocks] = free

    def _room(self, count: int) -> Tensor:
        """``count`` unused places of the residual pool, which grows by no more than it lacks."""
        capacity = len(self._residual[0])
        unused = torch.ones(capacity, dtype=torch.bool, device=self._places.device)
        unused[self._places[self._places >= 0]] = False
        free = unused.nonzero().squeeze(1).to(self._places.dtype)
        if (missing := count - len(free)) > 0:
            with torch.inference_mode(False):
                self._residual = tuple(
                    torch.cat((pool, pool.new_zeros((missing, *pool.shape[1:])))) for pool in self._residual
                )
            added = torch.arange(capacity, capacity + missing, dtype=free.dtype, device=free.device)
            free = torch.cat((free, added))
        return free[:count]


class _QuantizedBlocks:
    """The keys, or the values, of all blocks in their quantized form.

    ``codes`` [slots, H, bytes]; ``scales`` [slots / span, S, H, D or 1], where ``span`` tokens share theirs.
    """

    def __init__(self, num_blocks: int, block_size: int, example: Tensor, kind: str, *, by_channel: bool) -> None:
        self.kind, self._block_size, self._width, self._dtype = kind, block_size, example.shape[-1], example.dtype
        self._span, self._dim = (block_size, 1) if by_channel else (1, -1)
        with torch.inference_mode(False):
            codes, scales = self._quantize(example.new_zeros((1, block_size, *example.shape[1:])))
            self.codes = codes.new_zeros((num_blocks * len(codes), *codes.shape[1:]))
            self.scales = scales.new_zeros((num_blocks * len(scales), *scales.shape[1:]))

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def grow(self, num_blocks: int) -> None:
        """Have room for so many blocks."""
        slots = num_blocks * self._block_size
        with torch.inference_mode(False):
            self.codes, self.scales = (
                torch.cat([old, old.new_zeros((count - len(old), *old.shape[1:]))])
                for old, count in ((self.codes, slots), (self.scales, slots // self._span))
            )

    def write(self, blocks: Tensor, numbers: Tensor) -> None:
        """Quantize ``numbers`` [n, block_size, H, D] into ``blocks`` [n]."""
        for stored, part in zip(self._by_block(), self._quantize(numbers), strict=True):
            stored[blocks] = part.unflatten(0, (len(blocks), stored.shape[1]))

    def read(self, slots: Tensor) -> Tensor:
        """The numbers of ``slots`` [N]: [N, H, D]."""
        codes = self.codes.index_select(0, slots)
        scales = self.scales.index_select(0, slots // self._span).movedim(1, 0)
        return dequantize(codes, scales, self.kind, self._width, self._dtype)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks."""
        for stored in self._by_block():
            stored[target] = stored[source]

    def save(self, block: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of a block."""
        codes, scales = self._by_block()
        return codes[block], scales[block]

    def load(self, block: int, codes: Tensor, scales: Tensor) -> None:
        """A block gets these codes and scales."""
        for stored, part in zip(self._by_block(), (codes, scales), strict=True):
            stored[block] = part

    def _by_block(self) -> tuple[Tensor, Tensor]:
        size = self._block_size
        return self.codes.unflatten(0, (-1, size)), self.scales.unflatten(0, (-1, size // self._span))

    def _quantize(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = quantize(numbers, self._dim, self.kind)
        return codes.flatten(0, 1), scales.movedim(0, 2).flatten(0, 1)
