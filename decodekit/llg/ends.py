"""How a text may be brought to its end: few bytes after which a matcher over bytes accepts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from llguidance import LLMatcher

CLOSING = frozenset(b"\"'}])>/;\n")
"""Signs that close something."""
JSON_CLOSING = frozenset(b'"]}')
MAX_VISITED = 10_000
MAX_BYTES = 4_000
MAX_WORDS = 64
BRACKETS = b")]}"
_OPENING = b"([{"
_ALIKE = 2
_FEW = 12
_VALUES = (b"0", b"[]", b"{}", b"1", b"null", b"true", b"false", b"[", b"{")


def known_end(matcher: LLMatcher, ending: bytes) -> bytes | None:
    """The longest part of ``ending`` up to its last byte that ends the text here; ``None`` where no part does."""
    parts = (ending[place:] for place in range(len(ending)))
    return next((part for part in parts if (ahead := _after(matcher, part)) is not None and ahead.is_accepting()), None)


def words_of(lark: str) -> tuple[bytes, ...]:
    """What a grammar's literals spell in several bytes, the shortest of them: keywords, above all."""
    written = (json.loads(own) for own in re.findall(r'"(?:[^"\\\x00-\x1f]|\\["\\bfnrt])*"', lark))
    return tuple(
        sorted({word.encode() for word in written if len(word) > 1}, key=lambda word: (len(word), word))[:MAX_WORDS]
    )


def closed_end(matcher: LLMatcher, words: Collection[bytes]) -> bytes | None:
    """An end that closes one bracket after another and opens none: found where it is too far away for a search as a whole.

    Args:
        matcher: the place to go on from.
        words: of the grammar.
    """
    end, goes_out = b"", partial(_goes_out, BRACKETS)
    while not matcher.is_accepting():
        step = b"" if goes_out(matcher) else searched_end(matcher, goes_out, words)
        ahead = None if step is None else _after(matcher, step)
        if step is None or ahead is None or len(end) > MAX_BYTES:
            return None
        if not ahead.is_accepting():
            step += bytes([next(sign for sign in BRACKETS if _closes(sign, ahead))])
            ahead = _after(matcher, step)
            assert ahead is not None
        matcher, end = ahead, end + step
    return end


def searched_end(
    matcher: LLMatcher, reached: Callable[[LLMatcher], bool], words: Collection[bytes] = ()
) -> bytes | None:
    """Few bytes that lead to a place that is wanted; ``None`` where a bounded search finds none.

    A search over bytes, the shortest first. Places look alike when the same bytes may come next and the same must. Of the
    bytes that lead from one look to another, two are tried; of the places that as many bytes lead to through the same three
    looks, two are followed.

    Args:
        matcher: the place to go on from.
        reached: whether a place is wanted.
        words: are tried besides single bytes, of which then none opens a bracket, and count as one, as do bytes that must
            come.
    """
    layers: list[list[tuple[bytes, LLMatcher, bytes, bytes]]] = [[(b"", matcher, b"", b"")]]
    followed: Counter[tuple[int, bytes, bytes, bytes]] = Counter()
    known: dict[bytes, list[bytes]] = {}
    visited = 0
    for far, layer in enumerate(layers):  # grows while there are ways to go on
        for path, place, look, before in layer:
            told: Counter[bytes] = Counter()
            telling = []
            forced = place.compute_ff_bytes()
            for step in [forced] if forced else known.get(look) or _steps(place.compute_bitmask(), words):
                if (ahead := _after(place, step)) is None:
                    continue
                if reached(ahead):
                    return path + step
                length = far + (1 if words else len(step))
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


