r"""Patterns over the characters of a JSON string, as terminals over the text that writes them (Lark, as llguidance reads it).

A character may be written raw or, unless it is printable ASCII other than ``"``, ``\`` and ``/``, as an escape; a terminal
holds every way to write each of its strings, so that intersection and complement of terminals are those of the strings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache

from decodekit.core.errors import UnsupportedConstraint
from decodekit.schemas.ecmascript import ANY, Chars, Choice, Edge, Look, Node, Ranges, Repeat, Sequence, parse

_SHORT = {0x22: '"', 0x5C: "\\", 0x2F: "/", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}


@cache
def written(ranges: Ranges) -> str:
    """A regular expression over the text of a JSON string, for one character of these."""
    raw = []
    for low, high in ranges:
        start = max(low, 0x20)
        for hole in (0x22, 0x5C):
            if start <= hole <= high:
                raw.append((start, hole - 1))
                start = hole + 1
        raw.append((start, high))
    body = "".join(_span(low, high) for low, high in raw if low <= high)
    parts = [f"[{body}]"] if body else []
    short = "".join(_SHORT[point] for point in _SHORT if any(low <= point <= high for low, high in ranges))
    if short:
        parts.append(r"\\[" + "".join(f"\\x{{{ord(letter):x}}}" for letter in short) + "]")
    escaped: list[tuple[int, int]] = []
    for low, high in ranges:
        for first, last in ((0, 0x1F), (0x22, 0x22), (0x2F, 0x2F), (0x5C, 0x5C), (0x7F, sys.maxunicode)):
            if max(low, first) <= min(high, last):
                escaped.append((max(low, first), min(high, last)))
    plane0 = [_hex(low, min(high, 0xFFFF), 4) for low, high in escaped if low <= 0xFFFF]
    if plane0:
        parts.append(rf"\\u(?:{'|'.join(plane0)})")
    parts += [_pairs(max(low, 0x10000), high) for low, high in escaped if high > 0xFFFF]
    return f"(?:{'|'.join(parts)})"


def _span(low: int, high: int) -> str:
    return f"\\x{{{low:x}}}" if low == high else f"\\x{{{low:x}}}-\\x{{{high:x}}}"


def _digit(low: int, high: int) -> str:
    digits = "".join(f"{value:x}{value:X}" if value > 9 else str(value) for value in range(low, high + 1))
    return digits if len(digits) == 1 else f"[{digits}]"


def _hex(low: int, high: int, width: int) -> str:
    """``width`` hexadecimal digits, in either case, of a number between the two."""
    if width == 1:
        return _digit(low, high)
    unit = 16 ** (width - 1)
    parts = []
    first, last = low // unit, high // unit
    if first == last:
        return _digit(first, first) + _hex(low % unit, high % unit, width - 1)
    if low % unit:
        parts.append(_digit(first, first) + _hex(low % unit, unit - 1, width - 1))
        first += 1
    if high % unit != unit - 1:
        parts.append(_digit(last, last) + _hex(0, high % unit, width - 1))
        last -= 1
    if first <= last:
        parts.append(_digit(first, last) + "[0-9a-fA-F]" * (width - 1))
    return f"(?:{'|'.join(parts)})"


def _pairs(low: int, high: int) -> str:
    """Escapes as surrogate pairs of the code points above the basic plane between the two."""
    low, high = low - 0x10000, high - 0x10000
    parts = []

    def add(first: int, last: int, tail: tuple[int, int]) -> None:
        head = _hex(0xD800 + first, 0xD800 + last, 4)
        parts.append(rf"\\u{head}\\u{_hex(0xDC00 + tail[0], 0xDC00 + tail[1], 4)}")

    first, last = low >> 10, high >> 10
    if first == last:
        add(first, first, (low & 1023, high & 1023))
    else:
        if low & 1023:
            add(first, first, (low & 1023, 1023))
            first += 1
        if high & 1023 != 1023:
            add(last, last, (0, high & 1023))
            last -= 1
        if first <= last:
            add(first, last, (0, 1023))
    return f"(?:{'|'.join(parts)})"


CHARACTER = written(ANY)
CONTENT = f"/{CHARACTER}*/"
NOTHING = r"/[^\x{0}-\x{10ffff}]/"


def literal(text: str) -> str:
    """A terminal for one string without its quotes."""
    return f"/{''.join(written(((ord(character),) * 2,)) for character in text)}/" if text else '""'


def bounded(low: int, high: int | None) -> str:
    """A terminal for strings of so many characters."""
    return f"/{CHARACTER}{{{low},{'' if high is None else high}}}/"


@cache
def found(pattern: str) -> str:
    """A terminal for the strings in which the pattern is found somewhere, as ECMAScript's ``test`` does.

    Raises:
        UnsupportedConstraint: it has a part that a terminal cannot hold.
    """
    node = parse(pattern)
    branches = node.parts if isinstance(node, Choice) else (node,)
    terminals = []
    for branch in branches:
        terminals.append(_ahead(branch, CONTENT, True, pattern))
        inner = _ahead(branch, CONTENT, False, pattern)
        if inner != NOTHING:
            terminals.append(f"/{CHARACTER}+/ {inner}")
    return _either(terminals)


def _either(terminals: Iterable[str]) -> str:
    kept = [terminal for terminal in dict.fromkeys(terminals) if terminal != NOTHING]
    return kept[0] if len(kept) == 1 else f"({' | '.join(kept)})" if kept else NOTHING


def _ahead(node: Node, rest: str, start: bool, pattern: str) -> str:
    """What may stand from here to the end of the string: the node, then ``rest``. ``start``: here is the string's start."""
    if not _asserts(node):
        regex = _regular(node)
        return rest if not regex else NOTHING if rest == NOTHING else f"/{regex}/ {rest}"
    match node:
        case Edge(end):
            return f'({rest} & "")' if end else (rest if start else NOTHING)
        case Look(part, negated):
            ahead = _ahead(part, CONTENT, start, pattern)
            return f"({rest} & {CONTENT} & ~({ahead}))" if negated else f"({rest} & ({ahead}))"
        case Choice(parts):
            return _either(_ahead(part, rest, start, pattern) for part in parts)
        case Sequence(parts):
            starts = [start]
            for part in parts:
                skipped = starts[-1] and not isinstance(part, Edge | Look) and _nullable(part)
                if skipped and any(map(_has_start, parts[len(starts) :])):
                    raise UnsupportedConstraint(f"the pattern {pattern!r} may have ^ after its start", ["pattern"])
                starts.append(starts[-1] and isinstance(part, Edge | Look))
            for part, begins in reversed(list(zip(parts, starts, strict=False))):
                rest = _ahead(part, rest, begins, pattern)
            return rest
    raise UnsupportedConstraint(f"the pattern {pattern!r} repeats an assertion", ["pattern"])


def _asserts(node: Node) -> bool:
    match node:
        case Chars():
            return False
        case Sequence(parts) | Choice(parts):
            return any(map(_asserts, parts))
        case Repeat(part):
            return _asserts(part)
    return True


def _has_start(node: Node) -> bool:
    match node:
        case Sequence(parts) | Choice(parts):
            return any(map(_has_start, parts))
        case Repeat(part) | Look(part):
            return _has_start(part)
        case Edge(end):
            return not end
    return False


def _nullable(node: Node) -> bool:
    match node:
        case Chars():
            return False
        case Sequence(parts):
            return all(map(_nullable, parts))
        case Choice(parts):
            return any(map(_nullable, parts))
        case Repeat(part, low):
            return low == 0 or _nullable(part)
    return True


def _regular(node: Node) -> str:
    match node:
        case Chars(ranges):
            return written(ranges) if ranges else r"[^\x{0}-\x{10ffff}]"
        case Sequence(parts):
            return "".join(map(_regular, parts))
        case Choice(parts):
            return f"(?:{'|'.join(map(_regular, parts))})"
        case Repeat(part, low, high):
            return f"(?:{_regular(part)}){{{low},{'' if high is None else high}}}"
    raise AssertionError(node)
