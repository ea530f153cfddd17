"""Caches that lie ready for the next call with the same model, with the graphs that were captured over them.

A graph knows K/V by their addresses, so that it lives no longer than the memory of its cache. One cache a model is kept, the
last that was used; a call that needs a larger one makes its own, which takes its place.
"""

from __future__ import annotations

from threading import Lock
from typing import Any
from weakref import WeakSet

import torch

from decodekit.cache.paged import PagedCache


class _Shelf:
    """Lies on the model itself: what it holds refers to the model, and is collected with it. Copies of a model have none."""

    def __init__(self) -> None:
        self.cache: PagedCache | None = None
        self.dtype: torch.dtype | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shelf:
        return _Shelf()

    def __reduce__(self) -> tuple[type[_Shelf], tuple[()]]:
        return _Shelf, ()


_NAME = "_decodekit_shelf"
_BORROWED: WeakSet[PagedCache] = WeakSet()
_LOCK = Lock()


def borrow(model: Any, num_blocks: int, block_size: int) -> PagedCache:
    """A cache for captured steps of a model, with at least so many blocks; :func:`give_back` ends the loan."""
    with _LOCK:
        shelf = _shelf(model)
        cache, shelf.cache = shelf.cache, None
        if cache is not None and not _fits(cache, shelf.dtype, model, num_blocks, block_size):
            cache.forget_captured()
            cache = None  # its memory is needed
        shelf.dtype = model.dtype
    if cache is None:
        cache = PagedCache(
            model.config,
            num_blocks=num_blocks,
            block_size=block_size,
            device=model.device,
            prefix_cache=False,
            preallocate=True,
        )
    _BORROWED.add(cache)
    return cache


def _fits(cache: PagedCache, dtype: torch.dtype | None, model: Any, num_blocks: int, block_size: int) -> bool:
    pools = [group.pool for group in cache.groups]
    return (cache.device, dtype) == (model.device, model.dtype) and all(
        pool.num_blocks >= num_blocks and pool.block_size == block_size for pool in pools
    )


def give_back(model: Any, cache: PagedCache) -> None:
    """Keep a borrowed cache, whose rows are over, for the next call; others are left alone."""
    with _LOCK:
        if cache in _BORROWED:
            _BORROWED.discard(cache)
            cache.reset()
            _shelf(model).cache = cache


def release(model: Any) -> None:
    """Give up the memory that is kept for the next call with this model."""
    with _LOCK:
        if (cache := _shelf(model).cache) is not None:
            cache.forget_captured()
        vars(model).pop(_NAME)


def _shelf(model: Any) -> _Shelf:
    shelf: _Shelf = vars(model).setdefault(_NAME, _Shelf())
    return shelf
