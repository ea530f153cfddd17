"""What drafters are told and what they propose.

A *draft* is a tree of tokens that may follow a row; the target model scores all of its nodes in one forward, and the longest
path that agrees with what it would have chosen is kept. Verification is exact whatever a drafter proposes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from decodekit.core.errors import PluginError
from decodekit.core.random import Stream
from decodekit.core.types import BranchOutputs

DOUBT = 3.0
"""Continuations never seen that count beside those seen after a match of one token in the same text."""


@dataclass(frozen=True)
class DraftRow:
    """A row that is to be drafted for.

    Attributes:
        row: its number; forks have new ones.
        prompt_ids: of its main branch, without pads.
        tokens: the output so far.
        request: which request it belongs to.
        stream: its random stream; drafters draw from lanes at ``DRAFT_LANE`` and above.
    """

    row: int
    prompt_ids: Sequence[int]
    tokens: Sequence[int]
    request: int
    stream: Stream

    @property
    def ids(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt_ids, *self.tokens]


@dataclass(frozen=True)
class Draft:
    """Tokens that may follow a row.

    Attributes:
        tokens: [G] a node each.
        parents: [G] the node that each follows, -1 for the row itself; a chain when left out. A parent comes before its
            children, and no two children of a parent have the same token.
        q: [G, V] the distribution that each token was drawn from, given its parent; left out where none was drawn from.
        forced: nobody proposed it: a constraint leaves no other way to go on.
        confidence: how likely the token at each depth is accepted if those before it are; left out by who cannot tell. The
            schedule corrects it by what it measures, and cuts drafts where it is low.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] | None = None
    q: Tensor | None = None
    forced: bool = False
    confidence: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def parent_of(self) -> Sequence[int]:
        """[G] parents, also of a chain."""
        return range(-1, len(self.tokens) - 1) if self.parents is None else self.parents

    def children(self, node: int) -> list[int]:
        """The nodes that follow a node (-1: the row itself), in order."""
        return [child for child, parent in enumerate(self.parent_of) if parent == node]

    def child(self, node: int, token: int) -> int | None:
        """The node with this token that follows a node."""
        return next((child for child in self.children(node) if self.tokens[child] == token), None)

    def path(self, node: int) -> list[int]:
        """The nodes from the first to this one."""
        nodes = list[int]()
        while node >= 0:
            nodes.append(node)
            node = self.parent_of[node]
        return nodes[::-1]

    def leaves(self) -> list[int]:
        """The nodes that nothing follows, in order."""
        if self.parents is None:
            return [len(self.tokens) - 1] if self.tokens else []
        inner = set(self.parent_of)
        return [node for node in range(len(self.tokens)) if node not in inner]

    def kept(self, nodes: Sequence[int]) -> Draft:
        """It with these nodes alone, in order; the parents of each must be among them."""
        if len(nodes) == len(self.tokens):
            return self
        place = {-1: -1, **{node: own for own, node in enumerate(nodes)}}
        parents = [place[self.parent_of[node]] for node in nodes]
        q = None if self.q is None else self.q[list(nodes)]
        return replace(self, tokens=[self.tokens[node] for node in nodes], parents=parents, q=q)

    @property
    def depth(self) -> int:
        """Nodes of its longest path."""
        if self.parents is None:
            return len(self.tokens)
        depths = list[int]()
        for parent in self.parents:
            depths.append(1 if parent < 0 else 1 + depths[parent])
        return max(depths, default=0)

    def pruned(self, most: int) -> Draft:
        """Its first ``most`` nodes; their parents are among them."""
        if len(self.tokens) <= most:
            return self
        parents = None if self.parents is None else self.parents[:most]
        return replace(self, tokens=self.tokens[:most], parents=parents, q=None if self.q is None else self.q[:most])

    def check(self, budget: int, vocab: int, kind: str) -> None:
        """Refuse what cannot be verified.

        Raises:
            PluginError: more nodes than asked for, an id beyond the vocabulary, a parent behind its child, twins, a ``q`` of
                another shape, or one that its token cannot have been drawn from; a confidence of another length, or that is
                no probability.
        """
        parents = list(self.parent_of)
        twins = len({*zip(parents, self.tokens, strict=False)}) < len(self.tokens)
        given = None if self.q is None else tuple(self.q.shape)
        likely = list(self.confidence)
        if (
            len(self.tokens) > budget
            or any(not 0 <= token < vocab for token in self.tokens)
            or len(parents) != len(self.tokens)
            or any(not -1 <= parent < node for node, parent in enumerate(parents))
            or twins
            or given not in (None, (len(self.tokens), vocab))
            or (self.q is not None and any(self.q[node, token] <= 0 for node, token in enumerate(self.tokens)))
            or (likely and (len(likely) != self.depth or not all(0 <= own <= 1 for own in likely)))
        ):
            raise PluginError(
                f"drafter {kind!r} proposed tokens {list(self.tokens)} with parents {parents}, q {given} and confidence "
                f"{likely}; expected at most {budget} different tokens below {vocab}, each after its parent, and each drawn "
                "from its row of q, with a confidence from 0 to 1 for each depth, or none"
            )


