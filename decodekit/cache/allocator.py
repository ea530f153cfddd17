"""Which blocks are free, cached or used: reference counts, sealed content, the order of eviction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from decodekit.cache.prefix import Chain
from decodekit.core.errors import DecodekitError


class OutOfBlocks(DecodekitError):
    """More blocks are needed than are free or evictable; nothing was taken.

    Args:
        needed: blocks asked for.
        free: blocks that hold nothing.
        evictable: cached blocks that no sequence uses.
        total: size of the pool.
    """

    def __init__(self, needed: int, free: int, evictable: int, total: int) -> None:
        self.needed, self.free, self.evictable, self.total = needed, free, evictable, total
        super().__init__(
            f"{needed} blocks needed, {free} free and {evictable} evictable of {total}; "
            "release or preempt a sequence, or give a larger num_blocks"
        )


class Host(Protocol):
    """Where the content of evicted blocks goes, and comes from when a prompt hits it."""

    def __contains__(self, chain: object) -> bool:
        """Whether the last block of this chain is there."""

    def get(self, chain: Chain) -> Any:
        """Its content, which lives as long as someone refers to it."""

    def save(self, blocks: Mapping[int, Chain]) -> None:
        """Copy what these blocks hold, for as long as there is room."""

    def load(self, blocks: Sequence[int], contents: Sequence[Any]) -> None:
        """Write what :meth:`get` gave into these blocks."""

    def clear(self) -> None:
        """Forget all."""


class Allocator:
    """The blocks of a pool, each free, cached or used; the steps that a :class:`BlockPool`'s operations are made of.

    Args:
        num_blocks: how many there are.
        host: gets what evicted blocks hold.

    Attributes:
        references: a block: how many tables name it.
        chains: a block: what it holds, once it is sealed.
        free: blocks that hold nothing; the last was used last and is taken first.
        cached: sealed blocks that no table names; the first has been unused for longest and is evicted first.
        counts: statistics, see :meth:`BlockPool.stats`.
        reach: all blocks that were ever taken are below this one.
    """

    def __init__(self, num_blocks: int, host: Host | None = None) -> None:
        self.num_blocks, self._host = num_blocks, host
        self.references = [0] * num_blocks
        self.chains: list[Chain | None] = [None] * num_blocks
        self.free = list(reversed(range(num_blocks)))
        self.cached: dict[int, None] = {}
        self.counts = dict.fromkeys(("peak", "allocated", "hits", "misses", "evictions", "copies"), 0)
        self.reach = 0
        self._rested = [-block for block in range(num_blocks)]  # when it became free or cached
        self._clock = 0

    @property
    def used(self) -> int:
        """How many blocks some table names."""
        return self.num_blocks - len(self.free) - len(self.cached)

    def choose(self, count: int) -> list[int]:
        """The blocks to take next, free ones before cached ones.

        Raises:
            OutOfBlocks: there are not as many.
        """
        if count > len(self.free) + len(self.cached):
            raise OutOfBlocks(count, len(self.free), len(self.cached), self.num_blocks)
        free = self.free[: -count - 1 : -1]
        return [*free, *islice(self.cached, count - len(free))]

    def take(self, block: int) -> None:
        """Hand out one block, in the order in which :meth:`choose` listed them."""
        if block in self.cached:
            del self.cached[block]
            self.unseal(block)
            self.counts["evictions"] += 1
        else:
            self.free.pop()
        self.references[block], self.reach = 1, max(self.reach, block + 1)
        self.counts["allocated"] += 1
        self.counts["peak"] = max(self.counts["peak"], self.used)

    def offload(self, blocks: Sequence[int]) -> None:
        """Let the host have what the cached ones among these blocks hold."""
        victims = {
            block: chain for block in blocks if block in self.cached and (chain := self.chains[block]) is not None
        }
        if self._host is not None and victims:
            self._host.save(victims)

    def make_free(self, count: int, keep: Collection[int] = ()) -> list[int]:
        """The ``count`` free blocks to take next; cached ones, but those of ``keep``, are evicted for them.

        Raises:
            OutOfBlocks: there are not as many.
        """
        missing = max(count - len(self.free), 0)
        victims = list(islice((block for block in self.cached if block not in keep), missing))
        if len(victims) < missing:
            raise OutOfBlocks(count, len(self.free), len(victims), self.num_blocks)
        self.offload(victims)
        undo = self.snapshot(victims)
        try:
            for block in victims:
                del self.cached[block]
                self.unseal(block)
                self.free.append(block)
                self._clock += 1
                self._rested[block] = self._clock
            self.counts["evictions"] += missing
            return self.choose(count)
        except BaseException:
            undo()
            raise

    def fill(self, blocks: list[int], contents: Sequence[Chain | None], write: Callable[[list[int]], object]) -> None:
        """Take these free blocks, let ``write`` write into them, and seal each with its content, if it has one."""
        for block in blocks:
            self.take(block)
        write(blocks)
        for block, chain in zip(blocks, contents, strict=True):
            if chain is not None:
                self.seal(block, chain)

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each block; a cached one is in use again."""
        for block in blocks:
            self.cached.pop(block, None)
            self.references[block] += 1
        self.counts["peak"] = max(self.counts["peak"], self.used)

    def drop(self, blocks: Sequence[int]) -> None:
        """One reference less to each block, the last first: a chain's head is of most use, so it is evicted last."""
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block]:
                continue
            self._clock += 1
            self._rested[block] = self._clock
            chain = self.chains[block]
            if chain is not None and len(chain.holders) > 1:  # another block can be hit in its place
                self.unseal(block)
            if self.chains[block] is None:
                self.free.append(block)
            else:
                self.cached[block] = None

    def seal(self, block: int, chain: Chain) -> None:
        """The block is full and holds the last block of ``chain``."""
        self.chains[block] = chain
        chain.holders = (*chain.holders, block)

    def unseal(self, block: int) -> None:
        """The block's content is about to change, so it can be hit no more."""
        if (chain := self.chains[block]) is not None:
            chain.holders = tuple(holder for holder in chain.holders if holder != block)
            self.chains[block] = None

    def snapshot(
        self, blocks: Sequence[int], tables: Collection[object] = (), chains: Collection[Chain] = ()
    ) -> Callable[[], None]:
        """How to put everything back exactly as it is now if anything, Ctrl-C included, stops an operation.

        Args:
            blocks: those that it touches.
            tables: objects whose attributes it assigns.
            chains: those whose holders it changes, beside the chains of ``blocks``.
        """
        before = [(block, self.references[block], self.chains[block], self._rested[block]) for block in blocks]
        sealed = (chain for _, _, chain, _ in before if chain is not None)
        holders = [(chain, chain.holders) for chain in (*chains, *sealed)]
        fields = [(table, vars(table).copy()) for table in tables]
        counts = self.counts.copy()

        def undo() -> None:
            for block, references, content, rested in before:
                self.references[block], self.chains[block], self._rested[block] = references, content, rested
            for chain, held in holders:
                chain.holders = held
            for table, attributes in fields:
                vars(table).update(attributes)
            self.counts = counts
            resting = [block for block in range(self.num_blocks) if not self.references[block]]
            resting.sort(key=self._rested.__getitem__)
            self.free = [block for block in resting if self.chains[block] is None]
            self.cached = dict.fromkeys(block for block in resting if self.chains[block] is not None)

        return undo
