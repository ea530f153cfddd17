"""Which block of K/V belongs to which sequence: block tables, copy-on-write, rollback, sliding windows, prefix hits.

Pure bookkeeping, one pool a cache group (the layers that share a block table); the storage follows its slot mappings
and copies. A block is *used* while a table names it, *cached* while none does but a prompt can still hit it, else
*free*. It is *sealed* once it is full of written tokens: what it holds never changes from then on.

Every call does all of its work, or raises and leaves everything as it was, Ctrl-C included. ``append`` and ``commit``
of a token cost O(1), and O(blocks of the sequence) where a block begins or ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, compress, islice
from itertools import count as counter
from typing import NamedTuple

from decodekit.cache.allocator import Allocator, Host
from decodekit.cache.prefix import Chain, Media, PrefixIndex, Prompt, block_contents
from decodekit.core.errors import InputError

MAX_BLOCK_SIZE = 256
_generations = counter(1)


class Copy(NamedTuple):
    """A block to be copied whole, in the order given and before anything is written to ``target``."""

    source: int
    target: int


@dataclass(eq=False)
class BlockTable:
    """The blocks of one sequence. Anyone may read it; only its pool changes it.

    Attributes:
        blocks: block ``i`` has tokens ``i * block_size`` and on; ``None`` where a sliding window let go. Replaced as a
            whole when it changes, so forks share it.
        length: tokens there is room for: those written and those about to be.
        committed: tokens whose K/V are written.
        num_cached: tokens that were found in the prefix cache when the table was opened.
        slid: blocks before this one were let go, sinks apart.
        chain: the committed full blocks.
        tail: contents of the committed tokens after those; kept only for the prefix cache.
        media: of the prompt.
        generation: of the pool it was opened by; 0 once released.
    """

    generation: int = field(repr=False)
    chain: Chain = field(repr=False)
    media: Sequence[Media] = field(repr=False)
    blocks: list[int | None]
    length: int
    committed: int
    num_cached: int
    slid: int
    tail: tuple[Hashable, ...] = field(default=(), repr=False)


class BlockPool:
    """The blocks of one cache group.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens a block, 1 to 256.
        prefix_cache: keep full blocks for later prompts that begin alike.
        window: tokens a query sees, itself included, if these layers have a sliding window; a prompt can then begin
            where only the blocks of the last ``window - 1`` tokens are left.
        host: gets what evicted blocks hold, so that prompts can still hit it.

    Raises:
        InputError: a number is out of range.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        prefix_cache: bool = True,
        window: int | None = None,
        host: Host | None = None,
    ) -> None:
        if num_blocks < 1:
            raise InputError(f"num_blocks is {num_blocks}; a pool has at least 1 block")
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise InputError(f"block_size is {block_size}; a block has 1 to {MAX_BLOCK_SIZE} tokens (16 is usual)")
        if window is not None and window < 1:
            raise InputError(f"window is {window}; a query sees at least 1 token (None: all of them)")
        self.num_blocks, self.block_size, self.prefix_cache, self.window = num_blocks, block_size, prefix_cache, window
        self._host = host
        self.reset()

    def reset(self) -> None:
        """Free every block and forget all content and statistics; tables opened before are closed."""
        index = PrefixIndex(self.block_size, self.window, () if self._host is None else self._host)
        allocator = Allocator(self.num_blocks, self._host)
        # Together, so that an interrupt cannot fall between. The generation tells other pools' tables apart, too.
        self._index, self._allocator, self._generation = index, allocator, next(_generations)
        if self._host is not None:
            self._host.clear()

    @property
    def free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return len(self._allocator.free)

    @property
    def cached_blocks(self) -> int:
        """Blocks that no table names and a prompt can still hit; evicted, longest unused first, when room is needed."""
        return len(self._allocator.cached)

    @property
    def used_blocks(self) -> int:
        """Blocks that some table names."""
        return self._allocator.used

    @property
    def reach(self) -> int:
        """All blocks that were handed out since the last reset are below this one: storage need not go further."""
        return self._allocator.reach

    def idle(self) -> tuple[list[int], list[int]]:
        """The free blocks, and the cached ones."""
        return [*self._allocator.free], [*self._allocator.cached]

    def stats(self) -> dict[str, int]:
        """Blocks now (free, cached, used), and what happened since the last reset.

        Returns:
            ``peak``: most blocks used at once; ``allocated``: blocks handed out; ``hits`` and ``misses``: full blocks
            of opened prompts that were reused, and that have to be computed; ``evictions``; ``copies``: blocks copied
            on write.
        """
        now = {"free": self.free_blocks, "cached": self.cached_blocks, "used": self.used_blocks}
        return {"num_blocks": self.num_blocks, "block_size": self.block_size, **now, **self._allocator.counts}

    def resumable(self, prompt: Prompt) -> list[int]:
        """With how many tokens from the cache a sequence with this prompt can begin, ascending from 0.

        Multiples of the block size; at least one token of the prompt is left to compute.
        """
        return self._match(prompt)[1]

    def open(self, prompt: Prompt, *, depth: int | None = None) -> BlockTable:
        """A new sequence that shares the blocks its prompt has in the cache; takes others only for what the host has.

        If it fails, idle blocks may have gone to the host, and nothing else changed.

        Args:
            prompt: its tokens and what else their K/V depend on.
            depth: begin with this many tokens, one of :meth:`resumable`; ``None``: with as many as there are.

        Raises:
            InputError: ``depth`` is not in the cache.
        """
        chains, depths, _ = self._match(prompt)
        depth = depths[-1] if depth is None else depth
        if depth not in depths:
            raise InputError(f"depth is {depth}; from the cache this prompt can begin with {depths} tokens")
        full, slid = depth // self.block_size, self._index.first_needed(depth) // self.block_size
        hits = [chain.holders[0] for chain in chains[slid:full] if chain.holders]
        away = [chain for chain in chains[slid:full] if not chain.holders]
        chain = chains[full - 1] if full else self._index.root(prompt)
        contents = [self._host.get(chain) for chain in away] if self._host is not None else []
        new = self._allocator.make_free(len(away), keep=hits)
        undo = self._allocator.snapshot([*hits, *new], chains=away)
        try:
            self._allocator.share(hits)
            if self._host is not None and new:
                self._allocator.fill(new, away, partial(self._host.load, contents=contents))
            self._allocator.counts["hits"] += full - slid
            self._allocator.counts["misses"] += self._shareable(prompt) - full
            blocks = [*[None] * slid, *(chain.holders[0] for chain in chains[slid:full])]
            return BlockTable(self._generation, chain, prompt.media, blocks, depth, depth, depth, slid)
        except BaseException:
            undo()
            raise

    def can_allocate(self, count: int) -> bool:
        """Whether ``count`` blocks are free or evictable."""
        return count <= self.free_blocks + self.cached_blocks

    def can_admit(self, prompt: Prompt, max_new: int) -> bool:
        """Whether this prompt and ``max_new`` more tokens fit beside what is in use now, if nothing else grows."""
        return self.can_allocate(self.to_admit(prompt, max_new))

    def to_admit(self, prompt: Prompt, max_new: int) -> int:
        """How many free or evictable blocks this prompt and ``max_new`` more tokens would take now.

        With a window: if the prompt is prefilled at once and the window slides after every step.
        """
        _, depths, idle = self._match(prompt)
        full, slid = depths[-1] // self.block_size, self._index.first_needed(depths[-1]) // self.block_size
        needed = self._blocks(len(prompt.tokens) + max_new) - full
        if self.window is not None:
            needed = min(needed, max(self._blocks(len(prompt.tokens)) - full, self._blocks(self.window) + 1))
        return needed + idle[full] - idle[slid]

    def needed(self, growing: Iterable[tuple[BlockTable, int]]) -> int:
        """How many blocks it takes to append so many tokens to each of these tables, copies on write included."""
        needed, writers, references = 0, Counter[int](), self._allocator.references
        for table, count in growing:
            needed += self._blocks(table.length + count) - len(table.blocks)
            last = table.blocks[-1] if count and table.length % self.block_size else None
            if last is not None and references[last] > 1:
                writers[last] += 1
        return needed + sum(min(many, references[block] - 1) for block, many in writers.items())

    def append(self, table: BlockTable, count: int) -> list[Copy]:
        """:meth:`append_together` for one table."""
        return self.append_together([table], count)[0]

    def append_together(self, tables: Sequence[BlockTable], count: int) -> list[list[Copy]]:
        """Make room for ``count`` more tokens in each table; only its last block and those after it change.

        If tokens go into a block that another table names, a copy takes its place. If they go into a sealed block (the
        sequence was rolled back into it), the prefix cache forgets that block first.

        Returns:
            what the storage has to copy for each table before it writes.

        Raises:
            OutOfBlocks: not all the blocks they take are there.
        """
        if count < 0:
            raise InputError(f"count is {count}; append makes room for 0 or more tokens (truncate takes it back)")
        allocator, references, chains = self._allocator, self._allocator.references, self._allocator.chains
        growing, needed, writers = list[tuple[int, int, int | None]](), 0, Counter[int]()
        for place, table in enumerate(tables):
            self._check(table)
            new = -(-(table.length + count) // self.block_size) - len(table.blocks)
            last = table.blocks[-1] if count and table.length % self.block_size else None
            if new or (last is not None and (references[last] > 1 or chains[last] is not None)):
                growing.append((table.length, place, last))
                needed += new
                writers.update([last] if last is not None else [])
        # The last table to name a block writes into it, the others copy. It is the longest: what it writes lies behind
        # what they have there, so they can have it back if the step fails.
        growing.sort()
        needed += sum(min(many, references[block] - 1) for block, many in writers.items())
        chosen, copies, lengths = allocator.choose(needed), [list[Copy]() for _ in tables], [t.length for t in tables]
        allocator.offload(chosen)
        undo = allocator.snapshot([*chosen, *writers], [tables[place] for _, place, _ in growing])
        try:
            taken = iter(chosen)
            for length, place, last in growing:
                table = tables[place]
                blocks = table.blocks.copy()
                if last is not None and references[last] > 1:
                    allocator.take(copy := next(taken))
                    allocator.drop([last])
                    allocator.counts["copies"] += 1
                    blocks[-1] = copy
                    copies[place].append(Copy(last, copy))
                elif last is not None:
                    allocator.unseal(last)
                for block in islice(taken, self._blocks(length + count) - len(blocks)):
                    allocator.take(block)
                    blocks.append(block)
                table.blocks = blocks
            for table in tables:
                table.length += count
            return copies
        except BaseException:
            for table, length in zip(tables, lengths, strict=True):
                table.length = length
            undo()
            raise

    def commit(self, table: BlockTable, tokens: Sequence[int], *, written_from: int = 0) -> None:
        """The K/V of these tokens, the next of the sequence, are written; blocks that they fill are sealed.

        A block that holds what another holds already stays this table's own; prompts hit the older while it lives.

        Args:
            table: the sequence.
            tokens: their ids.
            written_from: tokens before this one were not written, only what a window needs; a block with any of them is
                not sealed.

        Raises:
            InputError: more tokens than ``append`` made room for.
        """
        self._check(table)
        size, start, end = self.block_size, table.committed, table.committed + len(tokens)
        if end > table.length:
            raise InputError(f"{len(tokens)} tokens committed after {start}; append made room up to {table.length}")
        contents = (*table.tail, *block_contents(tokens, start, table.media)) if self.prefix_cache else ()
        if len(contents) < size:
            vars(table).update(committed=end, tail=contents)  # one call: an interrupt comes before or after it
        else:
            filled, chains = len(contents) // size * size, [table.chain]
            for place in range(0, filled, size):
                chains.append(self._index.child(chains[-1], contents[place : place + size]))
            full = zip(table.blocks[start // size : end // size], chains[1:], strict=True)
            written = islice(full, max(-(-written_from // size) - start // size, 0), None)
            sealed = [(block, chain) for block, chain in written if block is not None]
            undo = self._allocator.snapshot([block for block, _ in sealed], [table], chains)
            try:
                for block, chain in sealed:
                    self._allocator.seal(block, chain)
                table.chain, table.tail, table.committed = chains[-1], contents[filled:], end
            except BaseException:
                undo()
                raise

    def slot_mapping(self, table: BlockTable, start: int, stop: int) -> list[int]:
        """Where tokens ``start`` up to ``stop`` lie: ``block * block_size + offset``, one a token.

        Raises:
            InputError: there is no room for such a token, or the sliding window let go of one.
        """
        self._check(table)
        if not 0 <= start <= stop <= table.length:
            raise InputError(f"slots of tokens {start} to {stop}; the table has room for tokens 0 to {table.length}")
        size, slots = self.block_size, list[int]()
        for number in range(start // size, self._blocks(stop)):
            if (block := table.blocks[number]) is None:
                raise InputError(f"slots of tokens {start} to {stop}; the window let go of block {number}")
            shift = (block - number) * size
            slots.extend(range(max(start, number * size) + shift, min(stop, number * size + size) + shift))
        return slots

    def fork(self, table: BlockTable) -> BlockTable:
        """A second sequence with the same history; takes no block before one of the two appends.

        Raises:
            InputError: there is room for tokens that are not committed.
        """
        self._check(table)
        if table.committed < table.length:
            missing = table.length - table.committed
            raise InputError(f"{missing} tokens are not committed; commit or truncate them before the fork")
        shared = _held(table.blocks)
        undo = self._allocator.snapshot(shared)
        try:
            self._allocator.share(shared)
            return replace(table)
        except BaseException:
            undo()
            raise

    def truncate(self, table: BlockTable, length: int) -> None:
        """Roll back to the first ``length`` tokens, written or not; the blocks after them are given up.

        Raises:
            InputError: the table is shorter, or the sliding window let go of that place.
        """
        self.retract(table, length, ())

    def retract(self, table: BlockTable, length: int, copies: Sequence[Copy]) -> None:
        """:meth:`truncate` that takes back the last append: a block that was copied is shared again.

        Args:
            table: the sequence.
            length: its tokens before the append.
            copies: what the append returned for it, done or not; nothing was appended to other tables since.

        Raises:
            InputError: as :meth:`truncate`.
        """
        self._check(table)
        size, lowest = self.block_size, table.slid * self.block_size
        if not lowest <= length <= table.length:
            raise InputError(f"truncate to {length} tokens; this table can go back from {table.length} to {lowest}")
        sources, committed = [copy.source for copy in copies], min(length, table.committed)
        kept = self._blocks(length) - len(sources)
        chain, tail = table.chain, table.tail
        if self.prefix_cache and committed == length:
            for _ in range(length // size, table.committed // size):
                chain, tail = chain.parent, chain.contents
            tail = tail[: length % size]
        surplus = _held(table.blocks[kept:])
        undo = self._allocator.snapshot([*sources, *surplus], [table])
        try:
            self._allocator.share(sources)
            self._allocator.drop(surplus)
            table.blocks, table.length, table.committed = [*table.blocks[:kept], *sources], length, committed
            table.chain, table.tail = chain, tail
        except BaseException:
            undo()
            raise

    def slide(self, table: BlockTable, first_needed: int, *, sinks: int = 0) -> None:
        """Give up the blocks that lie wholly before token ``first_needed``; the others keep their positions.

        A window that slid does not come back on rollback: slide by tokens that are final.

        Args:
            table: the sequence.
            first_needed: no query will see a token before this one, sinks apart.
            sinks: first tokens that stay.

        Raises:
            InputError: the table has no such token.
        """
        self._check(table)
        if not 0 <= first_needed <= table.length:
            raise InputError(f"first_needed is {first_needed}; the table has room for tokens 0 to {table.length}")
        slid = first_needed // self.block_size
        start = max(table.slid, self._blocks(sinks))
        if start < slid:
            given_up = _held(table.blocks[start:slid])
            undo = self._allocator.snapshot(given_up, [table])
            try:
                self._allocator.drop(given_up)
                table.blocks = [*table.blocks[:start], *[None] * (slid - start), *table.blocks[slid:]]
                table.slid = slid
            except BaseException:
                undo()
                raise

    def release(self, table: BlockTable) -> None:
        """The sequence is over. Releasing it again, or after a reset, does nothing."""
        if self.owns(table):
            blocks = _held(table.blocks)
            undo = self._allocator.snapshot(blocks, [table])
            try:
                self._allocator.drop(blocks)
                closed = BlockTable(0, Chain(None, ()), (), [], 0, 0, table.num_cached, 0)  # it keeps no history alive
                vars(table).update(vars(closed))
            except BaseException:
                undo()
                raise

    def reclaim(self, tables: Sequence[BlockTable]) -> None:
        """Take back what none of these tables names: an interrupt fell between two operations, and a table was lost.

        Args:
            tables: all that are still in use.
        """
        if not self.used_blocks:
            return
        named = Counter(block for table in tables if self.owns(table) for block in _held(table.blocks))
        lost = [block for block, many in enumerate(self._allocator.references) for _ in range(many - named[block])]
        undo = self._allocator.snapshot(lost)
        try:
            self._allocator.drop(lost)
        except BaseException:
            undo()
            raise

    def owns(self, table: BlockTable) -> bool:
        """Whether the table was opened by this pool, since its last reset."""
        return table.generation == self._generation

    def contents(self, table: BlockTable) -> list[Chain | None]:
        """Of each block that the table holds, the chain it is sealed with."""
        return [self._allocator.chains[block] for block in _held(table.blocks)]

    def reopen(
        self, table: BlockTable, contents: Sequence[Chain | None], write: Callable[[list[int]], object]
    ) -> BlockTable:
        """A sequence that was released, in new blocks.

        If it fails, idle blocks may have gone to the host, and nothing else changed.

        Args:
            table: a copy of its table from before the release.
            contents: what :meth:`contents` gave for it.
            write: called with as many blocks, to write into them what they held.

        Raises:
            OutOfBlocks: not all the blocks it takes are there.
            InputError: the pool was reset since.
        """
        self._check(table)
        new = self._allocator.make_free(len(contents))
        undo = self._allocator.snapshot(new, chains=[chain for chain in contents if chain is not None])
        try:
            self._allocator.fill(new, contents, write)
            taken = iter(new)
            return replace(table, blocks=[None if block is None else next(taken) for block in table.blocks])
        except BaseException:
            undo()
            raise

    def _match(self, prompt: Prompt) -> tuple[list[Chain], list[int], list[int]]:
        """As :meth:`PrefixIndex.match`, where there is room; and how many idle blocks the first 0, 1, ... chains take."""
        chains, depths = self._index.match(prompt, self._shareable(prompt))
        cached, size = self._allocator.cached, self.block_size
        idle = [0, *accumulate(not chain.holders or chain.holders[0] in cached for chain in chains)]
        room = self.free_blocks + self.cached_blocks
        slid = [self._index.first_needed(depth) // size for depth in depths]
        fits = [idle[depth // size] - idle[first] <= room for depth, first in zip(depths, slid, strict=True)]
        return chains, list(compress(depths, fits)), idle

    def _check(self, table: BlockTable) -> None:
        if not self.owns(table):
            raise InputError("this table was released, or opened before a reset or by another pool; open a new one")

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _shareable(self, prompt: Prompt) -> int:
        """Full blocks that may come from the cache: the last token is always computed, for its logits."""
        return max(len(prompt.tokens) - 1, 0) // self.block_size if self.prefix_cache else 0


def _held(blocks: Sequence[int | None]) -> list[int]:
    return [block for block in blocks if block is not None]
