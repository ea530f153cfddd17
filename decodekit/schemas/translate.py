"""A JSON Schema document as formulas: drafts, references and keywords.

Specifications: JSON Schema drafts 4, 6, 7, 2019-09 and 2020-12 (core and validation). Keywords without a meaning in the draft
are annotations; one whose meaning cannot be put into a formula becomes ``Unknown``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import referencing
import referencing.exceptions
from jsonschema_specifications import REGISTRY

from decodekit.core.errors import InputError, UnsupportedConstraint
from decodekit.schemas import formats
from decodekit.schemas.drafts import DRAFTS
from decodekit.schemas.ecmascript import parse
from decodekit.schemas.formula import (
    EVERYTHING,
    NOTHING,
    Bound,
    Distinct,
    EveryItem,
    EveryMember,
    Formula,
    Integer,
    Items,
    ItemsLike,
    Length,
    Members,
    Multiple,
    OfType,
    Pattern,
    Ref,
    SomeMember,
    StringIn,
    Unknown,
    both,
    either,
    exact,
    negate,
    one_of_values,
)

_NAMES = {
    "null": {"null"},
    "boolean": {"true", "false"},
    "number": {"number"},
    "string": {"string"},
    "array": {"array"},
    "object": {"object"},
}


class Translator:
    """The formulas of one document's schemas, made when they are asked for.

    Args:
        document: the schema.
        draft: one of ``DRAFTS``.
        assert_format: whether ``format`` is an assertion; ``None`` leaves that to the draft: it is one before 2019-09, beside
            ``type: string``.
        disjoint: whether two formulas surely have no value in common.
    """

    def __init__(
        self,
        document: Any,
        draft: str,
        *,
        assert_format: bool | None = None,
        disjoint: Callable[[Formula, Formula], bool],
    ) -> None:
        self.draft = draft
        self._modern = draft in ("2019-09", "2020-12")
        self._assert_format = assert_format
        self._disjoint = disjoint
        self._schemas: list[tuple[Any, Any]] = []
        self._numbers: dict[tuple[int, str], int] = {}
        self._formulas: dict[int, Formula] = {}
        self._open: set[int] = set()
        resource = referencing.Resource.from_contents(document, default_specification=DRAFTS[draft])
        base = resource.id() or ""
        registry = REGISTRY.with_resource(base, resource)
        self.root = self._ref(document, registry.resolver(base))

    def expand(self, ref: Ref) -> Formula:
        """The formula that a reference stands for.

        Raises:
            UnsupportedConstraint: it cannot be described, or refers to itself in place.
        """
        if ref.schema not in self._formulas:
            if ref.schema in self._open:
                raise UnsupportedConstraint("a $ref that leads back to itself in place describes nothing", ["$ref"])
            self._open.add(ref.schema)
            try:
                schema, resolver = self._schemas[ref.schema]
                self._formulas[ref.schema] = self._translate(schema, resolver)
            finally:
                self._open.discard(ref.schema)
        formula = self._formulas[ref.schema]
        return negate(formula) if ref.negated else formula

    def _ref(self, schema: Any, resolver: Any) -> Ref:
        key = (id(schema), resolver._base_uri)
        if key not in self._numbers:
            self._numbers[key] = len(self._schemas)
            self._schemas.append((schema, resolver))
        return Ref(self._numbers[key])

    def _sub(self, schema: Any, resolver: Any) -> Formula:
        if schema is True or schema == {}:
            return EVERYTHING
        if schema is False:
            return NOTHING
        if isinstance(schema, Mapping):
            resolver = resolver.in_subresource(
                referencing.Resource.from_contents(schema, default_specification=DRAFTS[self.draft])
            )
        return self._ref(schema, resolver)

    def _translate(self, schema: Any, resolver: Any) -> Formula:
        if isinstance(schema, bool):
            return EVERYTHING if schema else NOTHING
        if not isinstance(schema, Mapping):
            raise InputError(
                f"a schema is a mapping or a truth value, got {type(schema).__name__} {str(schema)[:40]!r}"
            )
        if "$ref" in schema and not self._modern:
            return self._reference(schema, resolver)
        parts: list[Formula] = []
        for keyword, value in schema.items():
            method = getattr(self, "_on_" + keyword.replace("$", ""), None)
            if keyword in _KEYWORDS and method is not None:
                parts.append(method(value, schema, resolver))
        return both(*parts)

    def _reference(self, schema: Mapping[str, Any], resolver: Any) -> Formula:
        try:
            found = resolver.lookup(schema["$ref"])
        except referencing.exceptions.Unresolvable:
            return Unknown("$ref", f"leads nowhere in this document: {schema['$ref']!r}")
        return self._ref(found.contents, found.resolver)

    # Core

    def _on_ref(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return self._reference(schema, resolver)

    def _on_dynamicRef(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return Unknown("$dynamicRef", "depends on the path that leads to it")

    def _on_recursiveRef(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return Unknown("$recursiveRef", "depends on the path that leads to it")

    # Any type

    def _on_type(self, value: Any, schema: Any, resolver: Any) -> Formula:
        names = [value] if isinstance(value, str) else value
        parts: list[Formula] = []
        for name in names:
            if name == "integer":
                parts.append(both(OfType(frozenset({"number"})), Integer(plain=self.draft == "4")))
            elif name in _NAMES:
                parts.append(OfType(frozenset(_NAMES[name])))
            elif name == "any":
                parts.append(EVERYTHING)
            else:
                raise InputError(f"type {name!r} is none of integer, {', '.join(_NAMES)}")
        plain = frozenset(kind for part in parts if isinstance(part, OfType) for kind in part.types)
        return (
            either(OfType(plain), *(part for part in parts if not isinstance(part, OfType)))
            if plain
            else either(*parts)
        )

    def _on_enum(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return one_of_values(value)

    def _on_const(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return EVERYTHING if self.draft == "4" else one_of_values([value])

    def _on_allOf(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return both(*(self._sub(part, resolver) for part in value))

    def _on_anyOf(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return either(*(self._sub(part, resolver) for part in value))

    def _on_oneOf(self, value: Any, schema: Any, resolver: Any) -> Formula:
        branches = [self._sub(part, resolver) for part in value]
        siblings = both(*(self._on_type(schema["type"], schema, resolver) if "type" in schema else EVERYTHING,))
        alternatives = []
        for place, branch in enumerate(branches):
            others = [
                negate(other)
                for index, other in enumerate(branches)
                if index != place and not self._disjoint(both(branch, siblings), other)
            ]
            alternatives.append(both(branch, *others))
        return either(*alternatives)

    def _on_not(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return negate(self._sub(value, resolver))

    def _on_if(self, value: Any, schema: Any, resolver: Any) -> Formula:
        if self.draft in ("4", "6"):
            return EVERYTHING
        condition = self._sub(value, resolver)
        then = self._sub(schema.get("then", True), resolver)
        otherwise = self._sub(schema.get("else", True), resolver)
        return both(either(negate(condition), then), either(condition, otherwise))

    # Numbers

    def _on_minimum(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return Bound(exact(value), False, schema.get("exclusiveMinimum") is not True)

    def _on_maximum(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return Bound(exact(value), True, schema.get("exclusiveMaximum") is not True)

    def _on_exclusiveMinimum(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return EVERYTHING if isinstance(value, bool) else Bound(exact(value), False, False)

    def _on_exclusiveMaximum(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return EVERYTHING if isinstance(value, bool) else Bound(exact(value), True, False)

    def _on_multipleOf(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return Multiple(exact(value))

    # Strings

    def _on_minLength(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return Length(int(value), None) if value else EVERYTHING

    def _on_maxLength(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return Length(0, int(value))

    def _on_pattern(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return _pattern(value, "pattern")

    def _on_format(self, value: Any, schema: Any, resolver: Any) -> Formula:
        types = schema.get("type", ())
        asserted = self._assert_format
        if asserted is None:
            asserted = not (self._modern and self._declared) and "string" in (
                [types] if isinstance(types, str) else types
            )
        if not asserted or value not in formats.KNOWN:
            return EVERYTHING
        if value not in formats.PATTERNS:
            return Unknown("format", f"cannot be asserted: {value!r}", "string")
        return Pattern(formats.PATTERNS[value])

    @property
    def _declared(self) -> bool:
        schema = self._schemas[0][0]
        return isinstance(schema, Mapping) and "$schema" in schema

    # Objects

    def _on_properties(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return both(*(EveryMember(_key(key), self._sub(part, resolver)) for key, part in value.items()))

    def _on_patternProperties(self, value: Any, schema: Any, resolver: Any) -> Formula:
        patterns = {pattern: _pattern(pattern, "patternProperties") for pattern in value}
        return both(*(EveryMember(patterns[pattern], self._sub(part, resolver)) for pattern, part in value.items()))

    def _on_additionalProperties(self, value: Any, schema: Any, resolver: Any) -> Formula:
        part = self._sub(value, resolver)
        return EVERYTHING if part == EVERYTHING else EveryMember(self._additional(schema), part)

    def _additional(self, schema: Mapping[str, Any]) -> Formula:
        names = StringIn(frozenset(schema.get("properties", ())), negated=True)
        patterns = [_pattern(pattern, "patternProperties") for pattern in schema.get("patternProperties", ())]
        return both(names, *map(negate, patterns))

    def _on_required(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return both(*(SomeMember(_key(key), EVERYTHING) for key in value)) if isinstance(value, list) else EVERYTHING

    def _on_propertyNames(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return EVERYTHING if self.draft == "4" else EveryMember(negate(self._sub(value, resolver)), NOTHING)

    def _on_minProperties(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return Members(int(value), None)

    def _on_maxProperties(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return Members(0, int(value))

    def _on_dependencies(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return both(*(self._dependency(key, part, resolver) for key, part in value.items()))

    _on_dependentSchemas = _on_dependentRequired = _on_dependencies

    def _dependency(self, key: str, part: Any, resolver: Any) -> Formula:
        if isinstance(part, str):
            part = [part]
        absent = EveryMember(_key(key), NOTHING)
        if isinstance(part, list):
            return both(*(either(absent, SomeMember(_key(other), EVERYTHING)) for other in part))
        # Of other types than objects, an absent key says nothing: the part must not bind them either.
        return either(absent, both(OfType(frozenset({"object"})), self._sub(part, resolver)))

    # Arrays

    def _on_items(self, value: Any, schema: Any, resolver: Any) -> Formula:
        if isinstance(value, list):
            return self._prefix(value, resolver)
        start = len(schema.get("prefixItems", ())) if self.draft == "2020-12" else 0
        return EveryItem(start, None, self._sub(value, resolver))

    def _on_prefixItems(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return self._prefix(value, resolver) if self.draft == "2020-12" else EVERYTHING

    def _on_additionalItems(self, value: Any, schema: Any, resolver: Any) -> Formula:
        items = schema.get("items")
        if self.draft == "2020-12" or not isinstance(items, list):
            return EVERYTHING
        return EveryItem(len(items), None, self._sub(value, resolver))

    def _prefix(self, value: Any, resolver: Any) -> Formula:
        return both(*(EveryItem(place, place + 1, self._sub(part, resolver)) for place, part in enumerate(value)))

    def _on_contains(self, value: Any, schema: Any, resolver: Any) -> Formula:
        if self.draft == "4":
            return EVERYTHING
        low, high = (schema.get("minContains", 1), schema.get("maxContains")) if self._modern else (1, None)
        return ItemsLike(0, self._sub(value, resolver), int(low), None if high is None else int(high))

    def _on_minItems(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return Items(int(value), None)

    def _on_maxItems(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return Items(0, int(value))

    def _on_uniqueItems(self, value: Any, schema: Any, resolver: Any) -> Formula:
        return Distinct() if value else EVERYTHING

    def _on_unevaluatedProperties(self, value: Any, schema: Any, resolver: Any) -> Formula:
        if not self._modern:
            return EVERYTHING
        return Unknown("unevaluatedProperties", "is not supported", "object")

    def _on_unevaluatedItems(self, value: Any, schema: Any, resolver: Any) -> Formula:
        if not self._modern:
            return EVERYTHING
        return Unknown("unevaluatedItems", "is not supported", "array")


def _pattern(pattern: str, keyword: str) -> Formula:
    try:
        parse(pattern)
    except UnsupportedConstraint as error:
        return Unknown(keyword, f"cannot be enforced: {error}", "string")
    return Pattern(pattern)


def _key(name: str) -> Formula:
    return StringIn(frozenset({name}))


_KEYWORDS = {name.removeprefix("_on_") for name in vars(Translator) if name.startswith("_on_")} | {
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
}
