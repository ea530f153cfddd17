"""The recipes that ship, over the plugins that are installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from decodekit.recipe import load_recipe, recipe_schema

EXAMPLES = Path(__file__).parents[2] / "examples" / "recipes"
RECIPES = sorted(EXAMPLES.glob("*.yaml"))


@pytest.fixture(autouse=True)
def _installed() -> None:
    """The real plugins, not those of conftest."""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_loads_and_fits_the_schema(path: Path) -> None:
    recipe = load_recipe(path)
    assert load_recipe(recipe.to_dict()) == recipe
    schema = Draft202012Validator(recipe_schema()[0])
    schema.validate(yaml.safe_load(path.read_text()))
    schema.validate(recipe.to_dict())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_says_what_and_when(path: Path) -> None:
    what, when = path.read_text().splitlines()[:2]
    assert what.startswith("# ")
    assert when.startswith("# When: ")


def test_nucleus_extends_sample() -> None:
    sample, nucleus = load_recipe(EXAMPLES / "sample.yaml"), load_recipe(EXAMPLES / "nucleus.yaml")
    assert nucleus.generation == sample.generation
    assert [rule.kind for rule in nucleus.rules or ()] == ["temperature", "top_p"]
