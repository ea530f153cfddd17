"""Constraints of several engines in one mask."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count, takewhile
from typing import Self

import torch
from torch import Tensor

from decodekit.core.constraint import CompiledConstraint, ConstraintState, mask_tokens, mask_words
from decodekit.core.errors import InputError, RowError, UnsupportedConstraint
from decodekit.core.vocabulary import Vocabulary

_MOST_TRIED = 32
_MOST_EXPANDED = 16


class _Compiled(CompiledConstraint):
    def __init__(self, members: Sequence[CompiledConstraint], vocabulary: Vocabulary) -> None:
        self._members = tuple(members)
        self._vocabulary = vocabulary
        self.exact = all(member.exact for member in members)
        self.unsupported = tuple(dict.fromkeys(keyword for member in members for keyword in member.unsupported))


class CompiledAll(_Compiled):
    """What all members allow.

    A mask is the intersection of the members' masks, less the tokens that lead into a dead end as far as is looked: where
    at most 32 tokens are left, each is tried, and those after which no token is legal (on, through chains of at most 4 legal
    tokens, three deep) are left out. A dead end that shows later, or among more tokens, is met: its mask is empty. Members
    with an automaton belong into one ``Intersection``, which has no dead ends.
    """

    def start(self) -> AllState:
        """A fresh state before the first token."""
        return AllState([member.start() for member in self._members], mask_words(self._vocabulary.width))


class CompiledAny(_Compiled):
    """What any member allows; has no dead ends unless a member has."""

    def start(self) -> AnyState:
        """A fresh state before the first token."""
        return AnyState([(member.start(), 0) for member in self._members], 0)


class AllState(ConstraintState):
    """One row's place in several constraints that must all hold."""

    def __init__(self, members: list[ConstraintState], words: int) -> None:
        self._members = members
        self._words = words

    def mask(self, out: Tensor, row: int) -> None:
        out[row] = self._common()
        legal = mask_tokens(out[row])
        if len(legal) <= _MOST_TRIED:
            for token in legal:
                if self._after(token)._is_stuck(depth=3):
                    out[row, token // 32] &= ~(1 << token % 32)

    def _common(self) -> Tensor:
        """[words] what all masks have."""
        masks = torch.empty(len(self._members), self._words, dtype=torch.int32)
        for row, member in enumerate(self._members):
            member.mask(masks, row)
        common = masks[0]
        for mask in masks[1:]:
            common = common & mask
        return common

    def _after(self, token: int) -> Self:
        ahead = self.fork()
        ahead.advance(token)
        return ahead

    def _is_stuck(self, depth: int) -> bool:
        """Whether it is plain that no text can be completed from here."""
        if self.is_accepting():
            return False
        legal = mask_tokens(self._common())
        if depth == 0 or len(legal) > 4:
            return not legal
        return all(self._after(token)._is_stuck(depth - 1) for token in legal)

    def advance(self, token: int) -> None:
        for index, member in enumerate(self._members):
            try:
                member.advance(token)
            except (RowError, UnsupportedConstraint):
                for advanced in self._members[:index]:
                    advanced.rollback(1)
                raise

    def rollback(self, count: int) -> None:
        for member in self._members:
            member.rollback(count)

    def fork(self) -> Self:
        return type(self)([member.fork() for member in self._members], self._words)

    def forced_tokens(self) -> list[int]:
        ahead = self.fork()
        forced = []
        try:
            for token in max((member.forced_tokens() for member in self._members), key=len):
                ahead.advance(token)
                forced.append(token)
        except RowError:
            pass
        return forced

    def is_accepting(self) -> bool:
        return all(member.is_accepting() for member in self._members)

    def min_tokens_to_accept(self, limit: int) -> int | None:
        """The length of a short completion: best first over 16 places of at most 32 tokens each, so not always the shortest."""
        order = count()
        queue = [(self._at_least(limit), next(order), 0, self)]
        for _ in range(_MOST_EXPANDED):
            if not queue:
                break
            estimate, _, taken, here = heapq.heappop(queue)
            if estimate > limit:
                break
            if here.is_accepting():
                return taken
            for token in mask_tokens(here._common())[:_MOST_TRIED]:
                ahead = here._after(token)
                heapq.heappush(queue, (taken + 1 + ahead._at_least(limit), next(order), taken + 1, ahead))
        return None

    def _at_least(self, limit: int) -> int:
        """A lower bound of the tokens to acceptance; above ``limit`` where a member knows none within it."""
        lengths = [member.min_tokens_to_accept(limit) for member in self._members]
        return max(limit + 1 if length is None else length for length in lengths)


class AnyState(ConstraintState):
    """One row's place in several constraints of which one must hold.

    Args:
        members: each with the tokens that it took; those that took fewer than the row are out of it.
        taken: the tokens of the row.
    """

    def __init__(self, members: list[tuple[ConstraintState, int]], taken: int) -> None:
        self._members = members
        self._taken = taken

    @property
    def _live(self) -> list[ConstraintState]:
        return [member for member, taken in self._members if taken == self._taken]

    def mask(self, out: Tensor, row: int) -> None:
        masks = torch.empty_like(out[row : row + 1])
        out[row] = 0
        for member in self._live:
            member.mask(masks, 0)
            out[row] |= masks[0]

    def advance(self, token: int) -> None:
        advanced = []
        for member, taken in self._members:
            if taken == self._taken:
                try:
                    member.advance(token)
                    taken += 1  # noqa: PLW2901
                except RowError:
                    pass
            advanced.append((member, taken))
        if all(taken <= self._taken for _, taken in advanced):
            raise RowError(f"token {token} is not legal after {self._taken} tokens of this constraint")
        self._members = advanced
        self._taken += 1

    def rollback(self, count: int) -> None:
        if not 0 <= count <= self._taken:
            raise InputError(f"cannot take back {count} tokens of {self._taken}")
        self._taken -= count
        for index, (member, taken) in enumerate(self._members):
            if taken > self._taken:
                member.rollback(taken - self._taken)
                self._members[index] = (member, self._taken)

    def fork(self) -> Self:
        return type(self)([(member.fork(), taken) for member, taken in self._members], self._taken)

    def forced_tokens(self) -> list[int]:
        first, *others = (member.forced_tokens() for member in self._live)
        for forced in others:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(first, forced, strict=False))
            first = [token for token, _ in same]
        return first

    def is_accepting(self) -> bool:
        return any(member.is_accepting() for member in self._live)

    def min_tokens_to_accept(self, limit: int) -> int | None:
        lengths = [member.min_tokens_to_accept(limit) for member in self._live]
        return min((length for length in lengths if length is not None), default=None)
