"""1 for a text that is JSON (and valid under a schema), else 0."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from pydantic import Field, field_validator

from decodekit.core.candidates import Candidate
from decodekit.core.options import RecipePath
from decodekit.core.protocols import Scorer
from decodekit.core.types import Need


class Json(Scorer):
    """A verifier of form: the whole text, white space aside, is one JSON document, valid under the schema if one is given."""

    cost: ClassVar[str] = "1 parse a candidate"
    needs: ClassVar[frozenset[Need | str]] = frozenset({Need.TOKENIZER})

    kind: Literal["json"] = "json"
    schema_: dict[str, Any] | RecipePath | None = Field(
        None, alias="schema", description="a JSON Schema, or the file that holds it"
    )

    @field_validator("schema_")
    @classmethod
    def _is_a_schema(cls, schema: dict[str, Any] | Path | None) -> dict[str, Any] | Path | None:
        if schema is not None:
            document = _read(schema)
            try:
                validator_for(document).check_schema(document)
            except SchemaError as error:
                raise ValueError(f"is no JSON Schema: {error.message}") from error
        return schema

    def score(self, prompt: str, candidates: Sequence[Candidate]) -> Sequence[float]:
        schema = {} if self.schema_ is None else _read(self.schema_)
        validator = validator_for(schema)(schema)
        return [float(_is_valid(own.text, validator)) for own in candidates]


def _read(schema: dict[str, Any] | Path) -> Any:
    if isinstance(schema, dict):
        return schema
    try:
        return json.loads(schema.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"the schema file {str(schema)!r} cannot be read: {error}") from error


def _is_valid(text: str, validator: Any) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text)))
    except (ValueError, RecursionError):
        return False
