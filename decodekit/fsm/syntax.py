"""Python's regular expressions as trees of a few kinds of nodes.

The parser is Python's own (``re._parser``), and ``re`` itself says which characters a class holds, so that syntax, flags,
categories and case folding are Python's by construction.
"""

from __future__ import annotations

import re
import re._compiler as sre_compiler
import re._constants as sre
import re._parser as sre_parser
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from decodekit.core.errors import InputError, UnsupportedConstraint
from decodekit.fsm.characters import ByteTree, Spans, byte_tree

MOST_POSITIONS = 100_000
NEVER = 1 << 60
"""The least length of what no text matches."""
_LAST = 0x10FFFF


@dataclass(frozen=True, eq=False)
class Node:
    """A part of a pattern.

    Attributes:
        least: the fewest bytes that it matches.
        positions: the characters it would have if its repetitions were written out.
        asserts: it looks at what is around the text it matches.
    """

    least: int
    positions: int
    asserts: bool


@dataclass(frozen=True, eq=False)
class Character(Node):
    """One character of a set."""

    tree: ByteTree


@dataclass(frozen=True, eq=False)
class Sequence(Node):
    """One after the other; without parts, the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Either(Node):
    """One of several; without options, no text at all."""

    options: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Repeat(Node):
    """``low`` to ``high`` times in a row (``None``: any number)."""

    body: Node
    low: int
    high: int | None


@dataclass(frozen=True, eq=False)
class Ahead(Node):
    """What follows begins with ``body`` (``whole``: all that follows is ``body``), or does not."""

    body: Node
    negated: bool
    whole: bool


@dataclass(frozen=True, eq=False)
class Behind(Node):
    """What came before ends with ``body`` (``whole``: all that came before is ``body``), or does not."""

    body: Node
    negated: bool
    whole: bool


def sequence(*parts: Node) -> Node:
    """``parts`` one after the other."""
    if len(parts) == 1:
        return parts[0]
    return Sequence(
        sum(part.least for part in parts),
        sum(part.positions for part in parts),
        any(part.asserts for part in parts),
        parts,
    )


def either(*options: Node) -> Node:
    """One of ``options``."""
    if len(options) == 1:
        return options[0]
    return Either(
        min((option.least for option in options), default=NEVER),
        sum(option.positions for option in options),
        any(option.asserts for option in options),
        options,
    )


def character(spans: Spans) -> Node:
    """One character of a set."""
    tree = byte_tree(spans)
    return Character(tree.least, 1, False, tree) if tree.branches else either()


def repeat(body: Node, low: int, high: int | None) -> Node:
    """``body`` from ``low`` to ``high`` times (``None``: any number)."""
    if body.least == 0 and not body.asserts:
        low = 0  # what may be empty may as well be left out
    written_out = body.positions * max(low if high is None else high, 1)
    return Repeat(body.least * low, written_out, body.asserts, body, low, high)


def ahead(body: Node, *, negated: bool = False, whole: bool = False) -> Node:
    """A look at what follows."""
    return Ahead(0, body.positions, True, body, negated, whole)


def behind(body: Node, *, negated: bool = False, whole: bool = False) -> Node:
    """A look at what came before."""
    return Behind(0, body.positions, True, body, negated, whole)


EMPTY = sequence()
ANY_CHARACTER = character(((0, _LAST),))
ANY_TEXT = repeat(ANY_CHARACTER, 0, None)


def parse(pattern: str) -> Node:
    """The tree of a Python regex.

    Raises:
        InputError: ``re`` does not take it.
        UnsupportedConstraint: it has a feature that is not regular, or is too large; names the feature.
    """
    if len(pattern) > MOST_POSITIONS:
        raise UnsupportedConstraint(
            f"regex {_cut(pattern)} has {len(pattern):,} characters, more than {MOST_POSITIONS:,}", ("size",)
        )
    try:
        re.compile(pattern)
        parsed = sre_parser.parse(pattern)
        node = _Reader(pattern).all_of(parsed, parsed.state.flags)
    except (re.error, OverflowError) as error:
        why = " ".join(str(error).split())  # it may quote a line break
        raise InputError(f"regex {_cut(pattern)} is not one of Python's: {why}") from error
    except RecursionError as error:
        raise UnsupportedConstraint(f"regex {_cut(pattern)} is nested too deeply", ("nesting",)) from error
    if node.positions > MOST_POSITIONS:
        raise UnsupportedConstraint(
            f"regex {_cut(pattern)} has {node.positions:,} characters with its repetitions written out, more than "
            f"{MOST_POSITIONS:,}; repeat less, or without a bound",
            ("repetition",),
        )
    return node


def _cut(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else f"{pattern[:80]}...")


class _Reader:
    """From the tree of ``re._parser`` to ours."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._behind = False

    def all_of(self, parsed: Any, flags: int) -> Node:
        return sequence(*(self._node(op, argument, flags) for op, argument in parsed))

    def _node(self, op: Any, argument: Any, flags: int) -> Node:
        if op in (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY):
            return character(_spans(op, tuple(argument) if op is sre.IN else argument, flags & _CHARACTER_FLAGS))
        if op is sre.SUBPATTERN:
            _, added, removed, inner = argument
            return self.all_of(inner, sre_compiler._combine_flags(flags, added, removed))
        if op is sre.BRANCH:
            return either(*(self.all_of(option, flags) for option in argument[1]))
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, inner = argument
            return repeat(self.all_of(inner, flags), low, None if high is sre.MAXREPEAT else high)
        if op in (sre.ASSERT, sre.ASSERT_NOT):
            direction, inner = argument
            return self._look(direction, inner, flags, negated=op is sre.ASSERT_NOT)
        if op is sre.AT:
            if self._behind:
                raise self._unsupported("anchor inside a look-behind")
            return _anchor(argument, flags)
        if op is sre.FAILURE:
            return either()
        raise self._unsupported(_FEATURES.get(str(op), str(op).lower()))

    def _look(self, direction: int, inner: Any, flags: int, *, negated: bool) -> Node:
        if self._behind:
            raise self._unsupported("look-around inside a look-behind")
        if direction > 0:
            return ahead(self.all_of(inner, flags), negated=negated)
        self._behind = True
        body = self.all_of(inner, flags)
        self._behind = False
        return behind(body, negated=negated)

    def _unsupported(self, feature: str) -> UnsupportedConstraint:
        return UnsupportedConstraint(
            f"regex {_cut(self._pattern)}: a {feature} cannot be made part of an automaton; write the pattern without it",
            (feature,),
        )


