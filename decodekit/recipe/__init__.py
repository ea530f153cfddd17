"""Recipes: from YAML, JSON and mappings to plugins and options."""

from decodekit.recipe.combinations import Clash, check_combinations, innermost, takes_beams
from decodekit.recipe.generation import Generation
from decodekit.recipe.json_schema import recipe_schema
from decodekit.recipe.load import load_recipe, recipe_faults
from decodekit.recipe.schema import DynamicSpec, PagedSpec, Recipe

__all__ = [
    "Clash",
    "DynamicSpec",
    "Generation",
    "PagedSpec",
    "Recipe",
    "check_combinations",
    "innermost",
    "load_recipe",
    "recipe_faults",
    "recipe_schema",
    "takes_beams",
]
