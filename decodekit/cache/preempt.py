"""Rows put aside: a preempted request gives its blocks to others, and goes on later as if nothing had happened."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from decodekit.cache.allocator import OutOfBlocks
from decodekit.cache.blocks import BlockTable
from decodekit.cache.host import copy_blocks, write_blocks
from decodekit.cache.rows import Row
from decodekit.cache.states import StateRef
from decodekit.core.errors import InputError

if TYPE_CHECKING:
    from decodekit.cache.paged import PagedCache


class Suspended:
    """A row that was put aside; :meth:`PagedCache.resume` brings it back. Whoever lets go of it gives the row up.

    Attributes:
        cache: which it was a row of.
        row: as it was, but for states; its tables are of the past; ``None`` once it was resumed.
        contents: of each group, what the held blocks were sealed with.
        kv: of each group, the K/V of the held blocks.
        states: the row's, and those of its past.
    """

    def __init__(self, cache: PagedCache, row: Row) -> None:
        groups, stores, self.cache = cache.groups, cache._stores, weakref.ref(cache)
        self.row: Row | None = replace(row, tables=[replace(table) for table in row.tables])
        self.contents = [group.pool.contents(table) for group, table in zip(groups, row.tables, strict=True)]
        self.kv = [
            copy_blocks(group.layers, stores, [block for block in table.blocks if block is not None])
            for group, table in zip(groups, row.tables, strict=True)
        ]
        refs = [row.state, *(state for _, state in row.past)]
        self.states = [None if ref is None else ref.on_host() for ref in refs]
        # The row's own references would keep the states on their device.
        self.row.state, self.row.past = None, [(length, None) for length, _ in row.past]

    @property
    def nbytes(self) -> int:
        """Bytes held on the host."""
        kv = sum(copy.nbytes for copies in self.kv for copy in copies)
        return kv + sum(copy.nbytes for copy in self.states if copy is not None)


def suspend(cache: PagedCache, number: int) -> Suspended:
    """Put row ``number`` aside; see :meth:`PagedCache.suspend`."""
    suspended = Suspended(cache, cache.rows[number])
    cache.release([number])
    return suspended


def resume(cache: PagedCache, suspended: Suspended) -> int:
    """Append a row that was put aside; see :meth:`PagedCache.resume`."""
    if (row := suspended.row) is None:
        raise InputError("this row was resumed already; suspend it again first")
    if suspended.cache() is not cache or any(
        not group.pool.owns(table) for group, table in zip(cache.groups, row.tables, strict=True)
    ):
        raise InputError("this row was suspended by another cache, or before this one was reset; open its prompt again")
    cache._use_names(row.prompt is not None)
    for group, contents in zip(cache.groups, suspended.contents, strict=True):
        pool, needed = group.pool, len(contents)
        if not pool.can_allocate(needed):
            raise OutOfBlocks(needed, pool.free_blocks, pool.cached_blocks, pool.num_blocks)
    tables = list[BlockTable]()
    state, *past = [None if copy is None else StateRef.from_host(copy) for copy in suspended.states]
    try:
        for group, table, contents, copies in zip(
            cache.groups, row.tables, suspended.contents, suspended.kv, strict=True
        ):
            write = partial(write_blocks, group.layers, cache._stores, contents=copies)
            tables.append(group.pool.reopen(table, contents, write))
        again = replace(row, tables=tables, state=state)
        again.past = [(length, each) for (length, _), each in zip(row.past, past, strict=True)]
        cache._book.rows.append(again)
    except BaseException:
        cache._book.release([replace(row, tables=tables)])
        raise
    suspended.row, suspended.kv, suspended.states = None, [], []
    return len(cache._book.rows) - 1
