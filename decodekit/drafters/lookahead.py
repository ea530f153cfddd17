"""Propose n-grams that the model itself wrote while it guessed ahead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from decodekit.core.drafts import Draft, DraftHost, DraftRow, DraftState, Verified
from decodekit.core.protocols import Drafter

MOST_BEGINNINGS = 4096
"""Tokens whose n-grams a row remembers; the longest unused go first."""


class Lookahead(Drafter):
    """Lookahead decoding: a window of Jacobi guesses is refined in the forwards that verify, and its n-grams are drafts.

    Fu et al., 2024, arXiv:2402.02057, section 3. The lookahead branch is written as draft nodes: the oldest guesses are a chain
    behind the last token, and the newer ones of each column a branch off it, so that every guess sees what it sees in the
    paper. The verification branch is n-grams that begin with the last token. Both are one tree; a guess that proves right is
    accepted too. Needs no text to repeat, but spare compute: ``window * (ngram - 1)`` more positions a row.

    Cost: up to ``max_tokens`` positions in ``window + guesses`` branches a row; no model.
    """

    cost: ClassVar[str] = "window x (ngram - 1) positions a pass"

    kind: Literal["lookahead"] = "lookahead"
    max_tokens: int = Field(16, ge=1, le=256, description="most nodes of a draft: n-grams first, then guesses")
    window: int = Field(4, ge=1, le=32, description="places ahead that are guessed")
    ngram: int = Field(3, ge=2, le=8, description="tokens of an n-gram")
    guesses: int = Field(4, ge=1, le=32, description="most n-grams verified in a pass")

    def start(self, host: DraftHost) -> DraftState:
        """A window and a pool a row."""
        return _Windows(self)


class _Windows(DraftState):
    def __init__(self, options: Lookahead) -> None:
        self._options = options
        self._rows: dict[int, _Row] = {}

    def propose(self, rows: Sequence[DraftRow], budgets: Sequence[int]) -> Sequence[Draft]:
        drafts = []
        for row, budget in zip(rows, budgets, strict=True):
            known = self._rows.get(row.row)
            if known is None:
                known = self._rows[row.row] = _Row(self._options, row.prompt_ids)
            drafts.append(known.draft(row.tokens[-1]).pruned(budget))
        return drafts

    def observe(self, verified: Sequence[Verified]) -> None:
        for own in verified:
            if (known := self._rows.get(own.row.row)) is not None:
                known.observe(own)

    def fork(self, children: Mapping[int, int]) -> None:
        for row, parent in children.items():
            if parent in self._rows:
                self._rows[row] = self._rows[parent].copy()

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._rows.pop(row, None)


class _Row:
    """The window and the pool of one row.

    Args:
        options: their sizes.
        prompt: what the first guesses are taken from.
    """

    def __init__(self, options: Lookahead, prompt: Sequence[int]) -> None:
        self._options = options
        self._refill = list(prompt)
        # [ngram - 1][window]: the guesses, oldest first; each one follows the one of its column in the level before.
        self._levels = [self._guessed(options.window) for _ in range(options.ngram - 1)]
        self._pool: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()
        # The nodes of each column in the last draft.
        self._columns: list[list[int]] = []

    def copy(self) -> _Row:
        """A row that goes on apart."""
        other = _Row(self._options, self._refill)
        other._levels = [[*level] for level in self._levels]
        other._pool = OrderedDict((first, [*known]) for first, known in self._pool.items())
        return other

    def draft(self, last: int) -> Draft:
        """The tree of known n-grams behind the last token and of all guesses."""
        tree = _Tree()
        for rest in self._pool.get(last, ())[: self._options.guesses]:
            tree.add(-1, rest)
        self._columns, oldest = [], -1
        for column in zip(*self._levels, strict=True):
            oldest = tree.add(oldest, column[:1])[0]
            self._columns.append([oldest, *tree.add(oldest, column[1:])])
        return Draft(tree.tokens, tree.parents)

    def observe(self, verified: Verified) -> None:
        """Learn the n-grams of the window and of the output, and move the window on."""
        draft, best = verified.draft, verified.outputs.logits.argmax(-1).tolist()
        self._learn(verified.row.tokens[-(self._options.ngram + len(verified.accepted)) :])
        if any(node >= len(draft) for column in self._columns for node in column):
            return  # the schedule left guesses out: those of before stand
        newest = [best[column[-1] + 1] for column in self._columns]
        for column, new in zip(zip(*self._levels, strict=True), newest, strict=True):
            self._learn([*column, new])
        # A level ahead is a place ahead: only what was accepted beyond the one token of any pass is left behind.
        passed = min(len(verified.accepted), self._options.window)
        moved = [*self._levels[1:], newest]
        self._levels = [[*level[passed:], *self._guessed(passed)] for level in moved]

    def _learn(self, tokens: Sequence[int]) -> None:
        size = self._options.ngram
        for start in range(len(tokens) - size + 1):
            first, *rest = tokens[start : start + size]
            known = [tuple(rest), *(own for own in self._pool.pop(first, ()) if own != tuple(rest))]
            self._pool[first] = known[: self._options.guesses]
        while len(self._pool) > MOST_BEGINNINGS:
            self._pool.popitem(last=False)

    def _guessed(self, count: int) -> list[int]:
        """First guesses: tokens of the prompt in turn, any would do."""
        taken = [self._refill[place % len(self._refill)] for place in range(count)]
        self._refill = [*self._refill[count:], *self._refill[:count]]
        return taken


class _Tree:
    """Token paths that share what they have in common."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._known: dict[tuple[int, int], int] = {}

    def add(self, parent: int, path: Sequence[int]) -> list[int]:
        """The nodes of a path behind a node, new where there are none yet."""
        nodes = list[int]()
        for token in path:
            if (parent, token) not in self._known:
                self._known[parent, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
            parent = self._known[parent, token]
            nodes.append(parent)
        return nodes
