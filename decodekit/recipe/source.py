"""YAML, JSON or Python data to plain values that remember where each was written.

Scalars are those of the YAML 1.2 core schema: ``no``, ``on`` and ``yes`` are text, ``1e-3`` is a number. Tags,
duplicate keys, numbers that are not finite, and texts made to exhaust memory are refused: nodes are built from the
parser's events under limits of size, depth and aliases.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml
from yaml import events

from decodekit.core.errors import RecipeError, dotted
from decodekit.core.options import Written, shown
from decodekit.core.protocols import Plugin

MAX_BYTES = 1 << 20
MAX_ALIASES = 100
MAX_NODES = 20_000
MAX_DEPTH = 100
MAX_DIGITS = 64

# libyaml is an order of magnitude faster and comes with PyYAML's wheels, but not with every build of it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|[^\s{}\[\],:"]+')
_JSON_NOT_FINITE = {"NaN": ".nan", "Infinity": ".inf", "-Infinity": "-.inf"}

Key = str | int


@dataclass(frozen=True)
class Source:
    """A text of a recipe.

    Attributes:
        label: how errors call it: a path as the user would write it, ``--set a.b=c``, ``recipe`` for a dict.
        directory: where its relative paths start.
        rank: its place in the order in which texts were read.
        located: whether lines and columns mean anything to the reader.
    """

    label: str
    directory: Path
    rank: int = 0
    located: bool = True


@dataclass(frozen=True)
class Origin:
    """Where a key or value was written; lines and columns count from 1."""

    source: Source
    line: int = 1
    column: int = 1

    def __str__(self) -> str:
        return f"{self.source.label}:{self.line}:{self.column}" if self.source.located else self.source.label

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts origins as a reader meets them."""
        return self.source.rank, self.line, self.column


@dataclass(frozen=True)
class Node:
    """A value and where it was written: a scalar, a list of nodes, a dict of entries, or a plugin given from Python."""

    value: Any
    origin: Origin

    def plain(self) -> Any:
        """The value without origins; text remembers its directory (``Written``)."""
        if isinstance(self.value, dict):
            return {key: entry.node.plain() for key, entry in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return Written(self.value, self.origin.source.directory) if isinstance(self.value, str) else self.value


class Entry(NamedTuple):
    """A value of a mapping and where its key was written."""

    key_origin: Origin
    node: Node


def parse(data: bytes | str, source: Source, *, is_json: bool = False) -> Node:
    """The one document of a text.

    Raises:
        RecipeError: the text is too large, not UTF-8, not well formed, or holds what a recipe may not hold.
    """
    if len(data) > MAX_BYTES:
        _refuse(f"larger than {MAX_BYTES >> 20} MiB: a recipe is a short text", source)
    text = _decoded(data, source) if isinstance(data, bytes) else data
    if bad := _UNPRINTABLE.search(text):
        _refuse(
            f"control character {bad.group()!r}: save the file as plain UTF-8 text", source, *_place(text, bad.start())
        )
    stream = _json_events(text, source) if is_json else yaml.parse(text, Loader=_LOADER)
    try:
        return _Builder(stream, source).document()
    except RecipeError:
        raise
    except yaml.MarkedYAMLError as error:
        _refuse(_syntax(error, text), source, *_marked(error, text))
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # The parser without libyaml converts escapes and directives before it checks them.
        _refuse(f"not well formed: {error}", source)


def _refuse(message: str, source: Source, line: int = 1, column: int = 1, path: str = "") -> NoReturn:
    raise RecipeError(message, path=path, origin=str(Origin(source, line, column)))


def _place(text: str, index: int) -> tuple[int, int]:
    return text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index)


def _decoded(data: bytes, source: Source) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode()
        _refuse(
            f"not UTF-8 (byte {error.object[error.start]:#04x}): save the file as UTF-8",
            source,
            *_place(before, len(before)),
        )


