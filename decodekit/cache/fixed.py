"""What a captured forward reads beside the weights: tensors whose addresses never change, filled anew before it is replayed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decodekit.cache.attention import Layout
from decodekit.cache.storage import FullStore
from decodekit.core.errors import Refused
from decodekit.kernels import triton_runs
from decodekit.kernels.paged_attention import KV, FixedWork, Part, Work, WorkShape, why_torch

if TYPE_CHECKING:
    from decodekit.cache.paged import PagedCache

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows that forwards of runs are captured for; fewer are filled up with rows that have no tokens."""

PACKED = (1, 8, 16, 32, 64, 128, 256)
"""The same of the tokens of packed rows, whose number changes from step to step."""


class FixedLayout(Layout):
    """A layout whose plan is renewed in place."""

    def __init__(self, work: Work, lengths: Tensor, block_size: int, window: int | None) -> None:
        super().__init__(work.table, lengths, torch.empty(0), block_size, window)
        self._work = work

    def parts(self, query: Tensor, keys: KV, values: KV) -> Work | list[Part]:
        """The plan.

        Raises:
            Refused: it was made for other heads, or for the kernel where that does not serve these tensors.
        """
        if (reason := why_torch(query, keys, values)) is not None:
            raise Refused(f"{reason} need a plan of their own for every step")
        if (group := query.shape[1] // keys.shape[1]) != self._work.group:
            raise Refused(f"{group} query heads a K/V head in one layer and {self._work.group} in others")
        self.path = "triton"
        return self._work


class FixedStep(ABC):
    """The tensors of a forward over a cache's blocks; the cache and attention take it for their step.

    Args:
        cache: the cache, which has room for all its blocks from the start.
        shapes: of the plan of each cache group.

    Attributes:
        shapes: the same.
        last: positions of each row that logits are given of: all.
    """

    last = 1

    def __init__(self, cache: PagedCache, shapes: Sequence[WorkShape]) -> None:
        self._cache, self.shapes = cache, tuple(shapes)
        with torch.inference_mode(False):
            self._works = [FixedWork(shape, cache.heads_a_kv_head, cache.device) for shape in shapes]
        self._fixed = triton_runs(cache.device)
        self._slots: list[Tensor] = []
        self._layouts: list[Layout] = []

    @property
    @abstractmethod
    def input_ids(self) -> Tensor:
        """[R, q] int64, as the model is given them."""

    @property
    @abstractmethod
    def position_ids(self) -> Tensor:
        """[R, q] int64."""

    def begin(self) -> None:  # noqa: B027  a packed forward does nothing here
        """A forward begins; a graph holds what this does."""

    def end(self) -> None:  # noqa: B027  nor here
        """A forward is over; a graph holds what this does."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the K/V of the tokens, [R, H, q, D]; attention reads the blocks itself."""
        by_token = [part.transpose(1, 2).flatten(0, 1) for part in (keys, values)]
        self._cache.store(layer).write(self._slots[self._cache.group_of(layer)], *by_token)
        return keys, values

    def layout(self, layer_idx: int) -> Layout:
        """Where the rows' tokens lie in this layer."""
        return self._layouts[self._cache.group_of(layer_idx)]

    def kv(self, layer_idx: int) -> tuple[KV, KV]:
        """This layer's K/V by slot."""
        store = self._cache.store(layer_idx)
        assert isinstance(store, FullStore)
        return store.keys, store.values

    @property
    def paths(self) -> set[str]:
        """What attended to the blocks, see :attr:`Layout.path`."""
        return {layout.path for layout in self._layouts if layout.path is not None}


def bucket(rows: int, device: torch.device, sizes: Sequence[int] = BUCKETS) -> int:
    """How many rows, or tokens, a forward has that is to serve so many."""
    if not triton_runs(device):
        return rows
    return next((size for size in sizes if size >= rows), rows)
