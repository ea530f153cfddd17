"""Trees of tokens from a head that continues the target's hidden states, drafted for all rows at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from decodekit.core.compat import CACHE_KEY
from decodekit.core.drafts import Draft, DraftHost, DraftRow, DraftState, Verified


@dataclass(frozen=True)
class Head:
    """A head that reads the target's last hidden states and guesses the next ones.

    Attributes:
        fuse: [B, Q] ids and [B, Q, H] hidden states of the tokens before them, to [B, Q, H] inputs.
        decoder: a transformers decoder of one full-attention layer; takes ``inputs_embeds``.
        readout: [..., H] outputs of the decoder to [..., V] logits.
    """

    fuse: Callable[[Tensor, Tensor], Tensor]
    decoder: Any
    readout: Callable[[Tensor], Tensor]


class Past(NamedTuple):
    """Keys and values of what a head has read, [heads, T, D] each; never changed in place."""

    keys: Tensor
    values: Tensor


@torch.no_grad()
def run_head(
    head: Head, pasts: Sequence[Past | None], tokens: Sequence[Sequence[int]], hidden: Sequence[Tensor]
) -> tuple[list[Tensor], list[Past]]:
    """Read tokens with the hidden states of those before them, each row after its own past.

    Args:
        head: the head.
        pasts: [B] what each row read before.
        tokens: [B] of any numbers.
        hidden: [B] of [n, H] each.

    Returns:
        [B] of [H], the output at the last token of each row, and their pasts with these tokens.
    """
    counts, device = [len(own) for own in tokens], hidden[0].device
    held = [0 if past is None else past.keys.shape[1] for past in pasts]
    before, width = max(held), max(counts)
    ids = torch.tensor([[0] * (width - len(own)) + list(own) for own in tokens], device=device)
    states = torch.stack([torch.nn.functional.pad(own, (0, 0, width - len(own), 0)) for own in hidden])
    # Each row is its past and its new tokens, both right-aligned.
    mask = [
        [0] * (before - past) + [1] * past + [0] * (width - count) + [1] * count
        for past, count in zip(held, counts, strict=True)
    ]
    starts = [past - (width - count) for past, count in zip(held, counts, strict=True)]
    positions = [[max(0, start + place) for place in range(width)] for start in starts]
    cache = DynamicCache(config=head.decoder.config)
    if before:
        known = next(past for past in pasts if past is not None)
        empty = Past(known.keys[:, :0], known.values[:, :0])
        columns = zip(*(past or empty for past in pasts), strict=True)
        keys, values = (torch.stack([_left_pad(part, before) for part in parts]) for parts in columns)
        cache.update(keys, values, 0)
    outputs = head.decoder(
        inputs_embeds=head.fuse(ids, states),
        attention_mask=torch.tensor(mask, device=device),
        position_ids=torch.tensor(positions, device=device),
        use_cache=True,
        **{CACHE_KEY: cache},
    )
    layer = cache.layers[0]
    grown = []
    for row, (past, count) in enumerate(zip(pasts, counts, strict=True)):
        new = Past(layer.keys[row, :, -count:], layer.values[row, :, -count:])
        grown.append(new if past is None else Past(*(torch.cat(parts, dim=1) for parts in zip(past, new, strict=True))))
    return list(outputs.last_hidden_state[:, -1]), grown


def _left_pad(part: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(part, (0, 0, width - part.shape[1], 0))


@dataclass
class _Read:
    """What a head has of a row.

    Attributes:
        past: of the target's own hidden states.
        count: how many of these it has read.
        waiting: [n, H] those that it has not read yet.
    """

    waiting: Tensor
    past: Past | None = None
    count: int = 0


@dataclass
class _Node:
    """A drafted token.

    Attributes:
        probability: of the path up to it.
        ahead: the tokens of that path.
        parent: its parent among the nodes of the row; -1 for the row itself.
        hidden: [H] what stands for the token before it.
        past: of the path before it.
    """

    probability: float
    ahead: tuple[int, ...]
    parent: int
    hidden: Tensor
    past: Past


@dataclass
class _Tree:
    row: DraftRow
    budget: int
    nodes: list[_Node] = field(default_factory=list)
    frontier: list[int] = field(default_factory=list)


class HeadDrafts(DraftState):
    """Trees that grow where the head is confident.

    Li et al., 2024, arXiv:2406.16858, section 4: at each depth the nodes of the highest path probability are expanded, and of
    all nodes the most probable are drafted. The hidden states of what was accepted are always the target's own: those that
    the head guessed are given up with the draft.

    Args:
        host: what the drafter was given.
        head: guesses.
        layer: the target's hidden layer that the head reads.
        branching: children of a node, and nodes that are expanded at a depth; 1 drafts chains.
        depth: most depth of a tree.
    """

    def __init__(self, host: DraftHost, head: Head, *, layer: int, branching: int, depth: int) -> None:
        self._host, self._head, self._layer = host, head, layer
        self._branching, self._depth = branching, depth
        self._rows: dict[int, _Read] = {}

    def prefilled(self, rows: Sequence[DraftRow], hidden: Sequence[Mapping[int, Tensor]]) -> None:
        for row, own in zip(rows, hidden, strict=True):
            self._rows[row.row] = _Read(own[self._layer])

    def observe(self, verified: Sequence[Verified]) -> None:
        for own in verified:
            if (read := self._rows.get(own.row.row)) is not None:
                states = own.outputs.hidden(self._layer)
                read.waiting = torch.cat([read.waiting, states[[0, *(1 + node for node in own.accepted)]]])

    def propose(self, rows: Sequence[DraftRow], budgets: Sequence[int]) -> Sequence[Draft]:
        trees = [_Tree(row, budget) for row, budget in zip(rows, budgets, strict=True)]
        going = [tree for tree in trees if tree.budget and tree.row.row in self._rows]
        if going:
            reads = [self._rows[tree.row.row] for tree in going]
            tokens = [tree.row.ids[read.count + 1 :] for tree, read in zip(going, reads, strict=True)]
            waiting = [read.waiting for read in reads]
            hidden, pasts = run_head(self._head, [read.past for read in reads], tokens, waiting)
            for read, past in zip(reads, pasts, strict=True):
                read.past, read.count = past, read.count + len(read.waiting)
                read.waiting = read.waiting[:0]
            self._grow([(tree, -1) for tree in going], hidden, pasts)
        for _ in range(min(self._depth, max(budgets, default=0)) - 1):
            parents = [(tree, node) for tree in going for node in tree.frontier]
            if not parents:
                break
            nodes = [tree.nodes[node] for tree, node in parents]
            fed = [node.ahead[-1:] for node in nodes]
            before = [node.hidden.unsqueeze(0) for node in nodes]
            self._grow(parents, *run_head(self._head, [node.past for node in nodes], fed, before))
        return [self._draft(tree) for tree in trees]

    def fork(self, children: Mapping[int, int]) -> None:
        for row, parent in children.items():
            if parent in self._rows:
                read = self._rows[parent]
                self._rows[row] = _Read(read.waiting, read.past, read.count)

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._rows.pop(row, None)

    def _grow(self, parents: Sequence[tuple[_Tree, int]], hidden: Sequence[Tensor], pasts: Sequence[Past]) -> None:
        """Give nodes their children, and say which of these are to be expanded."""
        ahead = [tree.nodes[node].ahead if node >= 0 else () for tree, node in parents]
        logits = self._head.readout(torch.stack(list(hidden)))
        probabilities = self._host.probabilities([tree.row for tree, _ in parents], ahead, logits)
        best = probabilities.topk(min(self._branching, probabilities.shape[-1]))
        grown = list({id(tree): tree for tree, _ in parents}.values())
        for tree in grown:
            tree.frontier = []
        for place, (tree, parent) in enumerate(parents):
            reached = tree.nodes[parent].probability if parent >= 0 else 1.0
            for own, token in zip(best.values[place].tolist(), best.indices[place].tolist(), strict=True):
                if own > 0:
                    tree.frontier.append(len(tree.nodes))
                    tree.nodes.append(_Node(reached * own, (*ahead[place], token), parent, hidden[place], pasts[place]))
        for tree in grown:
            # Those that will not be drafted need no children.
            leaves = set(self._best(tree)) & set(tree.frontier)
            tree.frontier = sorted(leaves, key=lambda node: -tree.nodes[node].probability)[: self._branching]

    def _best(self, tree: _Tree) -> list[int]:
        """The most probable nodes, parents before children: no node is more probable than its parent."""
        order = sorted(range(len(tree.nodes)), key=lambda node: (-tree.nodes[node].probability, node))
        return sorted(order[: tree.budget])

    def _draft(self, tree: _Tree) -> Draft:
        kept = self._best(tree)
        places = {-1: -1} | {node: place for place, node in enumerate(kept)}
        parents = [places[tree.nodes[node].parent] for node in kept]
        return Draft([tree.nodes[node].ahead[-1] for node in kept], parents)
