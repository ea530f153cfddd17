"""The tokens of a vocabulary as a tree of their bytes, walked by an automaton level by level."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from decodekit.fsm.automaton import DEAD, Dfa

Ints = NDArray[np.int32]


class TokenTrie:
    """Tokens that begin alike share their first bytes. Nodes are numbered level by level, the root is 0.

    Args:
        tokens: the bytes of each id; ``None`` or empty for ids that are no text.

    Attributes:
        longest: the bytes of the longest token.
        spelt: the bytes that occur in tokens.
        spells_all: each of these bytes is a token of its own, so that what can be spelt can be spelt from anywhere.
    """

    def __init__(self, tokens: Sequence[bytes | None]) -> None:
        ids = [index for index, token in enumerate(tokens) if token]
        ids.sort(key=lambda index: tokens[index] or b"")
        texts = [tokens[index] or b"" for index in ids]
        self._width = len(tokens)
        self._ids = np.array(ids, dtype=np.int64)
        text = np.frombuffer(b"".join(texts), dtype=np.uint8)
        lengths = np.array([len(token) for token in texts], dtype=np.int64)
        begins = np.cumsum(lengths) - lengths

        node_of = np.zeros(len(ids), dtype=np.int32)  # of each token, sorted: how far down it was followed
        node_bytes = [np.zeros(1, dtype=np.uint8)]
        parents = [np.zeros(1, dtype=np.int32)]
        rows = np.arange(len(ids))
        count = 1
        self.longest = int(lengths.max(initial=0))
        for depth in range(self.longest):
            rows = rows[lengths[rows] > depth]
            above, byte = node_of[rows], text[begins[rows] + depth]
            is_new = np.ones(len(rows), dtype=bool)
            is_new[1:] = (above[1:] != above[:-1]) | (byte[1:] != byte[:-1])
            node_of[rows] = count - 1 + np.cumsum(is_new)
            parents.append(above[is_new])
            node_bytes.append(byte[is_new])
            count += int(is_new.sum())
        self._link(np.concatenate(node_bytes), np.concatenate(parents), node_of)
        self.spelt: list[int] = np.unique(self._byte[1:]).tolist()
        self.spells_all = {texts[place][0] for place in np.flatnonzero(lengths == 1)} >= set(self.spelt)

    def __len__(self) -> int:
        """Its nodes."""
        return len(self._byte)

    def find(self, text: bytes) -> int | None:
        """The node of ``text``; ``None`` if no token begins with it."""
        node = 0
        for byte in text:
            first, count = int(self._first_child[node]), int(self._children[node])
            place = first + int(np.searchsorted(self._byte[first : first + count], byte))
            if place == first + count or self._byte[place] != byte:
                return None
            node = place
        return node

    def merged(self, byte_class: NDArray[np.intp]) -> TokenTrie:
        """It with all nodes made one whose bytes are of the same classes, which are often far fewer.

        To be walked from its root by an automaton with these classes.
        """
        merged = np.zeros(len(self._byte), dtype=np.int32)  # of each node, the one that it becomes a part of
        node_bytes = [np.zeros(1, dtype=np.uint8)]
        parents = [np.zeros(1, dtype=np.int32)]
        columns, width = byte_class[self._byte], int(byte_class.max()) + 1
        nodes, count = np.zeros(1, dtype=np.int32), 1
        while len(nodes := self._below(nodes)[1]):
            keys = merged[self._parent[nodes]].astype(np.int64) * width + columns[nodes]
            known, examples, places = np.unique(keys, return_index=True, return_inverse=True)
            merged[nodes] = count + places
            node_bytes.append(self._byte[nodes[examples]])
            parents.append((known // width).astype(np.int32))
            count += len(known)
        trie = copy(self)
        trie._link(np.concatenate(node_bytes), np.concatenate(parents), merged[self._ends])
        return trie

    def walk(self, dfa: Dfa, state: int, node: int = 0) -> Ints:
        """[V] the state after the rest of each token: ``DEAD`` where it leads nowhere, and for tokens without such a rest.

        Args:
            dfa: what reads the bytes.
            state: of ``dfa``, at ``node``.
            node: what was read of the tokens before; the root by default, where nothing was.
        """
        after = np.full(self._width, DEAD, dtype=np.int32)
        after[self._ids] = self._state_of(dfa, state, node)[self._ends]
        return after

    def reached(self, dfa: Dfa, state: int) -> list[int]:
        """The states other than ``DEAD`` that a token leads to."""
        states = np.unique(self._state_of(dfa, state, 0)[self._is_end])
        return states[states != DEAD].tolist()

    def _state_of(self, dfa: Dfa, state: int, node: int) -> Ints:
        """The state at each node below one."""
        state_of = np.full(len(self._byte), DEAD, dtype=np.int32)
        nodes, states = np.array([node], dtype=np.int32), np.array([state], dtype=np.int32)
        while len(nodes):
            places, nodes = self._below(nodes)
            states = _stepped(dfa, states[places], dfa.byte_class[self._byte[nodes]])
            alive = states != DEAD
            nodes, states = nodes[alive], states[alive]
            state_of[nodes] = states
        return state_of

    def _below(self, nodes: Ints) -> tuple[NDArray[np.intp], Ints]:
        """The children of some nodes, and the place of each one's parent among these."""
        counts = self._children[nodes]
        places = np.repeat(np.arange(len(nodes)), counts)
        # The children of a node are numbered in a row: count on from the first of each.
        skipped = np.cumsum(counts) - counts
        below = np.repeat(self._first_child[nodes] - skipped, counts) + np.arange(len(places), dtype=np.int32)
        return places, below.astype(np.int32, copy=False)

    def _link(self, node_bytes: NDArray[np.uint8], parents: Ints, ends: Ints) -> None:
        """Take these nodes, level by level, and the one that each token of ``_ids`` ends at."""
        self._byte, self._parent, self._ends = node_bytes, parents, ends
        children = np.bincount(parents[1:], minlength=len(parents))
        self._children = children.astype(np.int32)
        self._first_child = (1 + np.cumsum(children) - children).astype(np.int32)
        self._is_end = np.zeros(len(parents), dtype=bool)
        self._is_end[ends] = True


def _stepped(dfa: Dfa, states: Ints, columns: NDArray[np.intp]) -> Ints:
    after = dfa.table[states, columns]
    unknown = after < 0
    if unknown.any():
        asked = np.unique(states[unknown] * np.int64(dfa.table.shape[1]) + columns[unknown])
        for pair in asked.tolist():
            dfa.step_class(*divmod(pair, dfa.table.shape[1]))
        after = dfa.table[states, columns]
    return after
