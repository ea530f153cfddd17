"""From formulas to what one type's values look like: alternatives, each a set of assertions that hold together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import reduce
from itertools import product
from math import ceil, floor, gcd, lcm

from decodekit.core.errors import UnsupportedConstraint
from decodekit.schemas import numbers, patterns
from decodekit.schemas.ecmascript import matcher
from decodekit.schemas.formula import (
    And,
    Assertion,
    Bound,
    Formula,
    Integer,
    Length,
    Multiple,
    NumberIn,
    OfType,
    Or,
    Pattern,
    Ref,
    StringIn,
    Unknown,
    both,
    either,
    outside,
)

MAX_ALTERNATIVES = 256
Shape = frozenset[Assertion]


class TooMany(UnsupportedConstraint):
    """More alternatives than are worth trying."""


def alternatives(formula: Formula, kind: str, expand: Callable[[Ref], Formula]) -> list[Shape]:
    """The disjunctive normal form of a formula for values of one type.

    Raises:
        UnsupportedConstraint: it has too many alternatives, or a reference that leads back to itself in place.
    """

    def visit(part: Formula, inside: tuple[Ref, ...]) -> list[Shape]:
        match part:
            case OfType(types):
                return [frozenset()] if kind in types else []
            case Ref():
                if part in inside:
                    raise UnsupportedConstraint("a $ref that leads back to itself in place describes nothing", ["$ref"])
                return visit(expand(part), (*inside, part))
            case Or(parts):
                return _absorbed([shape for one in parts for shape in visit(one, inside)])
            case And(parts):
                if any(isinstance(one, OfType) and kind not in one.types for one in parts):
                    return []
                found = sorted((visit(one, inside) for one in parts), key=len)
                return reduce(_joined, found, [frozenset()])
        return [frozenset({part})] if part.type in (kind, None) else [frozenset()]

    return visit(formula, ())


def _joined(left: list[Shape], right: list[Shape]) -> list[Shape]:
    if len(left) * len(right) > MAX_ALTERNATIVES**2:
        raise TooMany("the schema has too many combinations of alternatives", ["anyOf"])
    return _absorbed([one | other for one, other in product(left, right)])


def _absorbed(shapes: list[Shape]) -> list[Shape]:
    """Without those that another one contains."""
    kept: list[Shape] = []
    for shape in sorted(set(shapes), key=lambda one: (len(one), sorted(map(repr, one)) if len(shapes) < 50 else ())):
        if not any(other <= shape for other in kept):
            kept.append(shape)
    if len(kept) > MAX_ALTERNATIVES:
        raise TooMany("the schema has too many combinations of alternatives", ["anyOf"])
    return kept


def holds(formula: Formula, text: str, expand: Callable[[Ref], Formula]) -> bool:
    """Whether a string fits."""
    match formula:
        case And(parts):
            return all(holds(part, text, expand) for part in parts)
        case Or(parts):
            return any(holds(part, text, expand) for part in parts)
        case Ref():
            return holds(expand(formula), text, expand)
        case OfType(types):
            return "string" in types
        case StringIn(values, negated):
            return (text in values) != negated
        case Pattern(pattern, negated):
            return (matcher(pattern).search(text) is not None) != negated
        case Length(low, high):
            return low <= len(text) and (high is None or len(text) <= high)
        case Unknown(keyword, why, kind) if kind in ("string", None):
            raise UnsupportedConstraint(f"the keyword {keyword!r} {why}", [keyword])
    return True


def string_terminal(shape: Shape) -> str | None:
    """The strings that fit all assertions, quotes and all; ``None`` if there are surely none.

    Raises:
        UnsupportedConstraint: an assertion cannot be enforced.
    """
    within = [one for one in shape if isinstance(one, StringIn) and not one.negated]
    if within:
        rest = shape - set(within)
        values = frozenset.intersection(*(one.values for one in within))
        fitting = sorted(text for text in values if all(holds(one, text, _no_reference) for one in rest))
        return f'"\\"" ({" | ".join(map(patterns.literal, fitting))}) "\\""' if fitting else None
    parts = []
    low, high = 0, None
    for one in shape:
        match one:
            case Length(least, most):
                low = max(low, least)
                high = most if high is None else high if most is None else min(high, most)
            case Pattern(pattern, negated):
                parts.append(f"~({patterns.found(pattern)})" if negated else f"({patterns.found(pattern)})")
            case StringIn(values):
                parts.append(f"~({' | '.join(map(patterns.literal, sorted(values)))})")
            case Unknown(keyword, why):
                raise UnsupportedConstraint(f"the keyword {keyword!r} {why}", [keyword])
    if high is not None and high < low:
        return None
    if low or high is not None:
        parts.append(patterns.bounded(low, high))
    elif not parts or all(part.startswith("~") for part in parts):
        parts.append(patterns.CONTENT)
    return f'"\\"" ({" & ".join(sorted(parts))}) "\\""'


def number_terminal(shape: Shape) -> str | None:
    """The numbers that fit all assertions; ``None`` if there are surely none.

    Raises:
        UnsupportedConstraint: an assertion cannot be enforced.
    """
    within = [one for one in shape if isinstance(one, NumberIn) and not one.negated]
    if within:
        values = frozenset.intersection(*(one.values for one in within))
        plain = any(isinstance(one, Integer) and one.plain for one in shape)
        fitting = sorted(value for value in values if all(_fits(one, value) for one in shape))
        terminals = [f"/{value}/" if plain and value.denominator == 1 else numbers.exactly(value) for value in fitting]
        return " | ".join(terminals) or None
    if _none_between(shape):
        return None
    parts: list[str] = []
    for one in shape:
        match one:
            case Integer(plain, negated):
                parts.append(f"{'~' * negated}{numbers.PLAIN_INTEGER if plain else numbers.INTEGER}")
            case Bound(value, upper, inclusive):
                parts.append(numbers.at_most(value, inclusive) if upper else numbers.at_least(value, inclusive))
            case Multiple(divisor, negated):
                parts.append(f"{'~' * negated}{numbers.multiple_of(divisor)}")
            case NumberIn(values):
                parts.append(f"~({' | '.join(map(numbers.exactly, sorted(values)))})")
            case Unknown(keyword, why):
                raise UnsupportedConstraint(f"the keyword {keyword!r} {why}", [keyword])
    if not parts or all(part.startswith("~") for part in parts) or any(part.startswith("(") for part in parts):
        parts.append(numbers.NUMBER)
    return " & ".join(sorted(parts))


def _none_between(shape: Shape) -> bool:
    """Whether the bounds leave no number, or none of the multiples that are asked for."""
    low, high = None, None
    for one in shape:
        if isinstance(one, Bound) and one.upper:
            high = min(high or (one.value, one.inclusive), (one.value, one.inclusive))
        elif isinstance(one, Bound):
            low = max(low or (one.value, not one.inclusive), (one.value, not one.inclusive))
    if low is None or high is None:
        return False
    steps = [Fraction(1) for one in shape if isinstance(one, Integer) and not one.negated]
    steps += [one.divisor for one in shape if isinstance(one, Multiple) and not one.negated]
    (least, open_below), (most, closed_above) = low, high
    if not steps:
        return least > most or (least == most and (open_below or not closed_above))
    step = reduce(
        lambda one, other: Fraction(lcm(one.numerator, other.numerator), gcd(one.denominator, other.denominator)), steps
    )
    first = ceil(least / step) + (open_below and (least / step).denominator == 1)
    last = floor(most / step) - (not closed_above and (most / step).denominator == 1)
    return first > last


def _fits(assertion: Assertion, value: Fraction) -> bool:
    match assertion:
        case Integer(_, negated):
            return (value.denominator == 1) != negated
        case Bound(bound, upper, inclusive):
            return (value == bound and inclusive) or (value < bound if upper else value > bound)
        case Multiple(divisor, negated):
            return ((value / divisor).denominator == 1) != negated
        case NumberIn(values, negated):
            return (value in values) != negated
        case Unknown(keyword, why):
            raise UnsupportedConstraint(f"the keyword {keyword!r} {why}", [keyword])
    return True


def _no_reference(ref: Ref) -> Formula:
    raise AssertionError(ref)


def names_in(formula: Formula) -> set[str]:
    """The strings that a formula mentions."""
    match formula:
        case And(parts) | Or(parts):
            return set().union(*map(names_in, parts))
        case StringIn(values):
            return set(values)
    return set()


def unfolded(formula: Formula, expand: Callable[[Ref], Formula]) -> Formula:
    """The same for strings, without references."""
    shapes = alternatives(formula, "string", expand)
    return either(*(both(*shape) for shape in shapes))


def regions(keys: list[Formula], names: set[str]) -> Iterator[tuple[str, tuple[bool, ...]]]:
    """Every set of keys other than ``names`` that the formulas do not tell apart: its terminal, and which formulas it fits.

    Raises:
        UnsupportedConstraint: too many patterns, or one that cannot be enforced.
    """
    tests = sorted({test for one in keys for test in _tests(one)}, key=repr)
    if len(tests) > 6:
        raise UnsupportedConstraint(f"{len(tests)} patterns of keys are more than 6", ["patternProperties"])
    for chosen in product((True, False), repeat=len(tests)):
        truth = dict(zip(tests, chosen, strict=True))
        shape = {test if true else _opposite(test) for test, true in truth.items()}
        if names:
            shape.add(StringIn(frozenset(names), negated=True))
        fits = tuple(_judged(one, truth) for one in keys)
        if terminal := string_terminal(frozenset(shape)):
            yield terminal, fits


def _tests(formula: Formula) -> set[Assertion]:
    match formula:
        case And(parts) | Or(parts):
            return set().union(*map(_tests, parts))
        case Pattern(pattern):
            return {Pattern(pattern)}
        case Length():
            return {formula}
        case Unknown(keyword, why):
            raise UnsupportedConstraint(f"the keyword {keyword!r} {why}", [keyword])
    return set()


def _opposite(test: Assertion) -> Assertion:
    # Lengths come one-sided, from minLength or maxLength, so that there is one span outside.
    if isinstance(test, Length):
        return Length(*outside(test.low, test.high)[0])
    assert isinstance(test, Pattern)
    return Pattern(test.pattern, True)


def _judged(formula: Formula, truth: dict[Assertion, bool]) -> bool:
    match formula:
        case And(parts):
            return all(_judged(part, truth) for part in parts)
        case Or(parts):
            return any(_judged(part, truth) for part in parts)
        case Pattern(pattern, negated):
            return truth[Pattern(pattern)] != negated
        case Length():
            return truth[formula]
        case StringIn(_, negated):
            return negated
        case OfType(types):
            return "string" in types
    return True
