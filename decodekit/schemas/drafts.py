"""The drafts of JSON Schema, and which one a document is written in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from referencing.jsonschema import DRAFT4, DRAFT6, DRAFT7, DRAFT201909, DRAFT202012

from decodekit.core.errors import UnsupportedConstraint

DRAFTS = {"4": DRAFT4, "6": DRAFT6, "7": DRAFT7, "2019-09": DRAFT201909, "2020-12": DRAFT202012}
_URIS = {
    "json-schema.org/draft-04/schema": "4",
    "json-schema.org/draft-06/schema": "6",
    "json-schema.org/draft-07/schema": "7",
    "json-schema.org/draft/2019-09/schema": "2019-09",
    "json-schema.org/draft/2020-12/schema": "2020-12",
    "json-schema.org/schema": "2020-12",
}
_NEW = {
    "$defs",
    "prefixItems",
    "unevaluatedItems",
    "unevaluatedProperties",
    "dependentSchemas",
    "dependentRequired",
} | {
    "minContains",
    "maxContains",
    "$anchor",
    "$dynamicRef",
}
_OLD = {"definitions", "dependencies", "additionalItems"}


def draft_of(schema: Any) -> str:
    """The draft that ``$schema`` names; without it 2020-12, unless the keywords are those of older drafts.

    Raises:
        UnsupportedConstraint: it names another dialect.
    """
    if isinstance(schema, Mapping) and isinstance(uri := schema.get("$schema"), str):
        name = uri.split("://")[-1].rstrip("#")
        if name not in _URIS:
            raise UnsupportedConstraint(f"the dialect {uri!r} is not one of {', '.join(DRAFTS)}", ["$schema"])
        return _URIS[name]
    found: set[str] = set()
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, Mapping):
            found |= part.keys() & (_NEW | _OLD)
            if isinstance(part.get("items"), list):
                found.add("additionalItems")
            if any(isinstance(part.get(key), bool) for key in ("exclusiveMinimum", "exclusiveMaximum")):
                return "4"
            stack += part.values()
        elif isinstance(part, list):
            stack += part
    return "7" if found & _OLD and not found & _NEW else "2020-12"
