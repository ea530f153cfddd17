"""ECMAScript patterns as trees over the characters of a string.

Grammar of patterns: ECMA-262, section 22.2.1. Back references, look-behind and word boundaries are refused.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from decodekit.core.errors import UnsupportedConstraint

Ranges = tuple[tuple[int, int], ...]
"""Inclusive ranges of code points, sorted and disjoint."""

SURROGATES = (0xD800, 0xDFFF)
MAX_REPEAT = 100_000


@dataclass(frozen=True)
class Chars:
    """One character of a class."""

    ranges: Ranges


@dataclass(frozen=True)
class Sequence:
    """One part after another; none is the empty string."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """Any of the parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """A part, ``low`` to ``high`` times."""

    part: Node
    low: int
    high: int | None


@dataclass(frozen=True)
class Look:
    """What follows begins with the part, or does not."""

    part: Node
    negated: bool


@dataclass(frozen=True)
class Edge:
    """The start or the end of the string."""

    end: bool


Node = Chars | Sequence | Choice | Repeat | Look | Edge


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same code points, sorted and disjoint, without surrogates."""
    result: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    kept = []
    for low, high in result:
        kept += [(low, min(high, SURROGATES[0] - 1)), (max(low, SURROGATES[1] + 1), high)]
    return tuple(dict.fromkeys((low, high) for low, high in kept if low <= high))


def inverted(ranges: Ranges) -> Ranges:
    """Every other code point."""
    result, start = [], 0
    for low, high in ranges:
        result.append((start, low - 1))
        start = high + 1
    return merged([pair for pair in [*result, (start, sys.maxunicode)] if pair[0] <= pair[1]])


ANY: Ranges = merged([(0, sys.maxunicode)])
_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_SPACE: Ranges = merged(
    [
        (0x09, 0x0D),
        (0x20, 0x20),
        (0xA0, 0xA0),
        (0x1680, 0x1680),
        (0x2000, 0x200A),
        (0x2028, 0x2029),
        (0x202F, 0x202F),
        (0x205F, 0x205F),
        (0x3000, 0x3000),
        (0xFEFF, 0xFEFF),
    ]
)
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
_LONG_CATEGORIES = {"Letter": "L", "Number": "N", "Punctuation": "P", "Symbol": "S", "Mark": "M", "Separator": "Z"} | {
    "Lowercase_Letter": "Ll",
    "Uppercase_Letter": "Lu",
    "Decimal_Number": "Nd",
}


@cache
def _category(name: str) -> Ranges:
    points = (point for point in range(sys.maxunicode + 1) if unicodedata.category(chr(point)).startswith(name))
    return merged((point, point) for point in points)


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0

    def refuse(self, what: str) -> UnsupportedConstraint:
        return UnsupportedConstraint(f"the pattern {self.pattern!r} has {what} at {self.at}", ["pattern"])

    def take(self, text: str) -> bool:
        if self.pattern.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def next(self) -> str:
        if self.at >= len(self.pattern):
            raise self.refuse("an end where a character is expected")
        self.at += 1
        return self.pattern[self.at - 1]

    def parse(self) -> Node:
        node = self.choice()
        if self.at < len(self.pattern):
            raise self.refuse("an unmatched )")
        return node

    def choice(self) -> Node:
        parts = [self.sequence()]
        while self.take("|"):
            parts.append(self.sequence())
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.peek() and self.peek() not in "|)":
            parts.append(self.quantified(self.atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def quantified(self, node: Node) -> Node:
        if self.take("*"):
            low, high = 0, None
        elif self.take("+"):
            low, high = 1, None
        elif self.take("?"):
            low, high = 0, 1
        elif found := re.compile(r"\{(\d+)(,?)(\d*)\}").match(self.pattern, self.at):
            self.at = found.end()
            low = int(found[1])
            high = (int(found[3]) if found[3] else None) if found[2] else low
        else:
            return node
        self.take("?")  # laziness changes what is captured, not what is matched
        if high is not None and high < low:
            raise self.refuse("a count whose bounds are swapped")
        if max(low, high or 0) > MAX_REPEAT:
            raise self.refuse(f"a count above {MAX_REPEAT}")
        if isinstance(node, Look | Edge):
            raise self.refuse("a repeated assertion")
        return Repeat(node, low, high)

    def atom(self) -> Node:
        character = self.next()
        if character == "(":
            return self.group()
        if character == "[":
            return Chars(self.bracket())
        if character == ".":
            return Chars(inverted(_LINE_ENDS))
        if character in "^$":
            return Edge(end=character == "$")
        if character == "\\":
            if self.peek() in "bB":
                raise self.refuse("a word boundary")
            if self.peek() in "123456789k":
                raise self.refuse("a back reference")
            return Chars(self.escape())
        if character in "*+?":
            raise self.refuse("a quantifier without an operand")
        return _character(character)

    def group(self) -> Node:
        negated = False
        look = False
        if self.take("?"):
            if self.take("=") or (negated := self.take("!")):
                look = True
            elif self.take("<"):
                if self.peek() in "=!":
                    raise self.refuse("a look-behind")
                while self.next() != ">":
                    pass
            elif not self.take(":"):
                raise self.refuse("an unknown group")
        node = self.choice()
        if not self.take(")"):
            raise self.refuse("an unclosed (")
        return Look(node, negated) if look else node

    def bracket(self) -> Ranges:
        negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            low = self.member()
            if self.peek() == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("]", "") and _single(low):
                self.at += 1
                high = self.member()
                if _single(high):
                    if high[0][0] < low[0][0]:
                        raise self.refuse("a class range whose ends are swapped")
                    ranges.append((low[0][0], high[0][0]))
                    continue
                ranges += [(0x2D, 0x2D), *high]
            ranges += low
        return inverted(merged(ranges)) if negated else merged(ranges)

    def member(self) -> Ranges:
        character = self.next()
        if character != "\\":
            return ((ord(character), ord(character)),)
        if self.take("b"):
            return ((0x08, 0x08),)
        return self.escape()

    def escape(self) -> Ranges:
        character = self.next()
        if character.lower() in _CLASSES:
            ranges = _CLASSES[character.lower()]
            return ranges if character.islower() else inverted(ranges)
        if character in "pP" and self.take("{"):
            end = self.pattern.find("}", self.at)
            name = self.pattern[self.at : end].removeprefix("General_Category=").removeprefix("gc=")
            ranges = _category(_LONG_CATEGORIES.get(name, name)) if end >= 0 else ()
            if not ranges:
                raise self.refuse(f"a property {name!r} that is no general category")
            self.at = end + 1
            return ranges if character == "p" else inverted(ranges)
        if character in _CONTROLS:
            return ((_CONTROLS[character],) * 2,)
        if character == "c":
            point = ord(self.next()) % 32
            return ((point, point),)
        for prefix, form in (("x", r"([0-9a-fA-F]{2})"), ("u", r"([0-9a-fA-F]{4})"), ("u", r"\{([0-9a-fA-F]+)\}")):
            if character == prefix and (found := re.compile(form).match(self.pattern, self.at)):
                self.at = found.end()
                point = int(found[1], 16)
                low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self.pattern, self.at)
                if 0xD800 <= point < 0xDC00 and low:
                    self.at = low.end()
                    point = 0x10000 + ((point - 0xD800) << 10) + int(low[1], 16) - 0xDC00
                return ((point, point),)
        return ((ord(character), ord(character)),)


def _character(character: str) -> Chars:
    return Chars(((ord(character), ord(character)),))


def _single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


@cache
def parse(pattern: str) -> Node:
    """The parts of a pattern.

    Raises:
        UnsupportedConstraint: it is no pattern, or has a part that no finite automaton can match.
    """
    return _Parser(pattern).parse()


@cache
def matcher(pattern: str) -> re.Pattern[str]:
    """The same pattern for Python's ``re``, to search single strings with."""

    def text(node: Node) -> str:
        match node:
            case Chars(ranges):
                body = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)
                return f"[{body}]" if body else "(?!)"
            case Sequence(parts):
                return "".join(map(text, parts))
            case Choice(parts):
                return f"(?:{'|'.join(map(text, parts))})"
            case Repeat(part, low, high):
                return f"(?:{text(part)}){{{low},{'' if high is None else high}}}"
            case Look(part, negated):
                return f"(?{'!' if negated else '='}{text(part)})"
            case Edge(end):
                return r"\Z" if end else r"\A"

    return re.compile(text(parse(pattern)))
