"""What the cache has seen: chains of full blocks, told apart by their content, never by a hash alone.

A chain is what the K/V of a block depend on: salt, adapter, and every token up to the block's last. Equal chains are
one object, so ``is`` compares whole prefixes, and no collision of hashes can serve another prompt's K/V.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Hashable, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from decodekit.cache.blocks import BlockPool, BlockTable

Media: TypeAlias = tuple[int, int, Hashable]
"""A span of placeholder tokens, ``start`` up to ``stop``, and the key of what stands there (an image's digest)."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and what else its K/V depend on; prompts share the blocks in which all of this is equal.

    Attributes:
        tokens: ids, without pads.
        salt: one a tenant; nobody can tell what prompts of another salt were seen.
        extra: a key of what every token depends on, such as the adapter.
        media: spans whose K/V depend on more than their ids; the text before a span is shared as usual.
    """

    tokens: Sequence[int]
    salt: bytes | str | None = None
    extra: Hashable = None
    media: Sequence[Media] = ()


class Chain:
    """A run of full blocks from the first token on: a parent chain and the contents of one more block.

    Attributes:
        parent: the chain without its last block; an empty chain has none.
        contents: of the last block, as :func:`block_contents` gives them; of an empty chain, its salt and extra key.
        holders: the blocks with the last block's K/V, first come first; none once all are evicted.
    """

    __slots__ = ("__weakref__", "contents", "holders", "parent")
    parent: Chain

    def __init__(self, parent: Chain | None, contents: tuple[Hashable, ...]) -> None:
        if parent is not None:
            self.parent = parent
        self.contents = contents
        self.holders: tuple[int, ...] = ()


class PrefixIndex:
    """Every chain that a block, a table or a longer chain still refers to; the others are forgotten.

    A chain outlives the eviction of its blocks while a longer one lives: a sliding window needs only the last blocks of
    a prefix, and finds them through the chains of those it let go.

    Args:
        block_size: tokens a block.
        window: tokens a query sees, itself included; ``None`` for all.
        offloaded: chains whose last block is held elsewhere and can be brought back.
    """

    def __init__(self, block_size: int, window: int | None = None, offloaded: Container[Chain] = ()) -> None:
        self._block_size, self._window, self._offloaded = block_size, window, offloaded
        self._chains: WeakValueDictionary[tuple[Chain | None, tuple[Hashable, ...]], Chain] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._chains)

    def root(self, prompt: Prompt) -> Chain:
        """The empty chain that prompts of this salt and extra key begin with."""
        return self.child(None, (prompt.salt, prompt.extra))

    def child(self, parent: Chain | None, contents: tuple[Hashable, ...]) -> Chain:
        """``parent`` and one more block; made if it is new."""
        chain = self._chains.get((parent, contents))
        if chain is None:
            chain = self._chains[parent, contents] = Chain(parent, contents)
        return chain

    def first_needed(self, position: int) -> int:
        """The first token that a query at this position sees."""
        return 0 if self._window is None else max(position - self._window + 1, 0)

    def match(self, prompt: Prompt, most: int) -> tuple[list[Chain], list[int]]:
        """What is known of the first ``most`` full blocks of a prompt.

        Returns:
            the known chains that it begins with, shortest first, and the numbers of tokens, ascending from 0, at which
            every block that the next token sees is held.
        """
        size, chains, depths, held = self._block_size, list[Chain](), [0], 0
        contents = block_contents(prompt.tokens[: most * size], media=prompt.media)
        chain: Chain | None = self.root(prompt)
        for depth in range(size, most * size + 1, size):
            chain = self._chains.get((chain, tuple(contents[depth - size : depth])))
            if chain is None:
                break
            chains.append(chain)
            held = held + 1 if chain.holders or chain in self._offloaded else 0
            if held * size >= depth - self.first_needed(depth) // size * size:
                depths.append(depth)
        return chains, depths


def block_contents(tokens: Sequence[int], start: int = 0, media: Sequence[Media] = ()) -> list[Hashable]:
    """What tells tokens at the same position apart: the id, and inside a media span also the span's key.

    Args:
        tokens: ids of the positions from ``start`` on.
        start: position of the first.
        media: spans, in absolute positions.
    """
    contents: list[Hashable] = [index(token) for token in tokens]
    for first, stop, key in media:
        for place in range(max(first - start, 0), min(stop - start, len(contents))):
            contents[place] = (contents[place], key)
    return contents


def open_together(
    pools: Sequence[BlockPool], prompt: Prompt, checkpoints: Collection[int] | None = None
) -> list[BlockTable]:
    """One table a cache group, all beginning with the same number of cached tokens: the most that every group has.

    Args:
        pools: the groups of one cache, at least one.
        prompt: the new sequence.
        checkpoints: at how many tokens of this prompt a recurrent state was saved; ``None`` for a model without one.
    """
    depths = set.intersection(*(set(pool.resumable(prompt)) for pool in pools))
    if checkpoints is not None:
        depths &= {0, *checkpoints}
    tables: list[BlockTable] = []
    try:
        for pool in pools:
            tables.append(pool.open(prompt, depth=max(depths)))
    except BaseException:
        for pool, table in zip(pools, tables, strict=False):
            pool.release(table)
        raise
    return tables
