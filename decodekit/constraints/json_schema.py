"""JSON Schema: texts that are JSON and fit a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from decodekit.core.errors import InputError, UnsupportedConstraint
from decodekit.core.options import RecipePath
from decodekit.core.protocols import Constraint
from decodekit.core.vocabulary import Vocabulary
from decodekit.llg.engine import CompiledGrammar, is_empty
from decodekit.schemas.compiler import SchemaGrammar, Whitespace, can_relax
from decodekit.schemas.drafts import draft_of
from decodekit.schemas.grammar import MAX_CHARACTERS, VALIDATORS, check_size, schema_grammar


class JsonSchema(Constraint):
    r"""JSON that fits a schema: drafts 4, 6, 7, 2019-09 and 2020-12, members in any order, ``1.0`` for an integer.

    The schema becomes a context-free grammar over the text (a bit of a rule's parameter for each name), which llguidance turns
    into masks. The text is RFC 8259 with names that come once, characters escaped or not (printable ASCII other than ``"``,
    ``\`` and ``/`` is not), and numbers as decimals or with one digit before the point and an exponent. Cost: milliseconds
    once, and 10-300 us a token.
    """

    cost: ClassVar[str] = "one mask a token"

    kind: Literal["json_schema"] = "json_schema"
    schema_: bool | dict[str, Any] | RecipePath = Field(
        alias="schema", description="the schema, or the file that holds it, relative to the recipe"
    )
    draft: Literal["4", "6", "7", "2019-09", "2020-12"] | None = Field(
        None, description="the draft of a schema without $schema; by default told from its keywords"
    )
    format: Literal["assert", "annotate"] | None = Field(
        None, description="whether format binds; by default only before draft 2019-09, beside type: string"
    )
    whitespace: Whitespace = Field(
        "spaces",
        description="compact: none; spaces: one may follow a comma or colon; indented: line breaks and indents too",
    )
    unsupported: Literal["error", "validate"] = Field(
        "error",
        description="refuse what cannot be enforced by name, or check the finished text and report it, without another try",
    )

    @field_validator("schema_")
    @classmethod
    def _within_limits(cls, schema: Any) -> Any:
        if not isinstance(schema, Path):
            check_size(schema)
        return schema

    @cached_property
    def document(self) -> Any:
        """The schema, read from its file where it has one.

        Raises:
            InputError: the file cannot be read, or is too large.
        """
        if not isinstance(self.schema_, Path):
            return self.schema_
        try:
            if (size := self.schema_.stat().st_size) > MAX_CHARACTERS:
                raise InputError(
                    f"the schema {str(self.schema_)!r} has {size} bytes; at most {MAX_CHARACTERS} are read"
                )
            document = json.loads(self.schema_.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"the schema {str(self.schema_)!r} cannot be read: {error}") from error
        try:
            check_size(document)
        except ValueError as error:
            raise InputError(f"the schema {str(self.schema_)!r} cannot be used: {error}") from error
        return document

    def compile(self, vocabulary: Vocabulary) -> CompiledGrammar:
        grammar = self.grammar()
        return CompiledGrammar(grammar.lark, vocabulary, grammar.relaxed, grammar.names)

    def grammar(self) -> SchemaGrammar:
        """The schema as a grammar in llguidance's Lark.

        Raises:
            UnsupportedConstraint: a keyword cannot be enforced, and ``unsupported`` is ``error``.
            InputError: it is no schema, or one that no value fits.
        """
        relax = self.unsupported == "validate"
        try:
            return schema_grammar(
                self.document,
                draft=self.draft_used,
                whitespace=self.whitespace,
                empty=is_empty,
                assert_format=None if self.format is None else self.format == "assert",
                relax=relax,
            )
        except UnsupportedConstraint as error:
            if relax or not can_relax(error):
                raise
            hint = "unsupported: validate enforces the rest, and checks the finished text"
            raise UnsupportedConstraint(f"{error}; {hint}", error.keywords) from error

    @property
    def draft_used(self) -> str:
        """The draft that the schema is read by."""
        declared = isinstance(self.document, Mapping) and "$schema" in self.document
        return draft_of(self.document) if declared or self.draft is None else self.draft

    def violation(self, text: str) -> str | None:
        """What is wrong with a finished text, as jsonschema says it; ``None`` if it fits the schema."""
        validator = VALIDATORS[self.draft_used]
        checker = validator.FORMAT_CHECKER if self.format == "assert" else None
        try:
            fault = next(validator(self.document, format_checker=checker).iter_errors(json.loads(text)), None)
        except json.JSONDecodeError as error:
            return f"no JSON: {error}"
        except re.error as wrong:
            return f"cannot be checked: a pattern is none of Python's: {wrong}"
        except RecursionError:
            return "cannot be checked: the text is nested too deeply"
        return None if fault is None else f"{fault.json_path}: {fault.message}"
