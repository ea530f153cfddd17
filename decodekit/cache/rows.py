"""The rows of a cache: which blocks and states each has, how they are forked, advanced and taken back.

Host bookkeeping over the cache groups; no K/V are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple
from weakref import WeakSet

from decodekit.cache.blocks import BlockTable
from decodekit.cache.gather import Group
from decodekit.cache.prefix import Prompt, open_together
from decodekit.cache.states import Checkpoints, StateBatch, StateRef, compact
from decodekit.core.errors import InputError, Refused


@dataclass(eq=False)
class Row:
    """One sequence in the cache.

    Attributes:
        prompt: what it was opened with; ``None`` where nobody said which tokens are in it.
        tables: its blocks, one a cache group.
        length: tokens whose K/V and states are there.
        num_cached: how many of them were found in the prefix cache.
        tokens: their ids, if they are known.
        state: its recurrent states.
        past: lengths and states it had since the last rollback, while rollbacks are expected.
        final: tokens that no rollback is expected to reach.
        sealed: full blocks, of each group, that the stores were told of.
        floor: a length below which K/V that a window shows were never here: the row was loaded from elsewhere.
    """

    prompt: Prompt | None
    tables: list[BlockTable]
    length: int = 0
    num_cached: int = 0
    tokens: list[int] = field(default_factory=list, repr=False)
    state: StateRef | None = field(default=None, repr=False)
    past: list[tuple[int, StateRef | None]] = field(default_factory=list, repr=False)
    final: int = 0
    sealed: list[int] = field(default_factory=list, repr=False)
    floor: int = 0


class Snapshot:
    """The rows of a cache as they were; :meth:`PagedCache.restore` brings them back any number of times."""

    def __init__(self, book: RowBook) -> None:
        self._book = book
        self.rows: list[Row] = []
        book.snapshots.add(self)
        self.rows += map(book.copy, book.rows)

    def release(self) -> None:
        """Give up the blocks it holds."""
        self._book.release(self.rows)
        self.rows = []


class _Resume(NamedTuple):
    """Where a row goes back to: a length with its states, or (``None``) what the prefix cache has."""

    length: int
    state: StateRef | None


class RowBook:
    """All rows of a cache.

    Args:
        groups: the cache groups; none for a model without attention.
        block_size: tokens a block.
        recurrent: whether the model has recurrent states.
        checkpoint: where states are saved for later prompts: at the ``prompt``'s last block boundary, every so many
            tokens (whole blocks, rounded up), or nowhere.
        checkpoints: the saved states.
        on_idle: called when rows may have let go of blocks.

    Attributes:
        rows: in the order of the batch.
        recording: keep what a rollback needs until the next rollback, which may drop nothing.
        snapshots: those that were taken of them.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        block_size: int,
        *,
        recurrent: bool,
        checkpoint: Literal["prompt"] | int | None,
        checkpoints: Checkpoints,
        on_idle: Callable[[], None],
    ) -> None:
        if isinstance(checkpoint, int):
            if checkpoint < 1:
                raise InputError(f"checkpoint is {checkpoint}; save states every 1 or more tokens, at 'prompt' or None")
            checkpoint = -(-checkpoint // block_size) * block_size
        self._groups, self._block_size = groups, block_size
        self._recurrent, self._checkpoint = recurrent, checkpoint
        self._checkpoints, self.on_idle = checkpoints, on_idle
        self.rows: list[Row] = []
        self.recording = False
        self.snapshots: WeakSet[Snapshot] = WeakSet()

    def open(self, prompts: Sequence[Prompt]) -> None:
        """Append a row a prompt, each with as many tokens as the prefix cache has for it."""
        opened: list[Row] = []
        try:
            opened.extend(map(self._open, prompts))
        except BaseException:
            self._release(opened)
            raise
        self.rows.extend(opened)

    def open_unknown(self, count: int) -> None:
        """Append rows of which nobody tells the tokens."""
        unknown = Prompt(())
        self.rows.extend(
            Row(None, [group.pool.open(unknown) for group in self._groups], sealed=[0] * len(self._groups))
            for _ in range(count)
        )

    def fork(self, parents: Sequence[int]) -> None:
        """The rows become these, in this order; a row named twice is shared, one not named is released."""
        if wrong := [parent for parent in parents if not 0 <= parent < len(self.rows)]:
            raise InputError(f"parents {wrong} are not rows; the cache has rows 0 to {len(self.rows) - 1}")
        seen: set[int] = set()
        rows, forks = list[Row](), list[Row]()
        try:
            for parent in parents:
                row = self.rows[parent]
                if parent in seen:
                    row = self.copy(row)
                    forks.append(row)
                seen.add(parent)
                rows.append(row)
        except BaseException:
            self._release(forks)
            raise
        left = [row for number, row in enumerate(self.rows) if number not in seen]
        self.rows = rows
        self.release(left)

    def copy(self, row: Row) -> Row:
        """A second row with the same history, which takes no block."""
        tables: list[BlockTable] = []
        try:
            for group, table in zip(self._groups, row.tables, strict=True):
                tables.append(group.pool.fork(table))
        except BaseException:
            self._release([replace(row, tables=tables)])
            raise
        return replace(row, tables=tables, tokens=[*row.tokens], past=[*row.past], sealed=[*row.sealed])

    def replace(self, rows: Sequence[Row]) -> None:
        """Copies of ``rows`` take the place of all that are there."""
        copies: list[Row] = []
        try:
            copies.extend(map(self.copy, rows))
        except BaseException:
            self._release(copies)
            raise
        old, self.rows = self.rows, copies
        self.release(old)

    def release(self, rows: Sequence[Row]) -> None:
        """Give up what these rows hold."""
        self._release(rows)
        if not self.rows:
            kept = [row for snapshot in self.snapshots for row in snapshot.rows]
            for number, group in enumerate(self._groups):
                group.pool.reclaim([row.tables[number] for row in kept])
        self.on_idle()

    def advance(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], states: StateBatch | None) -> None:
        """A step is over: its tokens' K/V are written, and ``states`` are what came out of it.

        Raises:
            BaseException: what a pool raised; truncating the rows' tables to their lengths takes all back.
        """
        for number, group in enumerate(self._groups):
            for row, new in zip(rows, tokens, strict=True):
                group.pool.commit(row.tables[number], new)
        for place, (row, new) in enumerate(zip(rows, tokens, strict=True)):
            if self.recording:
                row.past.append((row.length, row.state))
            row.length += len(new)
            row.state = None if states is None else StateRef(states, place)
            if row.prompt is not None:
                row.tokens.extend(new)
            if not self.recording:
                row.final = row.length

    def tidy(self, rows: Sequence[Row], stale: Sequence[StateBatch]) -> None:
        """After a step of ``rows``: save their states where that is wanted, let go of what nothing needs any more.

        Args:
            rows: those that advanced.
            stale: the batches their states were in before.
        """
        for row in rows:
            self._save(row)
            self._slide(row)
        for batch in stale:
            self._compact(batch)
        if any(group.window is not None for group in self._groups):
            self.on_idle()

    def rollback(self, drop: Sequence[int]) -> list[int]:
        """Drop the last tokens of each row; how many tokens before them have to be forwarded again."""
        if len(drop) != len(self.rows):
            raise InputError(f"drop has {len(drop)} numbers for {len(self.rows)} rows; give one a row")
        targets, resumes = list[int](), list[_Resume | None]()
        for number, (row, count) in enumerate(zip(self.rows, map(int, drop), strict=True)):
            if not 0 <= count <= row.length:
                raise InputError(f"drop of row {number} is {count}; it has {row.length} tokens")
            targets.append(row.length - count)
            resumes.append(self._resume(row, targets[-1], number) if count else _Resume(row.length, row.state))
        reopened: dict[int, Row] = {}
        try:
            for number, resume in enumerate(resumes):
                if resume is None:
                    reopened[number] = self._reopen(self.rows[number], targets[number])
        except BaseException:
            self._release(list(reopened.values()))
            raise
        for number, (row, resume) in enumerate(zip(self.rows, resumes, strict=True)):
            if resume is None:
                self._release([row])
                self.rows[number] = reopened[number]
            elif drop[number]:
                self._truncate(row, resume)
            else:
                row.past, row.final = [], row.length
                self._slide(row)
        self.on_idle()
        return [target - row.length for target, row in zip(targets, self.rows, strict=True)]

    def next_checkpoint(self, row: Row) -> int | None:
        """The length at which this row's states are to be saved next."""
        if not self._recurrent or row.prompt is None or self._checkpoint is None:
            return None
        if self._checkpoint == "prompt":
            place = self._last_boundary(row.prompt)
            return place if place > row.length else None
        return (row.length // self._checkpoint + 1) * self._checkpoint

    def _open(self, prompt: Prompt) -> Row:
        with self._checkpoints.host.keeping():  # what one group evicts must not push out what the others are to hit
            return self._open_kept(prompt)

    def _open_kept(self, prompt: Prompt) -> Row:
        depths = self._checkpoints.depths(prompt) if self._recurrent else None
        if self._groups:
            tables = open_together([group.pool for group in self._groups], prompt, depths)
            length = tables[0].length
        else:
            tables, length = [], max(depths or [0])
        # What is hit may be in a row that still awaits a rollback: it is final here, so that it is sealed.
        tokens, sealed = list(prompt.tokens[:length]), [0] * len(self._groups)
        row = Row(prompt, tables, length, length, tokens, final=length, sealed=sealed)
        try:
            if self._recurrent and length:
                row.state = self._checkpoints.get(prompt, length)
            self._slide(row)
        except BaseException:
            self._release([row])
            raise
        return row

    def _reopen(self, row: Row, length: int) -> Row:
        assert row.prompt is not None
        again = self._open(replace(row.prompt, tokens=row.tokens[:length]))
        again.prompt = row.prompt
        return again

    def _release(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for group, table in zip(self._groups, row.tables, strict=False):
                group.pool.release(table)

    def _resume(self, row: Row, target: int, number: int) -> _Resume | None:
        """The latest place, not after ``target``, that a row can go on from; ``None``: the prefix cache knows better."""
        places = [(row.length, row.state), *reversed(row.past)] if self._recurrent else [(target, None)]
        if row.prompt is None:
            places.append((0, None))
        for length, state in places:
            if row.floor <= length <= target and all(
                group.first_needed(length) >= table.slid * group.pool.block_size
                for group, table in zip(self._groups, row.tables, strict=True)
            ):
                if length < target and row.prompt is None:
                    break
                return _Resume(length, state)
        if row.prompt is None:
            raise Refused(
                f"row {number} cannot go back from {row.length} to {target} tokens: what was there is kept only after "
                "activate_past_recording(), and the tokens are not known; open rows with their prompts"
            )
        return None

    def _truncate(self, row: Row, resume: _Resume) -> None:
        for number, (group, table) in enumerate(zip(self._groups, row.tables, strict=True)):
            group.pool.truncate(table, resume.length)
            row.sealed[number] = min(row.sealed[number], resume.length // group.pool.block_size)
        row.length, row.state = resume
        row.past, row.final = [], resume.length
        del row.tokens[resume.length :]
        self._slide(row)

    def _slide(self, row: Row) -> None:
        for group, table in zip(self._groups, row.tables, strict=True):
            if group.window is not None:
                group.pool.slide(table, group.first_needed(row.final), sinks=group.sinks)

    def _save(self, row: Row) -> None:
        if row.state is None or row.prompt is None or self._checkpoint is None or not row.length:
            return
        if (
            row.length == self._last_boundary(row.prompt)
            if self._checkpoint == "prompt"
            else row.length % self._checkpoint == 0
        ):
            chain = row.tables[0].chain if row.tables else None
            self._checkpoints.save(replace(row.prompt, tokens=row.tokens), chain, row.state)

    def _last_boundary(self, prompt: Prompt) -> int:
        """The last place in a prompt where a block ends and a token is left to compute."""
        return (len(prompt.tokens) - 1) // self._block_size * self._block_size

    def _compact(self, batch: StateBatch) -> None:
        """Rows that were not in the step no longer keep the states of those that were."""
        rows = [row for row in self.rows if row.state is not None and row.state.batch is batch]
        if 0 < len(rows) < batch.rows:
            smaller = compact([row.state for row in rows if row.state is not None], batch)
            for row, ref in zip(rows, smaller, strict=True):
                row.state = ref