def _key_fault(key: Any) -> str | None:
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return None
    return f"a key is a name or a whole number, got {'a collection' if isinstance(key, (dict, list)) else shown(key)}"


def _marked(error: yaml.MarkedYAMLError, text: str) -> tuple[int, int]:
    mark = error.problem_mark or error.context_mark
    if mark is None or mark.index >= len(text):  # libyaml ends a text in a line of its own
        return _place(text, len(text.rstrip()))
    return mark.line + 1, mark.column + 1


def _syntax(error: yaml.MarkedYAMLError, text: str) -> str:
    problem = error.problem or error.context or "not well formed"
    if error.problem_mark and text[error.problem_mark.index : error.problem_mark.index + 1] == "\t":
        return f"{problem}: a tab cannot indent, use spaces"
    if error.problem and error.context and error.context_mark:
        return f"{error.context} that begins at line {error.context_mark.line + 1}, {problem}"
    hint = "; is the line indented as those around it?" if "mapping values" in problem else ""
    return f"not well formed: {problem}{hint}"


def _json_events(text: str, source: Source) -> Iterator[Any]:
    """JSON as the events of the same document in YAML, which lacks JSON's tabs and surrogate pairs."""
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except json.JSONDecodeError as error:
        _refuse(f"not well-formed JSON: {error.msg}", source, error.lineno, error.colno)
    except RecursionError:
        _refuse(f"nested more than {MAX_DEPTH} deep", source)
    lines = [0, *(found.end() for found in re.finditer("\n", text))]
    yield events.StreamStartEvent()
    yield events.DocumentStartEvent()
    for found in _JSON_TOKEN.finditer(text):
        token, line = found.group(), bisect.bisect_right(lines, found.start()) - 1
        mark = yaml.Mark(source.label, found.start(), line, found.start() - lines[line], None, 0)
        if token in _JSON_EVENTS:
            yield _JSON_EVENTS[token](mark)
        else:
            quoted = token.startswith('"')
            value = json.loads(token) if quoted else _JSON_NOT_FINITE.get(token, token)
            yield events.ScalarEvent(None, None, (not quoted, quoted), value, mark)
    yield events.DocumentEndEvent()
    yield events.StreamEndEvent()


_JSON_EVENTS: dict[str, Any] = {
    "{": lambda mark: events.MappingStartEvent(None, None, True, mark),
    "[": lambda mark: events.SequenceStartEvent(None, None, True, mark),
    "}": events.MappingEndEvent,
    "]": events.SequenceEndEvent,
}


