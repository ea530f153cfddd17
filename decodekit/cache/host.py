"""Host memory behind the device's: evicted blocks and states that a prompt may still hit.

K/V move as they are stored, so they come back bit for bit. From CUDA they go to pinned memory in the order of the current
stream, and nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from decodekit.cache.prefix import Chain
from decodekit.cache.storage import KVStore

Key = TypeVar("Key", bound=Hashable)


class HostCopy(Generic[Key]):
    """Copies on the host of named tensors, which know the devices they came from."""

    def __init__(self, tensors: Mapping[Key, Sequence[Tensor]]) -> None:
        self._held = {key: [(part.device, _to_host(part)) for part in parts] for key, parts in tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(held.nbytes for parts in self._held.values() for _, held in parts)

    def restore(self) -> dict[Key, list[Tensor]]:
        """The tensors on their devices; read only, on the CPU they are the copies themselves."""
        return {
            key: [held.to(device, non_blocking=True) for device, held in parts] for key, parts in self._held.items()
        }


class HostTier:
    """Copies of evicted K/V and states, least recently used first out.

    Args:
        budget: most bytes held.

    Attributes:
        budget: most bytes held.
        counts: blocks ``offloaded`` (copied to the host), and ``hits``: blocks brought back.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self._keeping = budget, False
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._held: dict[Hashable, HostCopy[Any]] = {}
        self.nbytes = 0
        self.counts = {"offloaded": 0, "hits": 0}

    def __contains__(self, key: object) -> bool:
        return key in self._held

    @property
    def blocks(self) -> int:
        """Blocks that are held."""
        return sum(isinstance(key, Chain) for key in self._held)

    def put(self, key: Hashable, copy: HostCopy[Any]) -> None:
        """Hold a copy, in place of those used longest ago; not one that is larger than the budget."""
        self.discard(key)
        if copy.nbytes > self.budget:
            return
        self._held[key] = copy
        self.nbytes += copy.nbytes
        self._trim()

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """What is held now stays until the end of this, even beyond the budget."""
        outer, self._keeping = self._keeping, True
        try:
            yield
        finally:
            self._keeping = outer
            self._trim()

    def get(self, key: Hashable) -> HostCopy[Any]:
        """A copy that is held; it stays, so that it need not be made again."""
        copy = self._held[key] = self._held.pop(key)
        return copy

    def discard(self, key: Hashable) -> None:
        """Let go of a copy, if it is held."""
        if (copy := self._held.pop(key, None)) is not None:
            self.nbytes -= copy.nbytes

    def _trim(self) -> None:
        while self.nbytes > self.budget and not self._keeping:
            self.discard(next(iter(self._held)))


class GroupHost:
    """The part of a tier that a group's pool sees; see :class:`~decodekit.cache.allocator.Host`.

    Args:
        tier: where copies are held.
        layers: of the group.
        stores: their K/V, by layer.
    """

    def __init__(self, tier: HostTier, layers: Sequence[int], stores: Mapping[int, KVStore]) -> None:
        self._tier, self._layers, self._stores = tier, layers, stores

    def __contains__(self, chain: object) -> bool:
        return chain in self._tier

    def get(self, chain: Chain) -> HostCopy[int]:
        """The K/V of a chain's last block, by layer."""
        return self._tier.get(chain)

    def save(self, blocks: Mapping[int, Chain]) -> None:
        """Copy the K/V of these blocks."""
        new = [block for block, chain in blocks.items() if chain not in self._tier]
        copies = dict(zip(new, copy_blocks(self._layers, self._stores, new), strict=True))
        with self._tier.keeping():
            for block, chain in blocks.items():
                self._tier.put(chain, copies[block] if block in copies else self._tier.get(chain))
        self._tier.counts["offloaded"] += len(new)

    def load(self, blocks: Sequence[int], contents: Sequence[HostCopy[int]]) -> None:
        """Write K/V back."""
        write_blocks(self._layers, self._stores, blocks, contents)
        self._tier.counts["hits"] += len(blocks)

    def clear(self) -> None:
        """Forget the K/V and states of all groups: their pools start anew together."""
        self._tier.clear()


def copy_blocks(layers: Sequence[int], stores: Mapping[int, KVStore], blocks: Sequence[int]) -> list[HostCopy[int]]:
    """What each block holds, by layer."""
    if not blocks:
        return []
    saved = {layer: stores[layer].save(torch.tensor(blocks)) for layer in layers}
    return [HostCopy({layer: saved[layer][place] for layer in layers}) for place in range(len(blocks))]


def write_blocks(
    layers: Sequence[int], stores: Mapping[int, KVStore], blocks: Sequence[int], contents: Sequence[HostCopy[int]]
) -> None:
    """Write what :func:`copy_blocks` gave into as many blocks."""
    if not blocks:
        return
    restored = [copy.restore() for copy in contents]
    for layer in layers:
        stores[layer].grow(max(blocks) + 1)
        stores[layer].load(torch.tensor(blocks), [each[layer] for each in restored])


def _to_host(part: Tensor) -> Tensor:
    held = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
    return held.copy_(part.detach(), non_blocking=True)
