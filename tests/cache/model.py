"""What a block pool must do, told from the history of operations alone: no reference counts, free list or chains.

The model has a storage of its own, in which a token's K/V are what they depend on: salt, adapter, media and every token
up to it. It predicts which blocks are hit, taken, kept and evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from decodekit.cache.blocks import BlockTable, Copy
from decodekit.cache.prefix import Prompt


@dataclass(eq=False)
class Row:
    """A sequence: its committed tokens, the tokens there is room for, its blocks."""

    table: BlockTable
    prompt: Prompt
    tokens: list[int]
    length: int
    blocks: list[int | None]
    sinks: int = 0
    needed_from: int = 0

    @property
    def sofar(self) -> Prompt:
        return replace(self.prompt, tokens=list(self.tokens))

    @property
    def uncomputed(self) -> list[int]:
        return list(self.prompt.tokens[len(self.tokens) :])


AWAY = -1
"""In the place of a block: the host has what it would hold."""


@dataclass(eq=False)
class Aside:
    """A row that was put aside: what its pool needs to take it back, and what its blocks held."""

    row: Row
    contents: list[Any]
    cells: list[list[Any]]


def content(prompt: Prompt, tokens: list[int] | tuple[int, ...], position: int) -> tuple[Any, ...]:
    """What the K/V of a token depend on."""
    media = [(place, key) for start, stop, key in prompt.media for place in range(start, min(stop, position + 1))]
    return prompt.salt, prompt.extra, tuple(tokens[: position + 1]), tuple(media)


@dataclass
class Model:
    num_blocks: int
    size: int
    window: int | None
    prefix_cache: bool
    host_blocks: int = 0
    rows: list[Row] = field(default_factory=list)
    host: list[Any] = field(default_factory=list)  # what the host's blocks hold; the first is let go of first
    sealed: dict[int, list[Any]] = field(default_factory=dict)  # a full block: all it holds; the first was first to
    idle: list[int] = field(default_factory=list)  # cached blocks; the first is evicted first
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.storage: list[list[Any]] = [["nothing"] * self.size for _ in range(self.num_blocks)]
        self._numbers: dict[Any, int] = {}

    def save(self, blocks: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """As a store: what is in the storage, by number."""
        for block in blocks.tolist():
            self._numbers.update(
                (cell, len(self._numbers)) for cell in self.storage[block] if cell not in self._numbers
            )
        return [(torch.tensor([self._numbers[cell] for cell in self.storage[block]]),) for block in blocks.tolist()]

    def load(self, blocks: torch.Tensor, saved: Sequence[Sequence[torch.Tensor]]) -> None:
        """As a store: what comes back."""
        cells = list(self._numbers)
        for block, (numbers,) in zip(blocks.tolist(), saved, strict=True):
            self.storage[block] = [cells[number] for number in numbers.tolist()]

    def grow(self, num_blocks: int) -> None:
        """As a store: it has room for all."""

    def references(self) -> Counter[int]:
        return Counter(block for row in self.rows for block in row.blocks if block is not None)

    def free(self) -> set[int]:
        return set(range(self.num_blocks)) - set(self.references()) - set(self.idle)

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def first_needed(self, position: int) -> int:
        return 0 if self.window is None else max(position - self.window + 1, 0)

    def donors(self, prompt: Prompt) -> list[tuple[int, list[int | None]]]:
        """The places a prompt can begin at, with the blocks it has there; each the oldest of its content, or AWAY."""
        most = max(len(prompt.tokens) - 1, 0) // self.size
        wanted = [content(prompt, prompt.tokens, (number + 1) * self.size - 1) for number in range(most)]
        found = [
            next(
                (block for block, cells in self.sealed.items() if cells[-1] == key), AWAY if key in self.host else None
            )
            for key in wanted
        ]
        places: list[tuple[int, list[int | None]]] = [(0, [])]
        for full in range(1, most + 1):
            slid = self.first_needed(full * self.size) // self.size
            taken = sum(block == AWAY or block in self.idle for block in found[slid:full])
            if None not in found[slid:full] and taken <= len(self.free()) + len(self.idle):
                places.append((full * self.size, [*[None] * slid, *found[slid:full]]))
        return places

    def opened(self, row: Row) -> None:
        """Check the blocks that took the places of those that were AWAY; their content has come back."""
        hits = [block for block in row.blocks if block not in (None, AWAY)]
        brought = [mine for mine, block in zip(row.table.blocks, row.blocks, strict=True) if block == AWAY]
        for number, block in enumerate(row.blocks):
            if block == AWAY:
                self._use_host(content(row.prompt, row.prompt.tokens, (number + 1) * self.size - 1))
        self._taken(brought, hits)
        for block in brought:
            self.sealed[block] = list(self.storage[block])
        self.idle = [block for block in self.idle if block not in hits]
        row.blocks = list(row.table.blocks)
        hits += brought
        self.rows.append(row)
        most = max(len(row.prompt.tokens) - 1, 0) // self.size if self.prefix_cache else 0
        self._count(hits=len(hits), misses=most - row.length // self.size)

    def put_aside(self, row: Row, contents: list[Any]) -> Aside:
        held = [block for block in row.blocks if block is not None]
        assert [chain is not None for chain in contents] == [block in self.sealed for block in held]
        kept = replace(row, table=replace(row.table), tokens=row.tokens.copy(), blocks=row.blocks.copy())
        return Aside(kept, contents, [list(self.storage[block]) for block in held])

    def resumed(self, aside: Aside, table: BlockTable) -> None:
        row = aside.row
        brought = [block for block in table.blocks if block is not None]
        assert [block is None for block in table.blocks] == [block is None for block in row.blocks]
        self._taken(brought, [])
        for block, chain, cells in zip(brought, aside.contents, aside.cells, strict=True):
            assert self.storage[block] == cells
            if chain is not None:
                self.sealed[block] = cells
        row.table, row.blocks = table, list(table.blocks)
        self.rows.append(row)
        self._count()

    def evicted(self, victims: list[int], keep: list[int | None]) -> None:
        assert victims == [block for block in self.idle if block not in keep][: len(victims)], "the longest unused go"
        for block in victims:
            self._use_host(self.sealed[block][-1])
            self.idle.remove(block)
            self.sealed.pop(block)
        self._count(evictions=len(victims))

    def _taken(self, brought: list[int], keep: list[int | None]) -> None:
        """Free blocks, and instead of missing ones the longest unused, hold what came back."""
        free = self.free()
        victims = [block for block in self.idle if block not in keep][: max(len(brought) - len(free), 0)]
        self.evicted(victims, keep)
        assert set(brought) <= free | set(victims)
        assert len(brought) == len(set(brought))
        self._count(allocated=len(brought))

    def _use_host(self, key: Any) -> None:
        """The host was given a block, or one was hit there."""
        if self.host_blocks:
            self.host = [*(held for held in self.host if held != key), key][-self.host_blocks :]

    def demand(self, rows: list[Row], count: int) -> int:
        """Blocks needed to make room in all rows: of those that share a last block, one may write into it."""
        references, writers = (
            self.references(),
            Counter(row.blocks[-1] for row in rows if count and row.length % self.size),
        )
        copied = sum(many - (many == references[block]) for block, many in writers.items())
        return copied + sum(self.blocks_of(row.length + count) - len(row.blocks) for row in rows)

    def appended(self, rows: list[Row], count: int, copies: list[list[Copy]]) -> None:
        for row, copied in sorted(zip(rows, copies, strict=True), key=lambda pair: pair[0].length):
            self._appended(row, count, copied)

    def _appended(self, row: Row, count: int, copies: list[Copy]) -> None:
        """Check the blocks that were taken against those that had to be."""
        last = row.blocks[-1] if count and row.length % self.size else None
        copied = last is not None and self.references()[last] > 1
        needed = self.demand([row], count)
        assert [source for source, _ in copies] == [last] * copied, "a block is copied if another row has it"
        free, victims = self.free(), self.idle[: max(needed - len(self.free()), 0)]
        kept = len(row.blocks) - copied
        taken = [block for block in row.table.blocks[kept:] if block is not None]
        assert row.table.blocks[:kept] == row.blocks[:kept], "only the last block changes"
        assert set(taken) <= free | set(victims), "free blocks and those unused for longest are taken"
        assert set(victims) <= set(taken), "free blocks are taken first"
        assert len(taken) == len(set(taken)) == needed
        for block in victims:
            self._use_host(self.sealed[block][-1])
        self.idle = self.idle[len(victims) :]
        for block in taken:
            self._poison(block)
        if last is not None and not copied:
            self.sealed.pop(last, None)
        row.blocks, row.length = list(row.table.blocks), row.length + count
        self._count(allocated=needed, evictions=len(victims), copies=int(copied))

    def copy(self, copies: list[Copy]) -> None:
        for source, target in copies:
            self.storage[target] = list(self.storage[source])

    def write(self, row: Row, tokens: list[int], slots: list[int]) -> None:
        history = [*row.tokens, *tokens]
        for position, slot in enumerate(slots, len(row.tokens)):
            self.storage[slot // self.size][slot % self.size] = content(row.prompt, history, position)

    def committed(self, row: Row, tokens: list[int]) -> None:
        first = len(row.tokens) // self.size
        row.tokens += tokens
        for block in row.blocks[first : len(row.tokens) // self.size]:
            if block is not None and self.prefix_cache:
                self.sealed[block] = list(self.storage[block])

    def forked(self, row: Row, table: BlockTable) -> None:
        self.rows.append(
            Row(table, row.prompt, row.tokens.copy(), row.length, row.blocks.copy(), row.sinks, row.needed_from)
        )

    def truncated(self, row: Row, length: int, copies: Sequence[Copy] = ()) -> None:
        kept = self.blocks_of(length) - len(copies)
        surplus, row.blocks = row.blocks[kept:], [*row.blocks[:kept], *(source for source, _ in copies)]
        row.tokens, row.length, row.needed_from = row.tokens[:length], length, min(row.needed_from, length)
        self._given_up(surplus)

    def slid(self, row: Row, first_needed: int) -> None:
        row.needed_from = max(row.needed_from, first_needed)
        gone = range(self.blocks_of(row.sinks), row.needed_from // self.size)
        given_up = row.blocks[gone.start : gone.stop]
        row.blocks = [None if number in gone else block for number, block in enumerate(row.blocks)]
        self._given_up(given_up)

    def released(self, row: Row) -> None:
        self.rows.remove(row)
        self._given_up(row.blocks)

    def _given_up(self, blocks: list[int | None]) -> None:
        references = self.references()
        for block in reversed(blocks):
            if block is None or references[block]:
                continue
            last_cells = [cells[-1] for cells in self.sealed.values()]
            if block in self.sealed and last_cells.count(self.sealed[block][-1]) == 1:
                self.idle.append(block)
            else:
                self._poison(block)

    def _poison(self, block: int) -> None:
        self.sealed.pop(block, None)
        self.storage[block] = ["poison"] * self.size

    def _count(self, **amounts: int) -> None:
        self.counts.update(amounts)
        self.counts["peak"] = max(self.counts["peak"], len(self.references()))
