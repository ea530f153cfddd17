"""The two ways to a Decoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decodekit.core import registry
from decodekit.recipe import Recipe, load_recipe
from decodekit.runtime.decoder import Decoder


def load(recipe: str | Path | Mapping[str, Any], **overrides: Any) -> Decoder:
    """A Decoder from a recipe file or mapping.

    Args:
        recipe: a YAML or JSON file, or the same as a mapping.
        overrides: sections that are merged over the recipe, as ``extends`` merges: ``load(path, generation={"seed": 1})``.

    Raises:
        RecipeError: the recipe cannot be read; says where and what would be right.
    """
    return Decoder(load_recipe(recipe, overrides=overrides))


def strategy(kind: str, **params: Any) -> Decoder:
    """A Decoder that runs one strategy and nothing else: ``strategy("dola", layers="high")``."""
    # Not as a recipe, whose own options must fit the strategy: here the call is yet to say whether it samples.
    return Decoder(Recipe(strategy=registry.create("strategies", {"kind": kind, **params})))