def confidence(match: int, seen: int = 1, total: int = 1, doubt: float = DOUBT) -> float:
    """How likely the model writes again what followed a match of so many tokens.

    Args:
        match: tokens that match, at least one.
        seen: how often the continuation followed them.
        total: how often anything did.
        doubt: continuations never seen, which count in full after one token and ever less after longer matches; fitted, with
            the exponent, to greedy outputs of SmolLM2-135M on Spec-Bench.
    """
    return seen / (total + doubt / match**1.5)


@dataclass(frozen=True)
class Verified:
    """What became of one row's draft.

    Attributes:
        row: the row as it is now.
        before: the token that was its last before the draft.
        accepted: the nodes that were accepted, in order.
        draft: what was proposed.
        outputs: the main branch's outputs at the row itself and after each node, [1 + G, ...].
    """

    row: DraftRow
    before: int
    accepted: Sequence[int]
    draft: Draft
    outputs: BranchOutputs


class DraftState(ABC):
    """What a drafter keeps for the rows of one call."""

    @abstractmethod
    def propose(self, rows: Sequence[DraftRow], budgets: Sequence[int]) -> Sequence[Draft]:
        """[R] drafts of at most so many nodes each; an empty one where there is nothing to propose."""

    def prefilled(self, rows: Sequence[DraftRow], hidden: Sequence[Mapping[int, Tensor]]) -> None:  # noqa: B027
        """The prompts of these rows were forwarded; where the drafter ``reads_prompt``.

        Args:
            rows: [R] the rows.
            hidden: [R] the drafter's hidden layers, [T, H] each over the prompt.
        """

    def observe(self, verified: Sequence[Verified]) -> None:  # noqa: B027  many keep nothing
        """Learn from what a forward of the target model gave; also called for rows without a draft."""

    def fork(self, children: Mapping[int, int]) -> None:  # noqa: B027  many keep nothing
        """New rows have come from others: a new row, its parent."""

    def release(self, rows: Sequence[int]) -> None:  # noqa: B027  many keep nothing
        """These rows are over."""

    def close(self) -> None:  # noqa: B027  many keep nothing
        """The call is over."""

    def seconds(self) -> Mapping[str, float]:
        """Parts of what proposing and observing took, by name, for ``Output.stats``."""
        return {}


class Runner(Protocol):
    """A cached model that a drafter runs beside the target; rows are numbered as the target's."""

    model: Any

    def forward(
        self, tokens: Mapping[int, Sequence[int]], last: Mapping[int, int] | None = None
    ) -> dict[int, BranchOutputs]:
        """Forward the next tokens of rows (all of a prompt at first); the outputs at the ``last`` (1) positions of each."""

    def rollback(self, drop: Mapping[int, int]) -> None:
        """Take back the last tokens of rows."""

    def fork(self, children: Mapping[int, int]) -> None:
        """Begin rows as copies of others."""

    def release(self, rows: Sequence[int]) -> None:
        """Let go of rows."""


class DraftHost(Protocol):
    """What the loop gives a drafter at the start of a call.

    Attributes:
        model: the target model.
        tokenizer: its tokenizer, or ``None``.
        sample: whether tokens are drawn; otherwise the most likely one is taken.
        vocab: width of the target's logits.
    """

    model: Any
    tokenizer: Any
    sample: bool
    vocab: int

    def bound(self, name: str) -> tuple[Any, Any]:
        """The model of this name, and its tokenizer; ``None`` where it came without.

        Raises:
            InputError: no model of that name was bound.
        """

    def runner(self, model: Any, *, layers: Sequence[int] = (), stretch: int = 1) -> Runner:
        """Another model over a cache of its own.

        Args:
            model: a loaded model.
            layers: hidden layers to keep in its outputs.
            stretch: how many of its tokens there may be for one of the target's, on average.
        """

    def probabilities(self, rows: Sequence[DraftRow], ahead: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """[R, V]: what the target's rules make of logits of the token after each row and the tokens drafted for it.

        Rules that keep a state are left out: they are the target's own at verification, which stays exact.
        """
