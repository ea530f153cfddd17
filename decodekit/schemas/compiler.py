"""A JSON Schema as a grammar in llguidance's Lark, any order of keys and every way to write a number or a string included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from decodekit.core.errors import InputError, UnsupportedConstraint
from decodekit.schemas.arrays import ArrayShape, array_shape
from decodekit.schemas.drafts import draft_of
from decodekit.schemas.formula import (
    Formula,
    NumberIn,
    StringIn,
    Unknown,
    both,
)
from decodekit.schemas.objects import Grammar, ObjectShape, object_shapes
from decodekit.schemas.shapes import (
    Shape,
    alternatives,
    holds,
    number_terminal,
    string_terminal,
)
from decodekit.schemas.translate import Translator

Whitespace = Literal["compact", "spaces", "indented"]
_SPACING = {
    # comma, colon, opening, closing; every span of whitespace is bounded, so that greedy decoding cannot stay in one
    "compact": (r"/,/", r"/:/", "", ""),
    "spaces": (r"/, ?/", r"/: ?/", "", ""),
    "indented": (r"/,(\n {0,64}| ?)/", r"/: ?/", r"(\n {0,64})?", r"(\n {0,64})?"),
}
MAX_RULES = 5_000
MAX_DEPTH = 3
_LITERALS = ("null", "true", "false")


@dataclass
class Symbol:
    """The values of one formula: plain bodies, objects and arrays."""

    name: str
    bodies: list[str]
    objects: list[ObjectShape]
    arrays: list[ArrayShape]

    @property
    def shapes(self) -> list[ObjectShape | ArrayShape]:
        """Objects and arrays."""
        return [*self.objects, *self.arrays]


class SchemaGrammar(Grammar):
    """Compiles one document.

    Args:
        document: the schema.
        draft: one of ``drafts.DRAFTS``, or ``None`` to tell it from the document.
        whitespace: what may stand between tokens.
        assert_format: see ``Translator``.
        relax: leave out what cannot be enforced and name it in ``relaxed``; otherwise it is refused.
        empty: whether a terminal matches nothing.
    """

    def __init__(
        self,
        document: Any,
        *,
        draft: str | None = None,
        whitespace: Whitespace = "spaces",
        assert_format: bool | None = None,
        relax: bool = False,
        empty: Callable[[str], bool],
    ) -> None:
        self.relaxed: list[str] = []
        self._relax = relax
        self._empty = empty
        self._rules: dict[str, list[str]] = {}
        self._terminals: dict[str, str] = {}
        self._symbols: dict[Formula, Symbol] = {}
        self._productive: set[Formula] = set()
        self._count = 0
        self._translator = Translator(
            document, draft or draft_of(document), assert_format=assert_format, disjoint=self._disjoint
        )
        comma, colon, opening, closing = _SPACING[whitespace]
        self.comma, self.colon = self.terminal(comma), self.terminal(colon)
        self.open_object, self.close_object = self.terminal(rf"/\{{{opening}/"), self.terminal(rf"/{closing}\}}/")
        self.open_array, self.close_array = self.terminal(rf"/\[{opening}/"), self.terminal(rf"/{closing}\]/")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of members that the rules mention, the required first."""
        shapes = [shape for symbol in self._symbols.values() for shape in symbol.objects]
        required = [name for shape in shapes for name in sorted(shape.required)]
        return tuple(dict.fromkeys([*required, *(name for shape in shapes for name in shape.named)]))

    @cached_property
    def lark(self) -> str:
        """The grammar's text.

        Raises:
            UnsupportedConstraint: the schema has a part that cannot be enforced.
            InputError: no value fits the schema.
        """
        root = self._translator.root
        self._explore(root)
        self._settle()
        if not self.productive(root):
            raise InputError("no value fits this schema: its parts contradict each other")
        reached: list[Formula] = [root]
        for formula in reached:  # grows while the rules name further formulas
            symbol = self._symbols[formula]
            self._wanted: list[Formula] = []
            bodies = [*symbol.bodies]
            bodies += [shape.rules(self) for shape in symbol.objects if shape.possible(self.productive)]
            bodies += [shape.rules(self) for shape in symbol.arrays if shape.possible(self.productive)]
            self.add(symbol.name, bodies)
            reached += [one for one in dict.fromkeys(self._wanted) if one not in reached]
        lines = [f"start: {self._symbols[root].name}"]
        lines += [f"{name}: {' | '.join(options)}" for name, options in self._rules.items()]
        lines += [f"{name}: {body}" for body, name in self._terminals.items()]
        return "\n".join(lines) + "\n"

    # Grammar

    def fresh(self, prefix: str) -> str:  # noqa: D102
        self._count += 1
        return f"{prefix}{self._count}"

    def add(self, name: str, alternatives: list[str]) -> None:  # noqa: D102
        if len(self._rules) > MAX_RULES:
            raise UnsupportedConstraint(f"the schema takes more than {MAX_RULES} rules", ["$ref"])
        self._rules[name] = alternatives

    def terminal(self, body: str) -> str:  # noqa: D102
        return self._terminals.setdefault(body, f"T{len(self._terminals)}")

    def value(self, formula: Formula) -> str:  # noqa: D102
        self._wanted.append(formula)
        return self._symbols[formula].name

    def productive(self, formula: Formula) -> bool:  # noqa: D102
        return formula in self._productive

    # From formulas to symbols

    def _explore(self, formula: Formula) -> None:
        stack = [formula]
        while stack:
            one = stack.pop()
            if one in self._symbols:
                continue
            if len(self._symbols) > MAX_RULES:
                raise UnsupportedConstraint(f"the schema takes more than {MAX_RULES} rules", ["$ref"])
            symbol = self._symbols[one] = self._symbol(one)
            for shape in symbol.shapes:
                stack += shape.values()

    def _settle(self) -> None:
        """Find the formulas that have values: the least set that is closed under what is possible."""
        pending = [one for one in self._symbols if one not in self._productive]
        while True:
            found = [one for one in pending if self._has_value(self._symbols[one])]
            if not found:
                return
            self._productive.update(found)
            pending = [one for one in pending if one not in self._productive]

    def _has_value(self, symbol: Symbol) -> bool:
        return bool(symbol.bodies) or any(shape.possible(self.productive) for shape in symbol.shapes)

    def _symbol(self, formula: Formula) -> Symbol:
        symbol = Symbol(self.fresh("v"), [], [], [])
        symbol.bodies += [f'"{kind}"' for kind in _LITERALS if self._shapes(formula, kind)]
        for kind, written in (("number", number_terminal), ("string", string_terminal)):
            for shape in self._shapes(formula, kind):
                body = self._enforced(shape, written)
                if body is not None and not self._empty(body):
                    symbol.bodies.append(self.terminal(body))
        for shape in self._shapes(formula, "object"):
            symbol.objects += self._enforced(shape, self._objects)
        for shape in self._shapes(formula, "array"):
            symbol.arrays.append(self._enforced(shape, self._array))
        return symbol

    def _shapes(self, formula: Formula, kind: str) -> list[Shape]:
        return [self._without_unknown(shape) for shape in alternatives(formula, kind, self._translator.expand)]

    def _without_unknown(self, shape: Shape) -> Shape:
        unknown = [one for one in shape if isinstance(one, Unknown)]
        for one in unknown:
            self._give_up(UnsupportedConstraint(f"the keyword {one.keyword!r} {one.why}", [one.keyword]))
        return shape - frozenset(unknown)

    def _give_up(self, error: UnsupportedConstraint) -> None:
        if not (self._relax and can_relax(error)):
            raise error
        self.relaxed += [keyword for keyword in error.keywords if keyword not in self.relaxed]

    def _enforced(self, shape: Shape, written: Callable[[Shape], Any]) -> Any:
        """What the assertions say; when relaxed, of as many of them as can be enforced together."""
        try:
            return written(shape)
        except UnsupportedConstraint as error:
            self._give_up(error)
            kept: Shape = frozenset()
            for one in sorted(shape, key=repr):
                try:
                    written(kept | {one})
                    kept |= {one}
                except UnsupportedConstraint as more:
                    self._give_up(more)
            return written(kept)

    def _objects(self, shape: Shape) -> list[ObjectShape]:
        return object_shapes(shape, self._translator.expand)

    def _array(self, shape: Shape) -> ArrayShape:
        result = array_shape(shape, self._translator.expand, self._finite)
        result.values()  # counts its states
        return result

    def _finite(self, formula: Formula) -> list[Any] | None:
        """The scalars that fit a formula, where there is nothing else and they are few."""
        values: list[Any] = [
            {"null": None, "true": True, "false": False}[kind] for kind in _LITERALS if self._shapes(formula, kind)
        ]
        if self._shapes(formula, "object") or self._shapes(formula, "array"):
            return None
        for shape in self._shapes(formula, "number"):
            listed = [one.values for one in shape if isinstance(one, NumberIn) and not one.negated]
            if not listed:
                return None
            values += sorted(
                value
                for value in frozenset.intersection(*listed)
                if number_terminal(shape | {NumberIn(frozenset({value}))})
            )
        for shape in self._shapes(formula, "string"):
            texts = [one.values for one in shape if isinstance(one, StringIn) and not one.negated]
            if not texts:
                return None
            values += sorted(
                text
                for text in frozenset.intersection(*texts)
                if all(holds(one, text, self._translator.expand) for one in shape)
            )
        return list(dict.fromkeys(values))

    # Disjointness, for oneOf

    def _disjoint(self, left: Formula, right: Formula) -> bool:
        return self._surely_empty(both(left, right), MAX_DEPTH)

    def _surely_empty(self, formula: Formula, depth: int) -> bool:
        """Whether no value fits, as far as ``depth`` levels of members and items show."""
        try:
            expand = self._translator.expand
            if any(alternatives(formula, kind, expand) for kind in _LITERALS):
                return False
            for kind, written in (("number", number_terminal), ("string", string_terminal)):
                for shape in alternatives(formula, kind, expand):
                    body = written(shape)
                    if body is not None and not self._empty(body):
                        return False

            def possible(value: Formula) -> bool:
                return depth == 0 or not self._surely_empty(value, depth - 1)

            for shape in alternatives(formula, "object", expand):
                if any(one.possible(possible) for one in object_shapes(shape, expand)):
                    return False
            return not any(
                array_shape(shape, expand, self._finite).possible(possible)
                for shape in alternatives(formula, "array", expand)
            )
        except UnsupportedConstraint:
            return False


def can_relax(error: UnsupportedConstraint) -> bool:
    """Whether a finished text can be checked for what masks cannot enforce: not for a reference to nowhere."""
    return bool(error.keywords) and "$ref" not in error.keywords
