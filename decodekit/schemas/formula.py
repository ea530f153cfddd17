"""Schemas as Boolean formulas over assertions, each of which speaks of one JSON type and holds for every other.

A formula is in negation normal form: ``Not`` is pushed down to the assertions, which all have a dual. Subschemas of members and
items stay references, so that recursion is finite; two formulas are equal when they are built alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

TYPES = ("null", "true", "false", "number", "string", "array", "object")
"""The types of values; the two booleans are two types, each with one value."""


@dataclass(frozen=True)
class And:
    """All of the parts; none is everything."""

    parts: frozenset[Formula]


@dataclass(frozen=True)
class Or:
    """Any of the parts; none is nothing."""

    parts: frozenset[Formula]


@dataclass(frozen=True)
class Ref:
    """The schema of that number in the document, or its negation."""

    schema: int
    negated: bool = False


@dataclass(frozen=True)
class OfType:
    """The value is of one of these types."""

    types: frozenset[str]


@dataclass(frozen=True)
class Integer:
    """A number is an integer (or is none); ``plain``: as draft 4 has it, written without a point."""

    plain: bool = False
    negated: bool = False
    type = "number"


@dataclass(frozen=True)
class Bound:
    """A number is at most (at least) the bound."""

    value: Fraction
    upper: bool
    inclusive: bool
    type = "number"


@dataclass(frozen=True)
class Multiple:
    """A number is a multiple of the divisor (or is none)."""

    divisor: Fraction
    negated: bool = False
    type = "number"


@dataclass(frozen=True)
class NumberIn:
    """A number is one of these (or is none)."""

    values: frozenset[Fraction]
    negated: bool = False
    type = "number"


@dataclass(frozen=True)
class Pattern:
    """In a string, the pattern is found (or is not)."""

    pattern: str
    negated: bool = False
    type = "string"


@dataclass(frozen=True)
class Length:
    """A string has so many characters."""

    low: int
    high: int | None
    type = "string"


@dataclass(frozen=True)
class StringIn:
    """A string is one of these (or is none)."""

    values: frozenset[str]
    negated: bool = False
    type = "string"


@dataclass(frozen=True)
class EveryMember:
    """In an object, the value of every key that fits ``keys`` fits ``value``."""

    keys: Formula
    value: Formula
    type = "object"


@dataclass(frozen=True)
class SomeMember:
    """In an object, there is a key that fits ``keys`` whose value fits ``value``."""

    keys: Formula
    value: Formula
    type = "object"


@dataclass(frozen=True)
class Members:
    """An object has so many members."""

    low: int
    high: int | None
    type = "object"


@dataclass(frozen=True)
class EveryItem:
    """In an array, every item from index ``start`` to before ``stop`` fits."""

    start: int
    stop: int | None
    value: Formula
    type = "array"


@dataclass(frozen=True)
class ItemsLike:
    """In an array, so many of the items from index ``start`` on fit."""

    start: int
    value: Formula
    low: int
    high: int | None
    type = "array"


@dataclass(frozen=True)
class Items:
    """An array has so many items."""

    low: int
    high: int | None
    type = "array"


@dataclass(frozen=True)
class Distinct:
    """In an array, no two items are equal."""

    type = "array"


@dataclass(frozen=True)
class Unknown:
    """What cannot be put into a formula, so neither can its negation.

    Attributes:
        keyword: whose meaning it is.
        why: a clause that follows the keyword.
        type: the type that it speaks of; every type if ``None``.
    """

    keyword: str
    why: str
    type: str | None = None


Assertion = (
    Integer
    | Bound
    | Multiple
    | NumberIn
    | Pattern
    | Length
    | StringIn
    | EveryMember
    | SomeMember
    | Members
    | EveryItem
    | ItemsLike
    | Items
    | Distinct
    | Unknown
)
Formula = And | Or | Ref | OfType | Assertion

EVERYTHING = And(frozenset())
NOTHING = Or(frozenset())


def both(*parts: Formula) -> Formula:
    """All of the parts, flattened."""
    found: set[Formula] = set()
    for part in parts:
        if part == NOTHING:
            return NOTHING
        found |= part.parts if isinstance(part, And) else {part}
    return next(iter(found)) if len(found) == 1 else And(frozenset(found))


def either(*parts: Formula) -> Formula:
    """Any of the parts, flattened."""
    found: set[Formula] = set()
    for part in parts:
        if part == EVERYTHING:
            return EVERYTHING
        found |= part.parts if isinstance(part, Or) else {part}
    return next(iter(found)) if len(found) == 1 else Or(frozenset(found))


def outside(low: int, high: int | None) -> list[tuple[int, int | None]]:
    """The counts that are not between the two."""
    return ([(0, low - 1)] if low else []) + ([(high + 1, None)] if high is not None else [])


def negate(formula: Formula) -> Formula:
    """Everything else."""
    match formula:
        case And(parts):
            return either(*map(negate, parts))
        case Or(parts):
            return both(*map(negate, parts))
        case Ref(schema, negated):
            return Ref(schema, not negated)
        case OfType(types):
            return OfType(frozenset(TYPES) - types)
    if formula.type is None:
        return formula
    return both(OfType(frozenset({formula.type})), _dual(formula))


def _dual(assertion: Assertion) -> Formula:  # noqa: PLR0912 - one case an assertion
    match assertion:
        case Integer(plain, negated):
            return Integer(plain, not negated)
        case Bound(value, upper, inclusive):
            return Bound(value, not upper, not inclusive)
        case Multiple(divisor, negated):
            return Multiple(divisor, not negated)
        case NumberIn(values, negated):
            return NumberIn(values, not negated)
        case Pattern(pattern, negated):
            return Pattern(pattern, not negated)
        case StringIn(strings, negated):
            return StringIn(strings, not negated)
        case Length(low, high):
            return either(*(Length(*span) for span in outside(low, high)))
        case Members(low, high):
            return either(*(Members(*span) for span in outside(low, high)))
        case Items(low, high):
            return either(*(Items(*span) for span in outside(low, high)))
        case EveryMember(keys, value):
            return SomeMember(keys, negate(value))
        case SomeMember(keys, value):
            return EveryMember(keys, negate(value))
        case EveryItem(start, stop, value) if stop == start + 1:
            return both(Items(stop, None), EveryItem(start, stop, negate(value)))
        case EveryItem(start, None, value):
            return ItemsLike(start, negate(value), 1, None)
        case ItemsLike(start, value, low, high):
            return either(*(ItemsLike(start, value, *span) for span in outside(low, high)))
        case Distinct():
            return Unknown("uniqueItems", "cannot be negated", "array")
    return assertion  # what is unknown stays unknown


def one_of_values(values: Iterable[Any]) -> Formula:
    """A value equal to one of these; objects and arrays are spelled out, so that their order and spelling are free."""
    types: set[str] = set()
    numbers: set[Fraction] = set()
    strings: set[str] = set()
    others: list[Formula] = []
    for value in values:
        if value is None or isinstance(value, bool):
            types.add({None: "null", True: "true", False: "false"}[value])
        elif isinstance(value, str):
            strings.add(value)
        elif isinstance(value, int | float | Fraction):
            numbers.add(exact(value))
        elif isinstance(value, list | tuple):
            others.append(
                both(
                    OfType(frozenset({"array"})),
                    Items(len(value), len(value)),
                    *(EveryItem(place, place + 1, one_of_values([item])) for place, item in enumerate(value)),
                )
            )
        else:
            members = [SomeMember(StringIn(frozenset({key})), one_of_values([item])) for key, item in value.items()]
            rest = EveryMember(StringIn(frozenset(value), negated=True), NOTHING)
            others.append(both(OfType(frozenset({"object"})), rest, *members))
    if types:
        others.append(OfType(frozenset(types)))
    if numbers:
        others.append(both(OfType(frozenset({"number"})), NumberIn(frozenset(numbers))))
    if strings:
        others.append(both(OfType(frozenset({"string"})), StringIn(frozenset(strings))))
    return either(*others)


def exact(number: int | float | Fraction) -> Fraction:
    """The number as it is written, not as a double holds it."""
    return Fraction(repr(number)) if isinstance(number, float) else Fraction(number)
