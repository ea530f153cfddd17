"""Stopping the cache at any line of its code, and comparing all that it may have changed."""

from __future__ import annotations

import contextlib
import sys

from decodekit.cache import allocator, blocks, prefix
from decodekit.cache.blocks import BlockPool, BlockTable

SOURCES = {module.__file__ for module in (allocator, blocks, prefix)}


class Interrupted(BaseException):
    """Stands for a KeyboardInterrupt."""


@contextlib.contextmanager
def interrupted(at_line: int | None):
    """Raise Interrupted before the given line of the cache's code, counted from 1 as lines are executed."""
    left = at_line or 0

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename not in SOURCES:
            return None
        if event == "line":
            left -= 1
            if not left:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace if at_line else before)
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def failing_take(pool: BlockPool, at: int | None, late: bool):
    """Raise Interrupted when block number ``at`` of an allocation is taken, before or after it is."""
    taken, take = 0, pool._allocator.take

    def failing(block: int) -> None:
        nonlocal taken
        if taken == at and not late:
            raise Interrupted
        take(block)
        if taken == at:
            raise Interrupted
        taken += 1

    pool._allocator.take = failing
    try:
        yield
    finally:
        del pool._allocator.take


def state(pool: BlockPool, *tables: BlockTable):
    """Everything that an operation may change, to be compared with ``==``."""
    inner = pool._allocator
    return (
        inner.references.copy(),
        inner.chains.copy(),
        inner.free.copy(),
        list(inner.cached),
        inner._rested.copy(),
        inner.counts.copy(),
        {chain: chain.holders for chain in pool._index._chains.values() if chain.holders},
        [vars(table).copy() for table in tables],
    )
