"""A regex as an automaton.

A state is what may still follow: a boolean combination of continuations, so that looking ahead is intersection and
complement (an alternating automaton; Chandra, Kozen and Stockmeyer, 1981, "Alternation"; derivatives of such terms as in
Brzozowski, 1964, "Derivatives of Regular Expressions"). What looking behind must know of the past runs beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from decodekit.fsm import syntax
from decodekit.fsm.automaton import Automaton, Dfa
from decodekit.fsm.characters import WHOLE, ByteTree, byte_classes, common_classes
from decodekit.fsm.syntax import Node

Past = tuple[int, ...]
"""The state of the ``Dfa`` of each look-behind."""


@dataclass(frozen=True, eq=False)
class Term:
    """What may follow; equal terms of one regex are one object. ``least`` is the fewest bytes it takes."""

    least: int


@dataclass(frozen=True, eq=False)
class _Bytes(Term):
    """The rest of a character, then ``after``."""

    tree: ByteTree
    after: Term


@dataclass(frozen=True, eq=False)
class _Loop(Term):
    """``body`` from ``low`` to ``high`` times, then ``after``; unrolled by one round when it is stepped into."""

    body: Node
    low: int
    high: int | None
    after: Term


@dataclass(frozen=True, eq=False)
class _Or(Term):
    parts: frozenset[Term]


@dataclass(frozen=True, eq=False)
class _And(Term):
    parts: frozenset[Term]


@dataclass(frozen=True, eq=False)
class _Not(Term):
    part: Term


@dataclass(frozen=True, eq=False)
class _Past(Term):
    """``after``, if the look-behind of this index holds here (or does not)."""

    index: int
    negated: bool
    after: Term


_NOTHING = Term(syntax.NEVER)
_END = Term(0)
# Any bytes, also such as are no text: it only ever stands beside a term that holds the text.
_EVERYTHING = Term(0)


class Regex(Automaton):
    """The automaton of a pattern; its states are pairs of a term and the past that look-behinds need."""

    def __init__(self, node: Node) -> None:
        nodes = list(_within(node))
        self._interned: dict[tuple[Any, ...], Term] = {}
        self._compiled: dict[tuple[Node, Term, Term], Term] = {}
        self._derived: dict[tuple[Term, int, Past], Term] = {}
        self._pasts: dict[tuple[Node, bool], int] = {}
        trackers: list[Dfa] = []
        self.trim = not any(part.asserts or part.least >= syntax.NEVER for part in nodes)
        for part in nodes:
            if isinstance(part, syntax.Behind):
                before = part.body if part.whole else syntax.sequence(syntax.ANY_TEXT, part.body)
                self._pasts[part.body, part.whole] = len(trackers)
                trackers.append(Dfa(Regex(before)))
        self.members = tuple(trackers)
        trees = [part.tree for part in nodes if isinstance(part, syntax.Character)]
        self.byte_class = common_classes([byte_classes(trees), *(tracker.byte_class for tracker in trackers)])
        self.start = (self._compile(node, _END, _END), (Dfa.start,) * len(trackers))

    def step(self, state: tuple[Term, Past], byte: int) -> tuple[Term, Past] | None:
        term, past = state
        after = self._derive(term, byte, past)
        if after is _NOTHING:
            return None
        return after, tuple(tracker.step(here, byte) for tracker, here in zip(self.members, past, strict=True))

    def accepts(self, state: tuple[Term, Past]) -> bool:
        return self._ends(*state)

    def least(self, state: tuple[Term, Past]) -> int:
        return state[0].least

    def _ends(self, term: Term, past: Past) -> bool:
        """Whether nothing need follow."""
        self.work += 1
        match term:
            case _Loop():
                return self._ends(self._unroll(term), past)
            case _Or():
                return any(self._ends(part, past) for part in term.parts)
            case _And():
                return all(self._ends(part, past) for part in term.parts)
            case _Not():
                return not self._ends(term.part, past)
            case _Past():
                return self._holds(term, past) and self._ends(term.after, past)
        return term is _END or term is _EVERYTHING

    def _derive(self, term: Term, byte: int, past: Past) -> Term:
        """What may follow ``byte``."""
        if term is _NOTHING or term is _END:
            return _NOTHING
        if term is _EVERYTHING:
            return _EVERYTHING
        if isinstance(term, _Bytes):
            branch = term.tree.branches.get(byte)
            return _NOTHING if branch is None else self._bytes(branch, term.after)
        key = (term, byte, past)
        if (derived := self._derived.get(key)) is None:
            self.work += 1
            match term:
                case _Loop():
                    derived = self._derive(self._unroll(term), byte, past)
                case _Or():
                    derived = self._or(self._derive(part, byte, past) for part in term.parts)
                case _And():
                    derived = self._and(self._derive(part, byte, past) for part in term.parts)
                case _Not():
                    derived = self._not(self._derive(term.part, byte, past))
                case _Past():
                    derived = self._derive(term.after, byte, past) if self._holds(term, past) else _NOTHING
                case _:
                    raise AssertionError(term)
            self._derived[key] = derived
        return derived

    def _holds(self, term: _Past, past: Past) -> bool:
        return self.members[term.index].accepting[past[term.index]] is not term.negated

    def _compile(self, node: Node, consumed: Term, empty: Term) -> Term:
        """``node`` and what follows it: ``consumed`` if it took some text, ``empty`` if it took none.

        Inside a loop the two differ, so that a round without text does not start another, without end.
        """
        key = (node, consumed, empty)
        if (term := self._compiled.get(key)) is None:
            term = self._compiled[key] = self._continued(node, consumed, empty)
        return term

    def _continued(self, node: Node, consumed: Term, empty: Term) -> Term:
        match node:
            case syntax.Character():
                return self._bytes(node.tree, consumed)
            case syntax.Sequence():
                for part in reversed(node.parts):
                    consumed, empty = (
                        self._compile(part, consumed, consumed),
                        self._compile(part, consumed, empty),
                    )
                return empty
            case syntax.Either():
                return self._or(self._compile(option, consumed, empty) for option in node.options)
            case syntax.Repeat():
                if consumed is empty:
                    return self._loop(node.body, node.low, node.high, consumed)
                return self._round(node.body, node.low, node.high, consumed, empty)
            case syntax.Ahead():
                beyond = _END if node.whole else _EVERYTHING
                following = self._compile(node.body, beyond, beyond)
                return self._and([empty, self._not(following) if node.negated else following])
            case syntax.Behind():
                index = self._pasts[node.body, node.whole]
                return self._intern(_Past, empty.least, index, node.negated, empty) if empty is not _NOTHING else empty
        raise AssertionError(node)

    def _unroll(self, loop: _Loop) -> Term:
        key = (loop,)
        if (term := self._interned.get(key)) is None:
            term = self._round(loop.body, loop.low, loop.high, loop.after, loop.after)
            self._interned[key] = term
        return term

    def _round(self, body: Node, low: int, high: int | None, consumed: Term, empty: Term) -> Term:
        """One round of a loop and the rest of it, or what follows it."""
        fewer, more = max(low - 1, 0), None if high is None else high - 1
        # Only bodies that assert can be empty here: in a round that must be, they still have to hold.
        skipped = self._round(body, fewer, more, consumed, empty) if low > 0 and body.least == 0 else _NOTHING
        again = self._compile(body, self._loop(body, fewer, more, consumed), skipped) if high != 0 else _NOTHING
        return self._or([empty, again]) if low == 0 else again

    def _bytes(self, tree: ByteTree, after: Term) -> Term:
        if tree is WHOLE or after is _NOTHING:
            return after
        return self._intern(_Bytes, tree.least + after.least, tree, after)

    def _loop(self, body: Node, low: int, high: int | None, after: Term) -> Term:
        if high == 0 or after is _NOTHING:
            return after
        return self._intern(_Loop, body.least * low + after.least, body, low, high, after)

    def _or(self, terms: Iterable[Term]) -> Term:
        parts: set[Term] = set()
        for term in terms:
            inner = term.parts if isinstance(term, _Or) else {term}
            self.work += len(inner)
            parts |= inner
        if _EVERYTHING in parts:
            return _EVERYTHING
        parts.discard(_NOTHING)
        parts = self._joined(parts)
        if len(parts) < 2:
            return parts.pop() if parts else _NOTHING
        return self._intern(_Or, min(part.least for part in parts), frozenset(parts))

    def _joined(self, parts: set[Term]) -> set[Term]:
        """Counts of one loop that touch or overlap made one: ``.{0,7}`` holds ``.{0,6}``."""
        loops: dict[tuple[Node, Term], list[_Loop]] = {}
        for part in parts:
            if isinstance(part, _Loop):
                loops.setdefault((part.body, part.after), []).append(part)
        for (body, after), same in loops.items():
            if len(same) < 2:
                continue
            parts = parts - set(same)
            same.sort(key=lambda loop: loop.low)
            low, high = same[0].low, same[0].high
            for loop in same[1:]:
                if high is None or loop.low <= high + 1:
                    high = None if high is None or loop.high is None else max(high, loop.high)
                else:
                    parts.add(self._loop(body, low, high, after))
                    low, high = loop.low, loop.high
            parts.add(self._loop(body, low, high, after))
        return parts

    def _and(self, terms: Iterable[Term]) -> Term:
        parts: set[Term] = set()
        for term in terms:
            inner = term.parts if isinstance(term, _And) else {term}
            self.work += len(inner)
            parts |= inner
        if _NOTHING in parts:
            return _NOTHING
        parts.discard(_EVERYTHING)
        if len(parts) < 2:
            return parts.pop() if parts else _EVERYTHING
        return self._intern(_And, max(part.least for part in parts), frozenset(parts))

    def _not(self, term: Term) -> Term:
        if term is _NOTHING:
            return _EVERYTHING
        if term is _EVERYTHING:
            return _NOTHING
        return term.part if isinstance(term, _Not) else self._intern(_Not, 0, term)

    def _intern(self, kind: type[Term], least: int, *fields: Any) -> Term:
        key = (kind, *fields)
        if (term := self._interned.get(key)) is None:
            term = self._interned[key] = kind(least, *fields)
        return term


def _within(node: Node) -> Iterable[Node]:
    """A node and all nodes below it, but not those of look-behinds, which have an automaton of their own."""
    yield node
    match node:
        case syntax.Sequence():
            inner: tuple[Node, ...] = node.parts
        case syntax.Either():
            inner = node.options
        case syntax.Repeat() | syntax.Ahead():
            inner = (node.body,)
        case _:
            inner = ()
    for part in inner:
        yield from _within(part)
