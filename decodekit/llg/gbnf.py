"""GBNF, the grammars of llama.cpp, as Lark for llguidance, with the same language.

llguidance cuts its text into terminals greedily, GBNF has no terminals: a terminal is made of a regular part only where greed
can do no harm, that is, where no match of it, followed by a character that may follow it, is the beginning of a longer match
of any terminal. Everything else is read character by character, which is slower.

https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from decodekit.core.errors import InputError

Ranges = tuple[tuple[int, int], ...]
ANY: Ranges = ((0, sys.maxunicode),)
MAX_REPEAT = 10_000
_MAX_STATES = 2_000
_MAX_TERMINAL = 5_000
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r"}


@dataclass(frozen=True)
class Chars:
    """One character."""

    ranges: Ranges


@dataclass(frozen=True)
class Name:
    """A rule."""

    name: str


@dataclass(frozen=True)
class Sequence:
    """One part after another; none is the empty text."""

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
class Terminal:
    """A regular part that is matched as one."""

    part: Node


Node = Chars | Name | Sequence | Choice | Repeat | Terminal


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
    unknown = sorted({name for node in rules.values() for name in _names(node)} - rules.keys())
    if unknown:
        raise InputError(f"GBNF: no rule is named {', '.join(unknown)}")
    rules = _with_terminals(_reached(rules))
    return _Writer(rules).lark()


def _names(node: Node) -> Iterator[str]:
    match node:
        case Name(name):
            yield name
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from _names(part)
        case Repeat(part) | Terminal(part):
            yield from _names(part)


def _reached(rules: dict[str, Node]) -> dict[str, Node]:
    found = {"root": rules["root"]}
    pending = ["root"]
    while pending:
        for name in _names(found[pending.pop()]):
            if name not in found:
                found[name] = rules[name]
                pending.append(name)
    return found


def _with_terminals(rules: dict[str, Node]) -> dict[str, Node]:
    """The rules with regular parts made terminals, as many as are safe."""
    plain: dict[str, Node] = {}

    def regular(node: Node, inside: tuple[str, ...]) -> Node | None:
        match node:
            case Chars():
                return node
            case Name(name):
                return None if name in inside else regular(rules[name], (*inside, name))
            case Sequence(parts) | Choice(parts):
                found = [regular(part, inside) for part in parts]
                return None if None in found else type(node)(tuple(part for part in found if part is not None))
            case Repeat(part, low, high):
                one = regular(part, inside)
                return None if one is None else Repeat(one, low, high)
        return None

    for name, node in rules.items():
        if (whole := regular(node, (name,))) is not None and _size(whole) <= _MAX_TERMINAL:
            plain[name] = whole

    def marked(node: Node) -> Node:
        whole = regular(node, ())
        if whole is not None and _size(whole) <= _MAX_TERMINAL:
            return Terminal(whole) if _first(whole) else node
        match node:
            case Sequence(parts):
                result: list[Node] = []
                for part in map(marked, parts):
                    # Literals side by side are one terminal.
                    if result and isinstance(part, Terminal) and isinstance(result[-1], Terminal):
                        result[-1] = Terminal(Sequence((result[-1].part, part.part)))
                    else:
                        result.append(part)
                return Sequence(tuple(result))
            case Choice(parts):
                return Choice(tuple(map(marked, parts)))
            case Repeat(part, low, high):
                return Repeat(marked(part), low, high)
        return node

    rules = {name: marked(node) for name, node in rules.items()}
    while True:
        rules = _reached(rules)
        unsafe = _unsafe(rules)
        if not unsafe:
            return rules
        rules = {name: _split(node, unsafe) for name, node in rules.items()}


def _size(node: Node) -> int:
    match node:
        case Sequence(parts) | Choice(parts):
            return sum(map(_size, parts))
        case Repeat(part, low, high):
            return _size(part) * max(low, high or 1, 1)
    return 1


def _split(node: Node, unsafe: set[Terminal]) -> Node:
    """The same with unsafe terminals taken apart by one level."""
    match node:
        case Terminal(part) if node in unsafe:
            return _opened(part)
        case Sequence(parts) | Choice(parts):
            return type(node)(tuple(_split(part, unsafe) for part in parts))
        case Repeat(part, low, high):
            return Repeat(_split(part, unsafe), low, high)
    return node


def _opened(node: Node) -> Node:
    match node:
        case Sequence(parts) | Choice(parts):
            return type(node)(tuple(Terminal(part) if _first(part) else part for part in parts))
        case Repeat(part, low, high):
            return Repeat(Terminal(part) if _first(part) else part, low, high)
    return node


def _nullable(node: Node, rules: set[str]) -> bool:
    match node:
        case Chars():
            return False
        case Name(name):
            return name in rules
        case Sequence(parts):
            return all(_nullable(part, rules) for part in parts)
        case Choice(parts):
            return any(_nullable(part, rules) for part in parts)
        case Repeat(part, low):
            return low == 0 or _nullable(part, rules)
        case Terminal(part):
            return _nullable(part, rules)


def _first(node: Node) -> Ranges:
    """The characters that a regular part can begin with."""
    match node:
        case Chars(ranges):
            return ranges
        case Sequence(parts):
            found: list[tuple[int, int]] = []
            for part in parts:
                found += _first(part)
                if not _nullable(part, set()):
                    break
            return tuple(found)
        case Choice(parts):
            return tuple(pair for part in parts for pair in _first(part))
        case Repeat(part) | Terminal(part):
            return _first(part)
    return ()


def _unsafe(rules: dict[str, Node]) -> set[Terminal]:
    """Terminals that greed would match too far; of a pair, the one that can be taken apart."""
    following = _following(rules)
    terminals = list(following)
    machines = {terminal: _Machine(terminal.part) for terminal in terminals}
    found: set[Terminal] = set()
    for one in terminals:
        for other in terminals:
            if one in found or other in found:
                continue
            if following[one] and _extends(machines[one], machines[other], following[one]):
                found.add(other if isinstance(one.part, Chars) else one)
    return found


def _following(rules: dict[str, Node]) -> dict[Terminal, list[tuple[int, int]]]:
    """Of each terminal, the characters that can come right after it."""
    empty: set[str] = set()
    while more := {name for name, node in rules.items() if name not in empty and _nullable(node, empty)}:
        empty |= more
    firsts: dict[str, set[tuple[int, int]]] = {name: set() for name in rules}

    def first(node: Node) -> set[tuple[int, int]]:
        match node:
            case Name(name):
                return firsts[name]
            case Sequence(parts):
                found: set[tuple[int, int]] = set()
                for part in parts:
                    found |= first(part)
                    if not _nullable(part, empty):
                        break
                return found
            case Choice(parts):
                return set().union(*map(first, parts))
            case Repeat(part):
                return first(part)
        return set(_first(node))

    changed = True
    while changed:
        changed = False
        for name, node in rules.items():
            found = first(node)
            if not found <= firsts[name]:
                firsts[name] |= found
                changed = True
    after: dict[str, set[tuple[int, int]]] = {name: set() for name in rules}
    result: dict[Terminal, set[tuple[int, int]]] = {}

    def visit(node: Node, then: set[tuple[int, int]]) -> None:
        match node:
            case Name(name):
                after[name] |= then
            case Terminal():
                result.setdefault(node, set()).update(then)
            case Sequence(parts):
                for part in reversed(parts):
                    visit(part, then)
                    then = first(part) | (then if _nullable(part, empty) else set())
            case Choice(parts):
                for part in parts:
                    visit(part, then)
            case Repeat(part, _, high):
                visit(part, then | (first(part) if high != 1 else set()))

    while True:
        size = sum(map(len, after.values())) + sum(map(len, result.values()))
        for name, node in rules.items():
            visit(node, set(after[name]))
        if size == sum(map(len, after.values())) + sum(map(len, result.values())):
            return {terminal: sorted(ranges) for terminal, ranges in result.items()}


class _Machine:
    """A nondeterministic automaton of a regular part (Thompson)."""

    def __init__(self, node: Node) -> None:
        self.moves: list[list[tuple[Ranges, int]]] = []
        self.jumps: list[list[int]] = []
        start = self._state()
        self.final = self._build(node, start)
        self.start = self.closed({start})

    def _state(self) -> int:
        self.moves.append([])
        self.jumps.append([])
        return len(self.moves) - 1

    def _build(self, node: Node, at: int) -> int:
        match node:
            case Chars(ranges):
                end = self._state()
                self.moves[at].append((ranges, end))
                return end
            case Sequence(parts):
                for part in parts:
                    at = self._build(part, at)
                return at
            case Choice(parts):
                end = self._state()
                for part in parts:
                    begin = self._state()
                    self.jumps[at].append(begin)
                    self.jumps[self._build(part, begin)].append(end)
                return end
            case Repeat(part, low, high):
                for _ in range(low):
                    at = self._build(part, at)
                if high is None:
                    loop = self._state()
                    self.jumps[at].append(loop)
                    self.jumps[self._build(part, loop)].append(loop)
                    return loop
                end = self._state()
                self.jumps[at].append(end)
                for _ in range(high - low):
                    at = self._build(part, at)
                    self.jumps[at].append(end)
                return end
        raise AssertionError(node)

    def closed(self, states: set[int]) -> frozenset[int]:
        found = set(states)
        pending = list(states)
        while pending:
            for state in self.jumps[pending.pop()]:
                if state not in found:
                    found.add(state)
                    pending.append(state)
        return frozenset(found)

    def step(self, states: frozenset[int], point: int) -> frozenset[int]:
        return self.closed(
            {
                target
                for state in states
                for ranges, target in self.moves[state]
                if any(low <= point <= high for low, high in ranges)
            }
        )

    def edges(self, states: frozenset[int]) -> list[tuple[int, int]]:
        return [pair for state in states for ranges, _ in self.moves[state] for pair in ranges]


def _extends(one: _Machine, other: _Machine, following: list[tuple[int, int]]) -> bool:
    """Whether a match of ``one`` and a character that may follow it is the beginning of a match of ``other``."""
    seen = {(one.start, other.start)}
    pending = list(seen)
    while pending:
        left, right = pending.pop()
        ahead = other.edges(right)
        matched = one.final in left and (left, right) != (one.start, other.start)
        if matched and any(low <= last and first <= high for low, high in ahead for first, last in following):
            return True
        for point in {low for low, _ in [*one.edges(left), *ahead]}:
            pair = (one.step(left, point), other.step(right, point))
            if pair[0] and pair[1] and pair not in seen:
                if len(seen) > _MAX_STATES:
                    return True
                seen.add(pair)
                pending.append(pair)
    return False


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
                empty = _nullable(part, set())
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
