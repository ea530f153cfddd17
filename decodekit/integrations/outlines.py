"""Output types of outlines, and what Python knows as types, as constraints."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError

from decodekit.core.errors import InputError
from decodekit.core.protocols import Constraint
from decodekit.core.registry import create


def constraint_of(output_type: Any) -> Constraint:
    """The constraint for an output type of outlines.

    Args:
        output_type: ``Regex``, ``JsonSchema``, ``CFG``, ``Choice`` or any term of outlines' regex DSL; a pydantic model, a
            dataclass, a typed dict, an ``Enum``, a ``Literal``, or another type that outlines takes.

    Raises:
        InputError: outlines is not there, or knows no such type.
    """
    try:
        from outlines.types import dsl
    except ImportError as error:
        raise InputError("output types need outlines: pip install 'outlines[llguidance]'") from error
    try:
        term = dsl.python_types_to_terms(output_type)
    except (TypeError, RecursionError) as error:
        raise InputError(f"{output_type!r} is no output type of outlines: {error}") from error
    if isinstance(term, dsl.JsonSchema):
        spaces = "compact" if term.whitespace_pattern == "" else "spaces"
        return _created({"kind": "json_schema", "schema": json.loads(term.schema), "whitespace": spaces})
    if isinstance(term, dsl.CFG):
        return _created({"kind": "grammar", "lark": term.definition})
    if _holds(term, (dsl.JsonSchema, dsl.CFG), dsl.Term):
        # Lists, unions and the like of models: outlines spells them as patterns, pydantic has their schema.
        try:
            schema = TypeAdapter(output_type).json_schema()
        except (PydanticSchemaGenerationError, TypeError) as error:
            raise InputError(f"{output_type!r} mixes schemas or grammars with patterns, which is no schema") from error
        return _created({"kind": "json_schema", "schema": schema})
    return _created({"kind": "regex", "pattern": dsl.to_regex(term)})


def _created(options: dict[str, Any]) -> Constraint:
    constraint = create("constraints", options)
    assert isinstance(constraint, Constraint)
    return constraint


def _holds(term: Any, kinds: tuple[type, ...], base: type) -> bool:
    """Whether a term of one of these kinds is inside another."""
    inner = [part for value in vars(term).values() for part in (value if isinstance(value, list | tuple) else [value])]
    return any(isinstance(part, kinds) or (isinstance(part, base) and _holds(part, kinds, base)) for part in inner)
