"""Arrays as rules: a prefix of items each of its own kind, then a tail; items that are counted; items that are distinct."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from decodekit.core.errors import UnsupportedConstraint
from decodekit.schemas.formula import (
    Distinct,
    EveryItem,
    Formula,
    Items,
    ItemsLike,
    Ref,
    Unknown,
    both,
    negate,
    one_of_values,
)
from decodekit.schemas.objects import WIDTH, Grammar
from decodekit.schemas.shapes import Shape

MAX_STATES = 512
State = tuple[int, ...]


@dataclass
class ArrayShape:
    """What an array may hold.

    Attributes:
        every: what the items from an index to before another must fit.
        like: what is counted: items from an index on that fit, how few and how many there may be.
        low: fewest items.
        high: most items.
        distinct: the values, of which each comes once at most; ``None`` where items may be equal.
    """

    every: list[EveryItem]
    like: list[ItemsLike]
    low: int
    high: int | None
    distinct: list[Formula] | None = None

    @property
    def prefix(self) -> int:
        """The items before the tail, which has one kind."""
        return max([0, *(one.start for one in self.every), *(one.stop or 0 for one in self.every)])

    def item(self, index: int) -> Formula:
        """What the item at an index must fit."""
        return both(*(one.value for one in self.every if one.start <= index and (one.stop is None or index < one.stop)))

    def values(self) -> list[Formula]:
        """Every formula that an item may have to fit."""
        if self.distinct is not None:
            return self.distinct
        if self.like:
            return [value for moves in self._moves().values() for value, _ in moves]
        return [self.item(index) for index in range(self.prefix + 1)]

    def possible(self, productive: Callable[[Formula], bool]) -> bool:
        """Whether there is such an array, given which formulas have values."""
        if self.high is not None and self.high < self.low:
            return False
        if self.distinct is not None:
            return len(self.distinct) >= self.low
        if self.like:
            return self._first in self._useful(productive)
        return all(productive(self.item(index)) for index in range(min(self.low, self.prefix + 1)))

    def rules(self, grammar: Grammar) -> str:
        """The rule for such an array; helper rules go into the grammar."""
        if self.distinct is not None:
            return self._distinct(grammar, self.distinct)
        if self.like:
            return self._counted(grammar)
        key = grammar.fresh("a")
        prefix = self.prefix
        high = self.high
        for index in range(prefix + 1):
            if (high is None or index < high) and not grammar.productive(self.item(index)):
                high = index
        reach = prefix if high is None else min(prefix, high)
        # From the end: what may follow the first `index` items.
        if high is not None and high <= prefix:
            rest = ""
        else:
            span = f"{{{max(self.low - prefix, 0)},{'' if high is None else high - prefix}}}"
            rest = f"({grammar.comma} {grammar.value(self.item(prefix))}){span if span != '{0,}' else '*'}"
        for index in range(reach - 1, 0, -1):
            name = f"{key}i{index}"
            body = [f"{grammar.comma} {grammar.value(self.item(index))} {rest}"]
            grammar.add(name, body if index < self.low else [*body, '""'])
            rest = name
        empty = f"{grammar.open_array} {grammar.close_array}"
        options = [] if self.low else [empty]
        if high is None or high > 0:
            if reach == 0:
                most = "" if high is None else high - 1
                span = f"{{{max(self.low - 1, 0)},{most}}}"
                more = f"({grammar.comma} {grammar.value(self.item(0))}){span if span != '{0,}' else '*'}"
                rest = "" if most == 0 else more
            options.append(f"{grammar.open_array} {grammar.value(self.item(0))} {rest} {grammar.close_array}")
        grammar.add(key, options)
        return key

    # Counted items: a state is the index (no further than it matters) and one count for each of `like`.

    @property
    def _first(self) -> State:
        return (0,) * (1 + len(self.like))

    @property
    def _last_index(self) -> int:
        return max([self.prefix, self.low, self.high or 0, *(one.start for one in self.like)])

    def _accepts(self, state: State) -> bool:
        index, *counts = state
        return index >= self.low and all(count >= one.low for count, one in zip(counts, self.like, strict=True))

    def _moves(self) -> dict[State, list[tuple[Formula, State]]]:
        moves: dict[State, list[tuple[Formula, State]]] = {}
        stack = [self._first]
        while stack:
            state = stack.pop()
            if state in moves:
                continue
            if len(moves) > MAX_STATES:
                raise UnsupportedConstraint(f"counting items takes more than {MAX_STATES} states", ["contains"])
            moves[state] = []
            index, *counts = state
            if self.high is not None and index >= self.high:
                continue
            for choice in product((False, True), repeat=len(self.like)):
                parts, after, fits = [self.item(index)], [], True
                for one, count, taken in zip(self.like, counts, choice, strict=True):
                    if taken and index < one.start:
                        fits = False
                    elif taken:
                        parts.append(one.value)
                        fits &= one.high is None or count < one.high
                    elif one.high is not None and index >= one.start:
                        parts.append(negate(one.value))
                    after.append(min(count + taken, one.low if one.high is None else one.high))
                if fits:
                    target = (min(index + 1, self._last_index), *after)
                    moves[state].append((both(*parts), target))
                    stack.append(target)
        return moves

    def _useful(self, productive: Callable[[Formula], bool]) -> set[State]:
        moves = self._moves()
        useful = {state for state in moves if self._accepts(state)}
        while True:
            more = {
                state
                for state, found in moves.items()
                if state not in useful and any(target in useful and productive(value) for value, target in found)
            }
            if not more:
                return useful
            useful |= more

    def _counted(self, grammar: Grammar) -> str:
        key = grammar.fresh("a")
        useful = self._useful(grammar.productive)
        moves = self._moves()

        def name(state: State) -> str:
            return f"{key}s{'x'.join(map(str, state))}"

        for state in useful:
            for suffix, comma in (("", f"{grammar.comma} "),) + ((("f", ""),) if state == self._first else ()):
                options = ['""'] if self._accepts(state) else []
                options += [
                    f"{comma}{grammar.value(value)} {name(target)}"
                    for value, target in moves[state]
                    if target in useful and grammar.productive(value)
                ]
                grammar.add(name(state) + suffix, options)
        grammar.add(key, [f"{grammar.open_array} {name(self._first)}f {grammar.close_array}"])
        return key

    def _distinct(self, grammar: Grammar, values: list[Formula]) -> str:
        key = grammar.fresh("a")
        bits = f"[0:{len(values)}]"
        most = min(len(values), len(values) if self.high is None else self.high)
        more = f"bit_count_lt({bits}, {most})"
        items = [
            f"{grammar.value(value)} {key}r::set_bit({place}) %if bit_clear({place})"
            for place, value in enumerate(values)
        ]
        end = f'"" %if bit_count_ge({bits}, {self.low})'
        grammar.add(f"{key}m::_", items)
        grammar.add(f"{key}r::_", [end, f"{grammar.comma} {key}m::_ %if {more}"])
        grammar.add(f"{key}s::_", [end, f"{key}m::_ %if {more}"])
        grammar.add(key, [f"{grammar.open_array} {key}s::0 {grammar.close_array}"])
        return key


def array_shape(
    shape: Shape, expand: Callable[[Ref], Formula], finite: Callable[[Formula], list[object] | None]
) -> ArrayShape:
    """What the assertions of one alternative say together.

    Args:
        shape: the assertions.
        expand: what a reference stands for.
        finite: the values that fit a formula, where they are few scalars.

    Raises:
        UnsupportedConstraint: what they say cannot be written as rules.
    """
    every = [one for one in shape if isinstance(one, EveryItem)]
    like = [one for one in shape if isinstance(one, ItemsLike) and (one.low or one.high is not None)]
    low, high = 0, None
    for one in shape:
        match one:
            case Items(least, most):
                low = max(low, least)
                high = most if high is None else high if most is None else min(high, most)
            case Unknown(keyword, why):
                raise UnsupportedConstraint(f"the keyword {keyword!r} {why}", [keyword])
    result = ArrayShape(every, sorted(like, key=repr), low, high)
    if any(isinstance(one, Distinct) for one in shape) and (high is None or high > 1):
        values = finite(result.item(0))
        if values is None or len(values) > WIDTH or like or result.prefix:
            raise UnsupportedConstraint(
                "the keyword 'uniqueItems' can be enforced only for items of one kind with few scalar values",
                ["uniqueItems"],
            )
        result.distinct = [one_of_values([value]) for value in values]
    return result