class Scan(NamedTuple):
    """Where a JSON text stands.

    Attributes:
        begun: the string that has been begun, from its quote on; empty outside of strings.
        in_name: it is the name of a member.
        escaped: the next character of the string belongs to an escape.
        open: the signs that opened the containers that are still open.
        last: the last sign other than whitespace; 0 at the start.
    """

    begun: bytes = b""
    in_name: bool = False
    escaped: bool = False
    open: bytes = b""
    last: int = 0

    def read(self, text: bytes) -> Scan:
        """The place after these bytes."""
        begun, in_name, escaped, opened, last = bytearray(self.begun), self.in_name, self.escaped, self.open, self.last
        for byte in text:
            if begun:
                begun.append(byte)
                if byte == ord('"') and not escaped:
                    begun.clear()
                    in_name = False
                escaped = not escaped and byte == ord("\\")
            elif byte == ord('"'):
                begun.append(byte)
                in_name = opened.endswith(b"{") and last in b"{,"
            elif byte in b"{[":
                opened += bytes([byte])
            elif byte in b"}]":
                opened = opened[:-1]
            if byte not in b" \t\n\r":
                last = byte
        return Scan(bytes(begun), in_name, escaped, opened, last)

    @property
    def at_name(self) -> bool:
        """Whether a member may begin."""
        return not self.begun and self.open.endswith(b"{") and self.last in b"{,"

    @property
    def at_value(self) -> bool:
        """Whether a value may begin."""
        return not self.begun and self.last in b"\0:[," and not self.at_name


def json_end(matcher: LLMatcher, scan: Scan, names: tuple[str, ...]) -> bytes | None:
    """A short end of a JSON text: whatever is open is closed, and only the members that must be there are added.

    Args:
        matcher: the place to go on from.
        scan: the same place in the text.
        names: the names that an object may need, the required first.
    """
    quoted = [json.dumps(name, ensure_ascii=False).encode() for name in names]
    end = b""
    written: dict[int, set[bytes]] = {}  # by depth, so that each name is tried once an object
    while not matcher.is_accepting():
        tried = written.setdefault(len(scan.open), set())
        forced = matcher.compute_ff_bytes()
        if scan.at_name or (scan.in_name and not forced):
            known = [name[len(scan.begun) :] for name in quoted if name.startswith(scan.begun) and name not in tried]
            steps = [*known, b'"'] if scan.begun else [b"}", *known, b'"']
        elif forced:
            steps = [forced]
        elif scan.begun:
            steps = [b'"'] if not scan.escaped else []
        elif scan.at_value:
            steps = [b"]", b'""', *_VALUES]
        else:
            steps = [b"}", b"]", b","]
        step = next((step for step in steps if _after(matcher, step) is not None), None)
        if step is None:
            step = searched_end(matcher, partial(_goes_out, b'"' if scan.begun else b",}]"))
        ahead = _after(matcher, step) if step else None
        if step is None or ahead is None or len(end) > MAX_BYTES:
            return None
        matcher = ahead
        if step in b"}]":
            written.pop(len(scan.open), None)
        elif scan.at_name or scan.in_name:
            tried.add(scan.begun + step)
        end += step
        scan = scan.read(step)
    return end


def _goes_out(closes: bytes, matcher: LLMatcher) -> bool:
    """Whether the text may end, or one of these signs is legal and does not stand in a string."""
    return matcher.is_accepting() or any(_closes(sign, matcher) for sign in closes)


def _closes(sign: int, matcher: LLMatcher) -> bool:
    ahead = _after(matcher, bytes([sign]))
    return ahead is not None and (ahead.is_accepting() or not _after(ahead, b"A"))


def _after(matcher: LLMatcher, step: bytes) -> LLMatcher | None:
    ahead = matcher.deep_copy()
    return ahead if ahead.try_consume_tokens(list(step)) == len(step) else None


def _steps(mask: bytes, words: Collection[bytes]) -> list[bytes]:
    """Of the bytes that may come next those worth trying, and words: the ASCII ones, the first few where there are none."""
    legal = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
    signs = [byte for byte in legal if byte < 0x80 and not chr(byte).isalpha()]
    letters = [byte for byte in legal if byte < 0x80 and chr(byte).isalpha()]
    # What closes comes first: of places that look alike, the first are followed.
    ordered = [byte for byte in signs if byte in CLOSING]
    ordered += letters + [byte for byte in signs if byte not in CLOSING]
    steps = [bytes([byte]) for byte in ordered or legal[:_FEW]]
    if not words:
        return steps
    begun = set(legal)
    return [step for step in (*steps, *(word for word in words if word[0] in begun)) if step[-1] not in _OPENING]
