"""Objects as rules: members in any order, each name that the schema gives at most once.

A rule's parameter holds a bit for each name, for each sought member, and a counter: what has been written so far. The closing
brace is legal when all that is required is there; a comma only when another member is possible.

A name that only a pattern describes, or that finds no room in the parameter, may come again: readers take the last of equal
names, and every member fits on its own. What would not hold of the last ones alone is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import prod

from decodekit.core.errors import UnsupportedConstraint
from decodekit.schemas import patterns
from decodekit.schemas.formula import (
    NOTHING,
    EveryMember,
    Formula,
    Members,
    Ref,
    SomeMember,
    Unknown,
    both,
)
from decodekit.schemas.shapes import Shape, holds, names_in, regions, unfolded

WIDTH = 64
"""Bits of a rule's parameter."""


@dataclass(frozen=True)
class Cell:
    """Keys that are all treated alike.

    Attributes:
        terminal: of these keys, with their quotes.
        value: what every value must fit.
        finds: which of the sought members a member with such a key is.
    """

    terminal: str
    value: Formula
    finds: tuple[int, ...] = ()


@dataclass
class ObjectShape:
    """What an object may hold.

    Attributes:
        named: single names, each with what its value must fit.
        required: those of them that must be there.
        free: all other names.
        sought: how many members with free names are sought.
        low: fewest members.
        high: most members.
    """

    named: dict[str, Formula]
    required: set[str]
    free: list[Cell]
    sought: int = 0
    low: int = 0
    high: int | None = None

    def values(self) -> list[Formula]:
        """Every formula that a value may have to fit."""
        return [*self.named.values(), *(cell.value for cell in self.free)]

    def possible(self, productive: Callable[[Formula], bool]) -> bool:
        """Whether there is such an object, given which formulas have values."""
        named = {name for name, value in self.named.items() if productive(value)}
        free = any(productive(cell.value) for cell in self.free)
        if not self.required <= named or (self.high is not None and self.high < max(self.low, len(self.required))):
            return False
        if not free and len(named) < self.low:
            return False
        return all(
            any(number in cell.finds and productive(cell.value) for cell in self.free) for number in range(self.sought)
        )

    def rules(self, grammar: Grammar) -> str:  # noqa: PLR0915 - one rule after the other, each used by the next
        """The rule for such an object; helper rules go into the grammar."""
        named = {name: value for name, value in self.named.items() if grammar.productive(value)}
        free = [cell for cell in self.free if grammar.productive(cell.value)]
        others = [name for name in named if name not in self.required]
        fewest = max(self.low - len(self.required), 0)
        most = None if self.high is None else self.high - len(self.required)
        if most is not None and not free and len(others) <= most:
            most = None
        if most == 0:
            others, free, most = [], [], None
            fewest = 0
        counted = most is not None or fewest > 0
        width = max(most or 0, fewest).bit_length() if counted else 0
        bits = sorted(self.required) + (others if counted else [])
        room = WIDTH - self.sought - width
        if len(bits) > room:
            raise UnsupportedConstraint(
                f"an object has {len(bits)} names to keep track of, more than {room}",
                ["required" if not counted else "minProperties"],
            )
        bits += [name for name in others if name not in bits][: room - len(bits)]
        place = {name: number for number, name in enumerate(bits)}
        unlimited = [name for name in others if name not in place]
        if not bits and not self.sought and not counted:
            return self._plain(grammar, [*((patterns.literal(name), named[name]) for name in others)], free)
        required = len(self.required)
        flags = range(len(bits), len(bits) + self.sought)
        counter = f"[{flags.stop}:{flags.stop + width}]"
        key = grammar.fresh("o")
        rest, counted_rest = f"{key}r", f"{key}n" if counted else f"{key}r"
        within = f"lt({counter}, {most})" if most is not None else ""

        def member(terminal: str, value: Formula, then: str, *conditions: str) -> str:
            condition = _all(*conditions)
            return f"{terminal} {grammar.colon} {grammar.value(value)} {then}" + (
                f" %if {condition}" if condition else ""
            )

        members = []
        for name, number in place.items():
            terminal = grammar.terminal(f'"\\"" {patterns.literal(name)} "\\""')
            then = f"{rest if number < required else counted_rest}::set_bit({number})"
            members.append(
                member(terminal, named[name], then, f"bit_clear({number})", "" if number < required else within)
            )
        for name in unlimited:
            terminal = grammar.terminal(f'"\\"" {patterns.literal(name)} "\\""')
            members.append(member(terminal, named[name], f"{counted_rest}::_", within))
        for cell in free:
            terminal = grammar.terminal(cell.terminal)
            seen = sum(1 << flags[number] for number in cell.finds)
            then = f"{counted_rest}::{f'bit_or({seen:#x})' if seen else '_'}"
            members.append(member(terminal, cell.value, then, within))

        done = [f"is_ones([0:{required}])"] if required else []
        done += [f"bit_set({flag})" for flag in flags]

        def end(fewest: int) -> str:
            close = _all(*done, f"ge({counter}, {fewest})" if fewest > 0 else "")
            return f'""{f" %if {close}" if close else ""}'

        def more(most: int | None) -> str:
            another = f"lt({counter}, {most})" if most is not None else ""
            if not free and not unlimited:
                another = _all(f"not(is_ones([{required}:{len(bits)}]))", another) if len(bits) > required else "false"
            first = f"not(is_ones([0:{required}]))" if required else "false"
            condition = _any(*(one for one in (first, another) if one != "false"))
            return f" %if {condition}" if condition else ""

        grammar.add(f"{key}m::_", members)
        grammar.add(f"{rest}::_", [end(fewest), f"{grammar.comma} {key}m::_{more(most)}"])
        if counted:
            # What is counted is counted on the way to the next member: llguidance drops the function of a lone symbol.
            after = None if most is None else most - 1
            grammar.add(
                f"{counted_rest}::_", [end(fewest - 1), f"{grammar.comma} {key}m::incr({counter}){more(after)}"]
            )
        grammar.add(f"{key}s::_", [end(fewest), *([f"{key}m::_{more(most)}"] if members else [])])
        grammar.add(key, [f"{grammar.open_object} {key}s::0 {grammar.close_object}"])
        return key

    def _plain(self, grammar: Grammar, named: list[tuple[str, Formula]], free: list[Cell]) -> str:
        key = grammar.fresh("o")
        cells = [(f'"\\"" {terminal} "\\""', value) for terminal, value in named]
        cells += [(cell.terminal, cell.value) for cell in free]
        empty = f"{grammar.open_object} {grammar.close_object}"
        if not cells:
            grammar.add(key, [empty])
            return key
        grammar.add(
            f"{key}m", [f"{grammar.terminal(one)} {grammar.colon} {grammar.value(value)}" for one, value in cells]
        )
        grammar.add(key, [empty, f"{grammar.open_object} {key}m ({grammar.comma} {key}m)* {grammar.close_object}"])
        return key