_FEATURES = {
    "GROUPREF": "backreference",
    "GROUPREF_EXISTS": "conditional group",
    "ATOMIC_GROUP": "atomic group",
    "POSSESSIVE_REPEAT": "possessive quantifier",
}
# Plain numbers: arithmetic on re.RegexFlag is many times slower.
_IGNORECASE, _MULTILINE = int(re.IGNORECASE), int(re.MULTILINE)
_CHARACTER_FLAGS = _IGNORECASE | int(re.ASCII | re.DOTALL | re.UNICODE)


def _anchor(at: Any, flags: int) -> Node:
    newline = character(((10, 10),))
    start, end = behind(EMPTY, whole=True), ahead(EMPTY, whole=True)
    if at is sre.AT_BEGINNING:
        return either(start, behind(newline)) if flags & _MULTILINE else start
    if at is sre.AT_BEGINNING_STRING:
        return start
    if at is sre.AT_END:
        return either(end, ahead(newline)) if flags & _MULTILINE else ahead(repeat(newline, 0, 1), whole=True)
    if at is sre.AT_END_STRING:
        return end
    word = character(_spans(sre.IN, ((sre.CATEGORY, sre.CATEGORY_WORD),), flags & _CHARACTER_FLAGS))
    inside = sequence(behind(word), ahead(word))
    outside = sequence(behind(word, negated=True), ahead(word, negated=True))
    if at is sre.AT_NON_BOUNDARY:
        if not re.fullmatch(r"\B", ""):  # before Python 3.14
            outside = sequence(outside, either(behind(ANY_CHARACTER), ahead(ANY_CHARACTER)))
        return either(inside, outside)
    return either(sequence(behind(word), ahead(word, negated=True)), sequence(behind(word, negated=True), ahead(word)))


@lru_cache(maxsize=4096)
def _spans(op: Any, argument: Any, flags: int) -> Spans:
    """The characters that one element of a pattern matches."""
    elements = argument if op is sre.IN else ((op, argument),)
    if not flags & _IGNORECASE and all(kind in (sre.LITERAL, sre.RANGE) for kind, _ in elements):
        return tuple((value, value) if kind is sre.LITERAL else value for kind, value in elements)
    state = sre_parser.State()
    state.flags = flags
    element = sre_parser.SubPattern(state, [(op, list(argument) if op is sre.IN else argument)])
    run = sre_parser.SubPattern(state, [(sre.MAX_REPEAT, (1, sre.MAXREPEAT, element))])
    text = _every_character()
    # The text has every code point but the surrogates, in order.
    return tuple(
        (ord(text[match.start()]), ord(text[match.end() - 1])) for match in sre_compiler.compile(run).finditer(text)
    )


@cache
def _every_character() -> str:
    points = np.concatenate([np.arange(0xD800), np.arange(0xE000, _LAST + 1)])
    return points.astype("<u4").tobytes().decode("utf-32-le")
