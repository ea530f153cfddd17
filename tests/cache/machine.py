"""A state machine that drives a tiny BlockPool beside its model and checks the invariants after every step."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decodekit.cache.allocator import OutOfBlocks
from decodekit.cache.blocks import BlockPool, Copy
from decodekit.cache.host import GroupHost, HostTier
from decodekit.cache.prefix import Prompt
from decodekit.core.errors import InputError
from tests.cache.interrupts import Interrupted, failing_take, interrupted, state
from tests.cache.model import AWAY, Model, Row, content

SEARCH = settings(
    stateful_step_count=40,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
MAX_ROWS = 5
TOKENS = st.sampled_from([1, 1, 2, 3, 4, 0]).flatmap(lambda n: st.lists(st.integers(0, 1), min_size=n, max_size=n))
TENANTS = [{"salt": None}, {"salt": "b"}, {"extra": "lora"}, {"media": [(1, 3, "cat")]}, {"media": [(2, 3, "dog")]}]


def has_rows(machine: PoolMachine) -> bool:
    return bool(machine.model.rows)


def has_space(machine: PoolMachine) -> bool:
    return len(machine.model.rows) < MAX_ROWS


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([5, 6]),
        size=st.sampled_from([2, 2, 1, 3]),
        window=st.sampled_from([None, None, 3, 4]),
        prefix_cache=st.sampled_from([True] * 5 + [False]),
        interrupted_lines=st.none() | st.tuples(st.integers(1, 11), st.just(11)),
        host_blocks=st.sampled_from([0, 2, 5, 99]),
    )
    def start(self, num_blocks, size, window, prefix_cache, interrupted_lines, host_blocks):
        self.model = Model(num_blocks, size, window, prefix_cache, host_blocks)
        self.tier, self.aside = HostTier(host_blocks * size * 8), []
        host = GroupHost(self.tier, [0], {0: self.model}) if host_blocks else None
        self.pool = BlockPool(num_blocks, size, prefix_cache=prefix_cache, window=window, host=host)
        self.interrupted_lines = interrupted_lines
        self.history = [Prompt([], **other) for other in TENANTS]

    def state(self):
        return state(self.pool, *(row.table for row in self.model.rows))

    def attempt(self, operation, *, keep=None):
        """What the operation gives; before, it is interrupted at some of its lines, which must leave no trace.

        Args:
            operation: called once and again.
            keep: it may evict idle blocks but these even so.
        """
        before = self.state()
        for line in count(*self.interrupted_lines) if self.interrupted_lines else ():
            try:
                with interrupted(line):
                    return operation()
            except Interrupted:
                if keep is not None and self.state() != before:
                    self.note_evictions(keep)
                    keep, before = None, self.state()  # another time there is nothing to evict
                assert self.state() == before, "an interrupted operation leaves no trace"
        return operation()

    def note_evictions(self, keep):
        self.model.evicted([block for block in self.model.idle if block not in self.pool._allocator.cached], keep)
        for holds in (
            self.every_reference_is_a_table_entry,
            self.free_cached_and_used_partition_the_pool,
            self.the_prefix_maps_are_inverse,
            self.evictions_are_in_order_of_use,
            self.statistics_count_what_happened,
        ):
            holds()

    def draw_row(self, data) -> Row:
        """One with tokens, most of the time. Drawn by number: hypothesis keeps what it prints alive."""
        rows = self.model.rows
        weighted = [number for number, row in enumerate(rows) for _ in range(3 if row.tokens else 1)]
        return rows[data.draw(st.sampled_from(weighted))]

    def draw_prompt(self, data) -> Prompt:
        """The beginning of what was seen before, and a suffix; now and then for another tenant, adapter or image."""
        known = data.draw(st.sampled_from([*self.history[-6:], *(row.sofar for row in self.model.rows)]))
        length = data.draw(st.just(len(known.tokens)) | st.integers(0, len(known.tokens)))
        tokens = [*known.tokens[:length], *data.draw(TOKENS)]
        other = data.draw(st.sampled_from([{}] * 6 + TENANTS))
        return replace(known, tokens=tokens[: self.pool.num_blocks * self.pool.block_size], **other)

    # Steps that rules are made of

    def open(self, prompt: Prompt, depth: int | None = None) -> Row:
        places = self.model.donors(prompt)
        assert self.pool.resumable(prompt) == [place for place, _ in places], "live donors are found, honest ones only"
        place, blocks = next(found for found in reversed(places) if depth in (None, found[0]))
        with self.tier.keeping() if self.interrupted_lines else nullcontext():
            table = self.attempt(lambda: self.pool.open(prompt, depth=place), keep=blocks)
        assert table.num_cached == table.length == table.committed == place
        assert place < max(len(prompt.tokens), 1), "a token is left to compute"
        hits = [mine if block == AWAY else block for mine, block in zip(table.blocks, blocks, strict=True)]
        assert table.blocks == hits, "the oldest block with a content is hit"
        row = Row(table, prompt, list(prompt.tokens[:place]), place, blocks, 0, self.model.first_needed(place))
        self.model.opened(row)
        return row

    def make_room(self, rows: list[Row], count: int) -> list[list[Copy]] | None:
        """The copies that are to be done, if there is room."""
        pool, tables, before = self.pool, [row.table for row in rows], self.state()
        needed = self.model.demand(rows, count)
        fits = needed <= len(self.model.free()) + len(self.model.idle)
        assert pool.can_allocate(needed) == fits
        if not fits:
            with pytest.raises(OutOfBlocks):
                pool.append_together(tables, count)
            assert self.state() == before, "a failed append leaves no trace"
            return None
        for index in range(needed if self.interrupted_lines else 0):
            with failing_take(pool, index, late=index % 2 == 1), pytest.raises(Interrupted):
                pool.append_together(tables, count)
            assert self.state() == before, "a failed append leaves no trace"
        copies = self.attempt(lambda: pool.append_together(tables, count))
        self.model.appended(rows, count, copies)
        return copies

    def make_room_for(self, row: Row, tokens: list[int]) -> bool:
        """Whether there is room in the end; as long as there is none, the oldest row is preempted."""
        while row in self.model.rows:
            copies = self.make_room([row], max(len(row.tokens) + len(tokens) - row.length, 0))
            if copies is not None:
                self.model.copy(copies[0])
                return True
            self.release_row(self.model.rows[0])
        return False

    def write(self, row: Row, tokens: list[int], accepted: int) -> None:
        """Write tokens where there is room, and commit the first of them."""
        start, kept = len(row.tokens), tokens[:accepted]
        self.model.write(row, tokens, self.pool.slot_mapping(row.table, start, start + len(tokens)))
        self.attempt(lambda: self.pool.commit(row.table, kept))
        self.model.committed(row, kept)

    def compute(self, row: Row, tokens: list[int]) -> None:
        if self.make_room_for(row, tokens):
            self.write(row, tokens, len(tokens))

    def truncate_row(self, row: Row, length: int) -> None:
        self.attempt(lambda: self.pool.truncate(row.table, length))
        self.model.truncated(row, length)

    def release_row(self, row: Row) -> None:
        self.attempt(lambda: self.pool.release(row.table))
        self.history.append(row.prompt if row.uncomputed else row.sofar)
        self.model.released(row)

    # Rules

    @precondition(has_space)
    @rule(data=st.data(), computed=st.sampled_from([True] * 4 + [False]))
    def add(self, data, computed):
        row = self.open(self.draw_prompt(data))
        if computed:
            self.compute(row, row.uncomputed)

    @precondition(has_space)
    @rule(data=st.data())
    def add_at(self, data):
        """As one of several cache groups that agree on where to begin."""
        prompt = self.draw_prompt(data)
        place = data.draw(st.sampled_from([place for place, _ in self.model.donors(prompt)]))
        self.compute(row := self.open(prompt, depth=place), row.uncomputed)

    @precondition(lambda self: len(self.model.rows) < MAX_ROWS - 1)
    @rule(data=st.data())
    def add_twice(self, data):
        """Neither sees what the other is about to compute, so both have the same content."""
        prompt = self.draw_prompt(data)
        for row in [self.open(prompt), self.open(prompt)]:
            self.compute(row, row.uncomputed)

    @precondition(has_rows)
    @rule(data=st.data(), tokens=TOKENS)
    def append(self, data, tokens):
        self.compute(self.draw_row(data), tokens)

    @precondition(has_rows)
    @rule(data=st.data(), tokens=TOKENS, kept=st.booleans())
    def verify_draft(self, data, tokens, kept):
        """Room for a draft, part of which is accepted; the rest is rolled back, or its room kept."""
        row = self.draw_row(data)
        if self.make_room_for(row, tokens):
            self.write(row, tokens, data.draw(st.integers(0, len(tokens))))
            if not kept:
                self.truncate_row(row, len(row.tokens))

    @precondition(has_rows)
    @rule(data=st.data(), tokens=TOKENS)
    def step(self, data, tokens):
        self.step_rows(data, tokens)

    def step_rows(self, data, tokens: list[int]) -> None:
        """As many tokens for every row. It may fail at any place: before the copies, after some rows were committed."""
        rows = [row for row in self.model.rows if row.length == len(row.tokens)]
        lengths, copies = [row.length for row in rows], self.make_room(rows, len(tokens))
        if copies is None:
            return
        committed = data.draw(st.integers(-1, len(rows)) | st.just(len(rows)))
        for place, (row, copied) in enumerate(zip(rows, copies, strict=True)):
            if committed >= 0:
                self.model.copy(copied)
            self.write(row, [*tokens[1:], place % 2][: len(tokens)], len(tokens) if place < committed else 0)
        if committed < len(rows):
            for row, length, copied in zip(rows, lengths, copies, strict=True):
                self.attempt(lambda row=row, length=length, copied=copied: self.pool.retract(row.table, length, copied))
                self.model.truncated(row, length, copied)

    @precondition(lambda self: has_rows(self) and has_space(self))
    @rule(data=st.data(), branches=st.tuples(TOKENS, TOKENS), together=st.booleans())
    def fork(self, data, branches, together):
        row = self.draw_row(data)
        if row.length > len(row.tokens):
            with pytest.raises(InputError, match="not committed"):
                self.pool.fork(row.table)
            self.truncate_row(row, len(row.tokens))
        self.model.forked(row, self.attempt(lambda: self.pool.fork(row.table)))
        if together:
            self.step_rows(data, branches[0])
            return
        for branch, tokens in zip([row, self.model.rows[-1]], branches, strict=True):
            self.compute(branch, tokens)

    @precondition(has_rows)
    @rule(data=st.data(), dropped=st.sampled_from([1, 1, 1, 2, 3, 4, 99]))
    def truncate(self, data, dropped):
        row, size = self.draw_row(data), self.pool.block_size
        self.truncate_row(row, max(row.length - dropped, row.needed_from // size * size))

    @precondition(has_rows)
    @rule(data=st.data())
    def slide(self, data):
        row = self.draw_row(data)
        first_needed = self.model.first_needed(len(row.tokens))
        if self.pool.window is None:
            first_needed = data.draw(st.integers(0, len(row.tokens)))
            row.sinks = row.sinks if row.needed_from else data.draw(st.sampled_from([0, 0, 1, 2]))
        self.attempt(lambda: self.pool.slide(row.table, first_needed, sinks=row.sinks))
        self.model.slid(row, first_needed)
        if row.table.slid:
            with pytest.raises(InputError, match="can go back"):
                self.pool.truncate(row.table, row.table.slid * self.pool.block_size - 1)

    @precondition(has_rows)
    @rule(data=st.data())
    def release(self, data):
        row = self.draw_row(data)
        self.release_row(row)
        self.pool.release(row.table)
        assert (row.table.blocks, row.table.length) == ([], 0)
        for operation in (self.pool.fork, lambda table: self.pool.append(table, 1)):
            with pytest.raises(InputError, match="released"):
                operation(row.table)

    @precondition(has_rows)
    @rule(data=st.data())
    def suspend(self, data):
        row = self.draw_row(data)
        if row.length == len(row.tokens):
            self.aside.append(self.model.put_aside(row, self.pool.contents(row.table)))
            self.release_row(row)

    @precondition(lambda self: self.aside and has_space(self))
    @rule(data=st.data())
    def resume(self, data):
        aside, before = self.aside[data.draw(st.integers(0, len(self.aside) - 1))], self.state()

        def reopen():
            return self.pool.reopen(aside.row.table, aside.contents, write)

        def write(blocks):
            for block, cells in zip(blocks, aside.cells, strict=True):
                self.model.storage[block] = list(cells)

        if len(aside.contents) > len(self.model.free()) + len(self.model.idle):
            with pytest.raises(OutOfBlocks):
                reopen()
            assert self.state() == before, "a failed resume leaves no trace"
            return
        table = self.attempt(reopen, keep=[])
        self.aside.remove(aside)
        self.model.resumed(aside, table)

    @precondition(has_rows)
    @rule(data=st.data())
    def misuse(self, data):
        pool, table, before = self.pool, self.draw_row(data).table, self.state()
        for operation in (
            lambda: pool.append(table, -1),
            lambda: pool.commit(table, [0] * (table.length - table.committed + 1)),
            lambda: pool.truncate(table, table.length + 1),
            lambda: pool.slide(table, table.length + 1),
            lambda: pool.slot_mapping(table, 0, table.length + 1),
            lambda: pool.open(Prompt([0, 1, 1]), depth=3),
        ):
            with pytest.raises(InputError):
                operation()
        assert self.state() == before

    # Invariants

    @invariant()
    def every_reference_is_a_table_entry(self):
        references = self.model.references()
        assert self.pool._allocator.references == [references[block] for block in range(self.pool.num_blocks)]
        for row in self.model.rows:
            assert row.table.blocks == row.blocks
            assert row.table.length == row.length
            assert len(row.blocks) == self.model.blocks_of(row.length)

    @invariant()
    def free_cached_and_used_partition_the_pool(self):
        pool, inner, used = self.pool, self.pool._allocator, set(self.model.references())
        assert sorted([*inner.free, *inner.cached, *used]) == list(range(pool.num_blocks))
        assert pool.used_blocks == len(used)
        assert pool.free_blocks == len(self.model.free())

    @invariant()
    def the_prefix_maps_are_inverse(self):
        chains = self.pool._allocator.chains
        assert {block for block, chain in enumerate(chains) if chain is not None} == set(self.model.sealed)
        for block in self.model.sealed:
            assert chains[block].holders.count(block) == 1
        for chain in self.pool._index._chains.values():
            assert all(chains[block] is chain for block in chain.holders)

    @invariant()
    def sealed_blocks_keep_their_content(self):
        for block, cells in self.model.sealed.items():
            assert self.model.storage[block] == cells

    @invariant()
    def the_host_holds_what_was_evicted_last(self):
        held = [copy.restore()[0][0].tolist() for copy in self.tier._held.values()]
        cells = list(self.model._numbers)
        assert self.tier.nbytes == sum(copy.nbytes for copy in self.tier._held.values()) <= self.tier.budget
        if self.interrupted_lines:  # an interrupted operation may have used it
            self.model.host = [cells[numbers[-1]] for numbers in held]
        assert [cells[numbers[-1]] for numbers in held] == self.model.host

    @invariant()
    def storage_holds_the_history(self):
        size = self.pool.block_size
        for row in self.model.rows:
            assert row.table.committed == len(row.tokens)
            for start, stop in [(0, min(row.sinks, row.needed_from)), (row.needed_from, len(row.tokens))]:
                slots = self.pool.slot_mapping(row.table, start, stop)
                cells = [self.model.storage[slot // size][slot % size] for slot in slots]
                assert cells == [content(row.prompt, row.tokens, position) for position in range(start, stop)]
            holes = {number for number, block in enumerate(row.blocks) if block is None}
            assert holes == set(range(self.model.blocks_of(row.sinks), row.needed_from // size))

    @invariant()
    def evictions_are_in_order_of_use(self):
        assert list(self.pool._allocator.cached) == self.model.idle

    @invariant()
    def statistics_count_what_happened(self):
        counts = self.pool._allocator.counts
        assert counts == {name: self.model.counts[name] for name in counts}

    def teardown(self):
        """Draining returns every block."""
        while self.model.rows:
            self.release_row(self.model.rows[0])
            self.every_reference_is_a_table_entry()
            self.free_cached_and_used_partition_the_pool()
            self.evictions_are_in_order_of_use()
        tokens = [2] * (self.pool.num_blocks * self.pool.block_size)
        self.compute(self.open(Prompt(tokens)), tokens)
        assert self.pool.used_blocks == self.pool.num_blocks