class Grammar(ABC):
    """What the shapes of objects and arrays write their rules into."""

    comma: str
    colon: str
    open_object: str
    close_object: str
    open_array: str
    close_array: str

    @abstractmethod
    def fresh(self, prefix: str) -> str:
        """A new name of a rule."""

    @abstractmethod
    def add(self, name: str, alternatives: list[str]) -> None:
        """Define a rule."""

    @abstractmethod
    def terminal(self, body: str) -> str:
        """The name of a terminal with this body."""

    @abstractmethod
    def value(self, formula: Formula) -> str:
        """The name of the rule for the values that fit."""

    @abstractmethod
    def productive(self, formula: Formula) -> bool:
        """Whether any value fits."""


def _all(*conditions: str) -> str:
    return _nested("and", [one for one in conditions if one and one != "true"])


def _any(*conditions: str) -> str:
    return "" if "" in conditions or "true" in conditions else _nested("or", list(conditions))


def _nested(name: str, conditions: list[str]) -> str:
    if len(conditions) < 2:
        return conditions[0] if conditions else ""
    return f"{name}({conditions[0]}, {_nested(name, conditions[1:])})"


def object_shapes(  # noqa: PLR0912 - one step after the other
    shape: Shape, expand: Callable[[Ref], Formula]
) -> list[ObjectShape]:
    """What the assertions of one alternative say together; several where a sought member may have one of several names.

    Raises:
        UnsupportedConstraint: what they say cannot be written as rules.
    """
    every: list[tuple[Formula, Formula]] = []
    some: list[tuple[Formula, Formula]] = []
    low, high = 0, None
    for one in shape:
        match one:
            case EveryMember(keys, value):
                every.append((unfolded(keys, expand), value))
            case SomeMember(keys, value):
                some.append((unfolded(keys, expand), value))
            case Members(least, most):
                low = max(low, least)
                high = most if high is None else high if most is None else min(high, most)
            case Unknown(keyword, why):
                raise UnsupportedConstraint(f"the keyword {keyword!r} {why}", [keyword])
    names = sorted(set().union(*(names_in(keys) for keys, _ in every + some)))
    named = {name: both(*(value for keys, value in every if holds(keys, name, expand))) for name in names}
    cells = []
    for terminal, fits in regions([keys for keys, _ in every + some], set(names)):
        value = both(*(value for (_, value), true in zip(every, fits, strict=False) if true))
        cells.append((terminal, value, fits[len(every) :]))
    choices: list[list[str | None]] = []
    for number, (keys, _) in enumerate(some):
        candidates = [name for name in names if holds(keys, name, expand)]
        choices.append([*candidates, *([None] if any(fits[number] for _, _, fits in cells) else [])])
    results = []
    if prod(map(len, choices)) > 64:
        raise UnsupportedConstraint("too many ways to find the members that are sought", ["not"])
    for chosen in product(*choices):
        values, required = dict(named), set()
        sought: list[int] = []
        for number, name in enumerate(chosen):
            if name is None:
                sought.append(number)
            else:
                required.add(name)
                values[name] = both(values[name], some[number][1])
        if sought and high is not None:
            raise UnsupportedConstraint("maxProperties cannot be combined with a sought member", ["maxProperties"])
        free = [
            Cell(terminal, value, tuple(place for place, number in enumerate(sought) if fits[number]))
            for terminal, value, fits in cells
            if value != NOTHING
        ]
        for cell in free:
            if any(both(cell.value, some[sought[place]][1]) != cell.value for place in cell.finds):
                raise UnsupportedConstraint("a member is sought by its value, and its name may come again", ["not"])
        if free and len(required) + 1 < low <= (low if high is None else high):
            raise UnsupportedConstraint("members are counted, and their names may come again", ["minProperties"])
        results.append(ObjectShape(values, required, free, len(sought), low, high))
    return results
