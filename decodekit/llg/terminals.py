"""Which parts of a grammar can be terminals of llguidance, which cuts its text into terminals greedily.

A terminal is made of a regular part only where greed can do no harm, that is, where no match of it, followed by a character
that may follow it, is the beginning of a longer match of any terminal. Everything else is read character by character, which is
slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]
_MAX_STATES = 2_000
_MAX_TERMINAL = 5_000


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


def names_in(node: Node) -> Iterator[str]:
    """The rules that a part names."""
    match node:
        case Name(name):
            yield name
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from names_in(part)
        case Repeat(part) | Terminal(part):
            yield from names_in(part)


def reached(rules: dict[str, Node]) -> dict[str, Node]:
    """The rules that ``root`` leads to."""
    found = {"root": rules["root"]}
    pending = ["root"]
    while pending:
        for name in names_in(found[pending.pop()]):
            if name not in found:
                found[name] = rules[name]
                pending.append(name)
    return found


def with_terminals(rules: dict[str, Node]) -> dict[str, Node]:
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
        rules = reached(rules)
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


def is_nullable(node: Node, rules: set[str]) -> bool:
    """Whether a part may be empty, given the rules that may."""
    match node:
        case Chars():
            return False
        case Name(name):
            return name in rules
        case Sequence(parts):
            return all(is_nullable(part, rules) for part in parts)
        case Choice(parts):
            return any(is_nullable(part, rules) for part in parts)
        case Repeat(part, low):
            return low == 0 or is_nullable(part, rules)
        case Terminal(part):
            return is_nullable(part, rules)


def _first(node: Node) -> Ranges:
    """The characters that a regular part can begin with."""
    match node:
        case Chars(ranges):
            return ranges
        case Sequence(parts):
            found: list[tuple[int, int]] = []
            for part in parts:
                found += _first(part)
                if not is_nullable(part, set()):
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
    while more := {name for name, node in rules.items() if name not in empty and is_nullable(node, empty)}:
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
                    if not is_nullable(part, empty):
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
                    then = first(part) | (then if is_nullable(part, empty) else set())
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
