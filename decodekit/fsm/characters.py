"""Sets of characters as trees of the bytes that spell them in UTF-8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

Spans = tuple[tuple[int, int], ...]
"""Code points from the first to the second of each pair, both included."""

# Code points of each UTF-8 length: the first, the last, the bits below the lead byte's, the lead byte of code point 0.
# Surrogates (D800 to DFFF) are no characters.
_FORMS = (
    (0x00, 0x7F, 0, 0x00),
    (0x80, 0x7FF, 6, 0xC0),
    (0x800, 0xD7FF, 12, 0xE0),
    (0xE000, 0xFFFF, 12, 0xE0),
    (0x10000, 0x10FFFF, 18, 0xF0),
)


class ByteTree:
    """What may follow a byte inside a character: equal trees are one object. ``WHOLE`` ends a character."""

    def __init__(self, branches: Mapping[int, ByteTree]) -> None:
        self.branches = dict(branches)

    @cached_property
    def least(self) -> int:
        """The fewest bytes down to the end of a character."""
        return 1 + min(branch.least for branch in self.branches.values()) if self.branches else 0

    def within(self) -> Iterable[ByteTree]:
        """This tree and all trees below it, some of them several times."""
        yield self
        for branch in set(self.branches.values()):
            yield from branch.within()


WHOLE = ByteTree({})
_trees: dict[frozenset[tuple[int, ByteTree]], ByteTree] = {}


@lru_cache(maxsize=4096)
def byte_tree(spans: Spans) -> ByteTree:
    """The tree of a set of characters; without branches if it has none."""
    branches: dict[int, ByteTree] = {}
    for first, last, bits, lead in _FORMS:
        clipped = tuple((max(low, first), min(high, last)) for low, high in spans if low <= last and high >= first)
        for byte, tree in _branches(clipped, bits, lead).items():
            # E0 to EF lead code points on both sides of the surrogates, but no byte leads both.
            branches[byte] = tree
    return _tree(branches)


def _tree(branches: Mapping[int, ByteTree]) -> ByteTree:
    return _trees.setdefault(frozenset(branches.items()), ByteTree(branches))


def _branches(spans: Spans, bits: int, lead: int) -> dict[int, ByteTree]:
    """The branches by the bits of a code point above its lowest ``bits``; spans are relative to what was read before."""
    inside: dict[int, list[tuple[int, int]]] = {}
    for low, high in spans:
        for chunk in range(low >> bits, (high >> bits) + 1):
            base = chunk << bits
            end = base + (1 << bits) - 1
            inside.setdefault(chunk, []).append((max(low, base) - base, min(high, end) - base))
    return {lead + chunk: _continuation(tuple(within), bits - 6) for chunk, within in inside.items()}


@lru_cache(maxsize=4096)
def _continuation(spans: Spans, bits: int) -> ByteTree:
    return WHOLE if bits < 0 else _tree(_branches(spans, bits, 0x80))


def byte_classes(trees: Iterable[ByteTree]) -> NDArray[np.intp]:
    """[256] the class of each byte: bytes that no tree tells apart share one."""
    number: dict[ByteTree, int] = {}
    rows = []
    for tree in dict.fromkeys(inner for outer in dict.fromkeys(trees) for inner in outer.within()):
        row = np.zeros(256, dtype=np.int32)
        for byte, branch in tree.branches.items():
            row[byte] = number.setdefault(branch, len(number) + 1)
        rows.append(row)
    return common_classes(rows)


def common_classes(partitions: Iterable[NDArray[np.integer]]) -> NDArray[np.intp]:
    """[256] the coarsest classes that tell apart all bytes that one of the partitions, [256] each, tells apart."""
    stacked = np.stack([np.zeros(256, dtype=np.intp), *partitions], axis=1)
    return np.unique(stacked, axis=0, return_inverse=True)[1].reshape(256)