class _Builder:
    """Nodes from events; counts what aliases expand to, so that a small text cannot become a large recipe."""

    def __init__(self, stream: Iterator[Any], source: Source) -> None:
        self._stream, self._source = stream, source
        self._nodes = self._aliases = 0
        self._anchors: dict[str, tuple[Node, int] | None] = {}

    def document(self) -> Node:
        next(self._stream)  # the start of the stream
        if isinstance(next(self._stream), events.StreamEndEvent):
            _refuse("empty: a recipe is a mapping such as 'strategy: {kind: sample}'", self._source)
        root = self._node(next(self._stream), 0)
        next(self._stream)  # the end of the document
        if not isinstance(after := next(self._stream), events.StreamEndEvent):
            self._refuse("a second document: a recipe is one document", after)
        return root

    def _refuse(self, message: str, event: events.Event) -> NoReturn:
        raise RecipeError(message, origin=str(self._origin(event)))

    def _origin(self, event: Any) -> Origin:
        return Origin(self._source, event.start_mark.line + 1, event.start_mark.column + 1)

    def _count(self, nodes: int, event: events.Event) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            self._refuse(f"more than {MAX_NODES} values (aliases count as what they stand for)", event)

    def _node(self, event: Any, depth: int) -> Node:
        if isinstance(event, events.AliasEvent):
            return self._aliased(event)
        if event.tag is not None:
            self._refuse(f"tag {event.tag!r}: a recipe holds plain values, write them without tags", event)
        if depth > MAX_DEPTH:
            self._refuse(f"nested more than {MAX_DEPTH} deep", event)
        before = self._nodes
        self._count(1, event)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        value: Any
        if isinstance(event, events.ScalarEvent):
            value = self._scalar(event)
        elif isinstance(event, events.SequenceStartEvent):
            value = list(self._items(depth))
        else:
            value = self._mapping(depth)
        node = Node(value, self._origin(event))
        if event.anchor is not None:
            self._anchors[event.anchor] = node, self._nodes - before
        return node

    def _aliased(self, event: events.AliasEvent) -> Node:
        self._aliases += 1
        if self._aliases > MAX_ALIASES:
            self._refuse(f"more than {MAX_ALIASES} aliases", event)
        if event.anchor not in self._anchors:
            self._refuse(f"alias *{event.anchor} has no anchor &{event.anchor} before it", event)
        if (anchored := self._anchors[event.anchor]) is None:
            self._refuse(f"alias *{event.anchor} stands inside its own anchor", event)
        node, size = anchored
        self._count(size, event)
        return node

    def _items(self, depth: int) -> Iterator[Node]:
        while not isinstance(event := next(self._stream), events.SequenceEndEvent):
            yield self._node(event, depth + 1)

    def _mapping(self, depth: int) -> dict[Key, Entry]:
        entries: dict[Key, Entry] = {}
        while not isinstance(event := next(self._stream), events.MappingEndEvent):
            key, origin = self._node(event, depth + 1).value, self._origin(event)
            if message := _key_fault(key):
                self._refuse(message, event)
            if key in entries:
                first = entries[key].key_origin.line
                self._refuse(f"duplicate key {shown(key)}: line {first} has it already, keep one", event)
            entries[key] = Entry(origin, self._node(next(self._stream), depth + 1))
        return entries

    def _scalar(self, event: events.ScalarEvent) -> str | int | float | bool | None:
        text: str = event.value
        if _SURROGATE.search(text):
            self._refuse("half of a surrogate pair: write the character itself", event)
        if not event.implicit[0]:
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _NOT_FINITE.fullmatch(text):
            self._refuse(f"{text} is no number to decode with: give a finite one", event)
        whole, based = _INTEGER.fullmatch(text), _BASED.fullmatch(text)
        if not (whole or based or _FLOAT.fullmatch(text)):
            return text
        if len(text) > MAX_DIGITS:
            self._refuse(f"a number of {len(text)} characters: at most {MAX_DIGITS} are read", event)
        if whole or based:
            return int(text, 0 if based else 10)
        if not math.isfinite(number := float(text)):
            self._refuse(f"{text} is too large for a number", event)
        return number


def from_python(data: Any, source: Source) -> Node:
    """Plain Python data as a node; plugins and paths may stand in it.

    Raises:
        RecipeError: it holds something else, or more than a text may hold.
    """
    origin, count = Origin(source), 0

    def node(value: Any, path: tuple[Any, ...]) -> Node:
        nonlocal count
        count += 1
        place = dotted(path)
        if count > MAX_NODES or len(path) > MAX_DEPTH:
            _refuse(f"more than {MAX_NODES} values, or nested more than {MAX_DEPTH} deep", source)
        if isinstance(value, Mapping):
            for key in value:
                if message := _key_fault(key):
                    _refuse(message, source, path=place)
            return Node({key: Entry(origin, node(item, (*path, key))) for key, item in value.items()}, origin)
        if isinstance(value, (list, tuple)):
            return Node([node(item, (*path, index)) for index, item in enumerate(value)], origin)
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if isinstance(value, float) and not math.isfinite(value):
            _refuse(f"{value} is no number to decode with: give a finite one", source, path=place)
        if value is not None and not isinstance(value, (str, int, float, Plugin)):
            _refuse(
                f"{type(value).__name__} is no plain data: give text, numbers, lists and mappings", source, path=place
            )
        return Node(value, origin)

    return node(data, ())
