"""The JSON Schema of a recipe, over the plugins that are installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import models_json_schema

from decodekit.core import registry
from decodekit.core.protocols import Plugin
from decodekit.core.registry import PluginInfo
from decodekit.recipe.generation import Generation
from decodekit.recipe.schema import CACHES, Recipe

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]


def recipe_schema() -> tuple[Schema, list[PluginInfo]]:
    """The schema (draft 2020-12) of a recipe file, and the plugins that it lacks because they failed to import.

    Each place of a plugin takes any installed one that fits there, told apart by ``kind``, or its bare kind where no
    option is required. What a schema cannot say, ``load_recipe`` checks: impossible combinations, files that are named.
    """
    names, failures = _usable(registry.inventory())
    bases = [base for group in registry.GROUPS.values() for base in group]
    models: list[type[BaseModel]] = [Recipe, Generation, *bases, *names, *CACHES.values()]
    references, document = models_json_schema([(model, "validation") for model in models])
    definitions: Schema = document["$defs"]
    # Models with equal schemas share a definition.
    keys: dict[Any, str] = {model: ref["$ref"].removeprefix("#/$defs/") for (model, _), ref in references.items()}

    kinds: dict[str, list[str]] = {}
    for model, own in [*names.items(), *((cache, [kind]) for kind, cache in CACHES.items())]:
        kinds.setdefault(keys[model], []).extend(own)
    for key, own in kinds.items():
        definitions[key]["properties"]["kind"] = {"enum": own}
        definitions[key]["required"] = ["kind", *definitions[key].get("required", [])]
    for base in bases:
        members = {keys[model]: model for model in names if issubclass(model, base)}
        definitions[keys[base]] = {"title": base.__name__, **_union(members, kinds)}
    properties: Schema = definitions[keys[Recipe]]["properties"]
    sections = {
        "strategy": {"anyOf": properties["strategy"]["anyOf"]},
        "cache": _union({keys[model]: model for model in CACHES.values()}, kinds),
        "generation": _reference(keys[Generation]),
    }
    for name, schema in sections.items():  # the others are nullable as they are
        described = properties[name]["description"]
        properties[name] = {"anyOf": [*schema.get("anyOf", [schema]), {"type": "null"}], "description": described}
    properties["extends"] = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}],
        "description": "recipe files, relative to this one, over which this one is merged",
    }
    root = {"$schema": DIALECT, "title": "decodekit recipe", **_reference(keys[Recipe]), "$defs": definitions}
    return root, failures


def _usable(inventory: Iterable[PluginInfo]) -> tuple[dict[type[Plugin], list[str]], list[PluginInfo]]:
    """Each class with the names that a recipe may call it by, and the plugins without a class or a schema."""
    names: dict[type[Plugin], list[str]] = {}
    failures = []
    for info in inventory:
        if info.status not in ("ok", "ambiguous"):
            failures += [info] if info.status == "error" else []
            continue
        qualified = f"{info.distribution}:{info.kind}"
        plugin = registry.load(info.group, qualified)
        try:
            plugin.model_json_schema()
        except PydanticInvalidForJsonSchema as error:
            failures.append(replace(info, status="error", error=f"has no JSON schema: {error}"))
            continue
        names.setdefault(plugin, []).extend([qualified] if info.status == "ambiguous" else [info.kind, qualified])
    return names, failures


def _union(members: Mapping[str, type[BaseModel]], kinds: Mapping[str, list[str]]) -> Schema:
    """Any of the members by definition, or by its bare kind where it has no option that is required."""
    if not members:
        return {"not": {}}
    bare = [
        kind
        for key, model in members.items()
        if not any(field.is_required() for field in model.model_fields.values())
        for kind in kinds[key]
    ]
    return {"oneOf": [*map(_reference, members), *([{"enum": bare}] if bare else [])]}


def _reference(key: str) -> Schema:
    return {"$ref": f"#/$defs/{key}"}
