"""How a text may be brought to its end: few bytes after which a matcher over bytes accepts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial

from llguidance import LLMatcher

CLOSING = frozenset(b"\"'}])>/;\n")
"""Signs that close something."""
MAX_VISITED = 4_000
MAX_BYTES = 4_000
_ALIKE = 2
_FEW = 12
_VALUES = (b"0", b"[]", b"{}", b"1", b"null", b"true", b"false", b"[", b"{")


def searched_end(matcher: LLMatcher, reached: Callable[[LLMatcher], bool]) -> bytes | None:
    """Few bytes that lead to a place that is wanted; ``None`` where a bounded search finds none.

    A search over bytes, the shortest first. Places look alike when the same bytes may come next and the same must. Of the
    bytes that lead from one look to another, two are tried; of the places that as many bytes lead to through the same three
    looks, two are followed.
    """
    layers: list[list[tuple[bytes, LLMatcher, bytes, bytes]]] = [[(b"", matcher, b"", b"")]]
    followed: Counter[tuple[int, bytes, bytes, bytes]] = Counter()
    known: dict[bytes, list[bytes]] = {}
    visited = 0
    for layer in layers:  # grows while there are ways to go on
        for path, place, look, before in layer:
            told: Counter[bytes] = Counter()
            telling = []
            forced = place.compute_ff_bytes()
            for step in [forced] if forced else known.get(look) or _steps(place.compute_bitmask()):
                if (ahead := _after(place, step)) is None:
                    continue
                if reached(ahead):
                    return path + step
                length = len(path) + len(step)
                view = ahead.compute_bitmask() + ahead.compute_ff_bytes()
                told[view] += 1
                if told[view] <= _ALIKE:
                    telling.append(step)
                followed[length, before, look, view] += 1
                if followed[length, before, look, view] <= _ALIKE:
                    layers += [[] for _ in range(length + 1 - len(layers))]
                    layers[length].append((path + step, ahead, view, look))
                visited += 1
                if visited > MAX_VISITED:
                    return None
            known.setdefault(look, telling)
    return None


class _Scan:
    """Where a JSON text stands, byte by byte: in a string or not, and in which container."""

    def __init__(self) -> None:
        self.inside = self.escaped = False
        self.open: list[int] = []
        self.last = 0

    def read(self, text: bytes) -> None:
        for byte in text:
            if self.inside:
                self.inside = self.escaped or byte != ord('"')
                self.escaped = not self.escaped and byte == ord("\\")
            elif byte == ord('"'):
                self.inside = True
            elif byte in b"{[":
                self.open.append(byte)
            elif byte in b"}]":
                self.open.pop()
            if byte not in b" \t\n\r":
                self.last = byte

    @property
    def at_name(self) -> bool:
        return bool(self.open) and self.open[-1] == ord("{") and self.last in b"{,"

    @property
    def at_value(self) -> bool:
        return self.last in b"\0:[," and not self.at_name


def json_end(matcher: LLMatcher, text: bytes, names: tuple[str, ...]) -> bytes | None:
    """A short end of a JSON text: whatever is open is closed, and only the members that must be there are added.

    Args:
        matcher: the place after ``text``.
        text: what is there so far.
        names: the names that an object may need, the required first.
    """
    quoted = [json.dumps(name, ensure_ascii=False).encode() for name in names]
    scan = _Scan()
    scan.read(text)
    # A name that has been begun is completed first.
    begun = text[text.rfind(b'"') :] if scan.inside else b""
    steps = [name[len(begun) :] for name in quoted if begun and name.startswith(begun)]
    end = b""
    written: dict[int, set[bytes]] = {}  # by depth, so that each name is tried once an object
    while not matcher.is_accepting():
        if scan.at_name and not scan.inside:
            tried = written.setdefault(len(scan.open), set())
            steps = [b"}", *(name for name in quoted if name not in tried), b'"']
        elif forced := matcher.compute_ff_bytes():
            steps = [forced]
        elif scan.inside:
            steps += [b'"'] if not scan.escaped else []
        elif scan.at_value:
            steps = [b"]", b'""', *_VALUES]
        else:
            steps = [b"}", b"]", b","]
        step = next((step for step in steps if _after(matcher, step) is not None), None)
        if step is None:
            step = searched_end(matcher, partial(_goes_out, b'"' if scan.inside else b",}]"))
        ahead = _after(matcher, step) if step else None
        if step is None or ahead is None or len(end) > MAX_BYTES:
            return None
        matcher = ahead
        if step in b"}]":
            written.pop(len(scan.open), None)
        elif scan.at_name:
            written.setdefault(len(scan.open), set()).add(step)
        end += step
        scan.read(step)
        steps = []
    return end


def _goes_out(closes: bytes, matcher: LLMatcher) -> bool:
    """Whether the text may end, or one of these signs is legal and does not stand in a string."""
    if matcher.is_accepting():
        return True
    for sign in closes:
        ahead = _after(matcher, bytes([sign]))
        if ahead is not None and (ahead.is_accepting() or not _after(ahead, b"A")):
            return True
    return False


def _after(matcher: LLMatcher, step: bytes) -> LLMatcher | None:
    ahead = matcher.deep_copy()
    return ahead if ahead.try_consume_tokens(list(step)) == len(step) else None


def _legal(matcher: LLMatcher, signs: bytes) -> bool:
    mask = matcher.compute_bitmask()
    return any(mask[sign >> 3] >> (sign & 7) & 1 for sign in signs)


def _steps(mask: bytes) -> list[bytes]:
    """Of the bytes that may come next those worth trying, ASCII where there is any."""
    legal = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
    signs = [byte for byte in legal if byte < 0x80 and not chr(byte).isalpha()]
    letters = [byte for byte in legal if byte < 0x80 and chr(byte).isalpha()]
    # What closes comes first: of places that look alike, the first are followed.
    ordered = [byte for byte in signs if byte in CLOSING]
    ordered += letters + [byte for byte in signs if byte not in CLOSING]
    return [bytes([byte]) for byte in ordered or legal[:_FEW]]
