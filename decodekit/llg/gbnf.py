"""GBNF, the grammars of llama.cpp, as Lark for llguidance, with the same language.

https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from decodekit.core.errors import InputError
from decodekit.llg.terminals import (
    Chars,
    Choice,
    Name,
    Node,
    Ranges,
    Repeat,
    Sequence,
    Terminal,
    is_nullable,
    names_in,
    reached,
    with_terminals,
)

ANY: Ranges = ((0, sys.maxunicode),)
MAX_REPEAT = 10_000
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r"}


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def wrong(self, expected: str) -> InputError:
        line = self.text.count("\n", 0, self.at) + 1
        return InputError(f"GBNF line {line}: expected {expected}, got {self.text[self.at : self.at + 20]!r}")

    def match(self, pattern: str) -> str | None:
        found = re.compile(pattern).match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return found[0]

    def space(self, lines: bool) -> None:
        self.match(r"(?:\s|#[^\n]*)*" if lines else r"(?:[ \t]|#[^\n]*)*")

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self.space(True)
        while self.at < len(self.text):
            name = self.match(r"[a-zA-Z0-9_-]+")
            self.space(False)
            if name is None or not self.match("::="):
                raise self.wrong("a rule: name ::= ...")
            self.space(True)
            found[name] = self.choice(False)
            self.space(True)
        return found

    def choice(self, inside: bool) -> Node:
        parts = [self.sequence(inside)]
        while self.ahead(r"\|", inside):
            self.space(True)
            parts.append(self.sequence(inside))
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def ahead(self, pattern: str, inside: bool) -> bool:
        """Take ``pattern`` after spaces; a line may begin with ``|``."""
        start = self.at
        self.space(True)
        if self.match(pattern):
            return True
        self.at = start
        self.space(inside)
        return False

    def sequence(self, inside: bool) -> Node:
        parts: list[Node] = []
        while (part := self.item(inside)) is not None:
            self.space(inside)
            parts.append(self.repeated(part))
            self.space(inside)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def item(self, inside: bool) -> Node | None:
        if self.match('"'):
            parts = []
            while not self.match('"'):
                point = ord(self.character())
                parts.append(Chars(((point, point),)))
            return parts[0] if len(parts) == 1 else Sequence(tuple(parts))
        if self.match(r"\["):
            return Chars(self.bracket())
        if self.match(r"\."):
            return Chars(ANY)
        if self.match(r"\("):
            self.space(True)
            part = self.choice(True)
            self.space(True)
            if not self.match(r"\)"):
                raise self.wrong("a closing )")
            return part
        if re.compile(r"[a-zA-Z0-9_-]+[ \t]*::=").match(self.text, self.at):
            if inside:
                raise self.wrong("a closing )")
            return None
        name = self.match(r"[a-zA-Z0-9_-]+")
        return None if name is None else Name(name)

    def repeated(self, part: Node) -> Node:
        while operator := self.match(r"[*+?]|\{\s*\d+\s*(,\s*\d*\s*)?\}"):
            if operator in "*+?":
                low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[operator]
            else:
                first, comma, last = operator.strip("{}").partition(",")
                low = int(first)
                high = low if not comma else int(last) if last.strip() else None
            if max(low, high or 0) > MAX_REPEAT or (high is not None and high < low):
                raise InputError(f"GBNF: a count of {operator} must be in order and at most {MAX_REPEAT}")
            part = Repeat(part, low, high)
        return part

    def bracket(self) -> Ranges:
        negated = self.match(r"\^") is not None
        ranges = []
        while not self.match(r"\]"):
            low = ord(self.character())
            dash = self.match(r"-(?!\])")
            ranges.append((low, ord(self.character()) if dash else low))
        return _others(ranges) if negated else tuple(sorted(ranges))

    def character(self) -> str:
        if found := self.match(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}"):
            return chr(int(found[2:], 16))
        if found := self.match(r"\\."):
            return _CONTROLS.get(found[1], found[1])
        if found := self.match(r"(?s)."):
            return found
        raise self.wrong("a character, not the end")


def _others(ranges: list[tuple[int, int]]) -> Ranges:
    result, start = [], 0
    for low, high in sorted(ranges):
        if start < low:
            result.append((start, low - 1))
        start = max(start, high + 1)
    return (*result, (start, sys.maxunicode))


def to_lark(text: str) -> str:
    """A GBNF grammar as Lark; its rule ``root`` is the start.

    Raises:
        InputError: it has an error, or no rule ``root``.
    """
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise InputError(f"a GBNF grammar needs a rule 'root'; this one has {', '.join(sorted(rules)) or 'none'}")
    unknown = sorted({name for node in rules.values() for name in names_in(node)} - rules.keys())
    if unknown:
        raise InputError(f"GBNF: no rule is named {', '.join(unknown)}")
    rules = with_terminals(reached(rules))
    return _Writer(rules).lark()


class _Writer:
    """Writes Lark."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self.rules = rules
        self.names = {name: f"r{number}" for number, name in enumerate(rules)}
        self.terminals: dict[str, str] = {}

    def lark(self) -> str:
        lines = [f"start: {self.names['root']}"]
        lines += [f"{self.names[name]}: {self.write(node)}" for name, node in self.rules.items()]
        lines += [f"{name}: {body}" for body, name in self.terminals.items()]
        return "\n".join(lines) + "\n"

    def write(self, node: Node) -> str:
        match node:
            case Name(name):
                return self.names[name]
            case Chars() | Terminal():
                part = node.part if isinstance(node, Terminal) else node
                empty = is_nullable(part, set())
                body = f"/{_regex(part)}/" + (" & /(?s:.+)/" if empty else "")
                name = self.terminals.setdefault(body, f"T{len(self.terminals)}")
                return f"{name}?" if empty else name
            case Sequence(parts):
                return " ".join(map(self.write, parts)) or '""'
            case Choice(parts):
                return f"({' | '.join(map(self.write, parts))})"
            case Repeat(part, low, high):
                span = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
                counted = f"{{{low},{'' if high is None else high}}}"
                return f"({self.write(part)}){span or counted}"


def _regex(node: Node) -> str:
    match node:
        case Chars(ranges):
            body = "".join(
                f"\\x{{{low:x}}}" if low == high else f"\\x{{{low:x}}}-\\x{{{high:x}}}"
                for low, high in _scalars(ranges)
            )
            return f"[{body}]"
        case Sequence(parts):
            return "".join(map(_regex, parts))
        case Choice(parts):
            return f"(?:{'|'.join(map(_regex, parts))})"
        case Repeat(part, low, high):
            return f"(?:{_regex(part)}){{{low},{'' if high is None else high}}}"
    raise AssertionError(node)


def _scalars(ranges: Ranges) -> Iterator[tuple[int, int]]:
    """The ranges without surrogates, which no text has."""
    for low, high in ranges:
        for first, last in ((0, 0xD7FF), (0xE000, sys.maxunicode)):
            if max(low, first) <= min(high, last):
                yield max(low, first), min(high, last)
