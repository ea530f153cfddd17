"""From a document to its grammar: what is no schema is refused first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jsonschema

from decodekit.core.errors import InputError, UnsupportedConstraint
from decodekit.schemas.compiler import SchemaGrammar, Whitespace

MAX_CHARACTERS = 4 * 2**20
MAX_PARTS = 200_000
MAX_DEPTH = 100

VALIDATORS = {
    "4": jsonschema.Draft4Validator,
    "6": jsonschema.Draft6Validator,
    "7": jsonschema.Draft7Validator,
    "2019-09": jsonschema.Draft201909Validator,
    "2020-12": jsonschema.Draft202012Validator,
}


def schema_grammar(
    document: Any,
    *,
    draft: str,
    whitespace: Whitespace,
    empty: Callable[[str], bool],
    assert_format: bool | None = None,
    relax: bool = False,
) -> SchemaGrammar:
    """The grammar of a schema, in llguidance's Lark; its arguments are those of :class:`SchemaGrammar`.

    Raises:
        UnsupportedConstraint: a keyword cannot be enforced, and ``relax`` is off.
        InputError: it is no schema, or one that no value fits.
    """
    try:
        # Not its formats: patterns are ECMAScript's, which Python's re does not know.
        VALIDATORS[draft].check_schema(document, format_checker=jsonschema.FormatChecker(()))
    except jsonschema.SchemaError as error:
        raise InputError(
            f"this is no JSON Schema of draft {draft}: {error.json_path}: {error.message[:200]}"
        ) from error
    try:
        grammar = SchemaGrammar(
            document, draft=draft, whitespace=whitespace, assert_format=assert_format, relax=relax, empty=empty
        )
        _ = grammar.lark
    except RecursionError as error:
        raise UnsupportedConstraint("the schema is nested too deeply", ["$ref"]) from error
    return grammar


def check_size(schema: Any) -> None:
    """Refuse a schema whose compilation could take long, before anything is made of it.

    Raises:
        ValueError: it is nested too deeply, or has too many parts or characters.
    """
    stack = [(schema, 0)]
    parts = characters = 0
    while stack:
        part, depth = stack.pop()
        parts += 1
        if isinstance(part, str):
            characters += len(part)
        elif isinstance(part, Mapping):
            characters += sum(len(key) for key in part if isinstance(key, str))
            stack += ((value, depth + 1) for value in part.values())
        elif isinstance(part, list | tuple):
            stack += ((value, depth + 1) for value in part)
        if depth > MAX_DEPTH:
            raise ValueError(f"the schema is nested more than {MAX_DEPTH} deep")
        if parts + len(stack) > MAX_PARTS or characters > MAX_CHARACTERS:
            raise ValueError(f"the schema has more than {MAX_PARTS} parts or {MAX_CHARACTERS} characters")
