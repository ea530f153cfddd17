from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from decodekit.core import registry
from decodekit.core.errors import PluginError, RecipeError
from decodekit.recipe import Generation, PagedSpec, Recipe, load_recipe


def made(group: str, spec: Any) -> Any:
    return registry.create(group, spec)


def test_from_python() -> None:
    rules = (made("rules", {"kind": "temperature", "t": 0.5}),)
    recipe = Recipe(strategy=made("strategies", "dola"), rules=rules, generation=Generation(seed=1))
    assert recipe == load_recipe(
        {"strategy": "dola", "rules": [{"kind": "temperature", "t": 0.5}], "generation": {"seed": 1}}
    )
    assert recipe.to_dict() == {
        "strategy": {"kind": "dola"},
        "rules": [{"kind": "temperature", "t": 0.5}],
        "generation": {"seed": 1},
    }
    assert Recipe().cache == PagedSpec()


def test_frozen() -> None:
    with pytest.raises(ValidationError):
        Recipe().fallback = "eos"  # type: ignore[misc]


def test_rules_left_out_are_not_rules_left_empty() -> None:
    assert load_recipe({}).rules is None
    assert load_recipe({"rules": None}).rules is None
    assert load_recipe({"rules": []}).rules == ()
    assert load_recipe({"rules": []}).to_dict() == {"rules": []}


def test_options_named_by_an_alias() -> None:
    recipe = load_recipe({"constraint": {"kind": "json_schema", "schema": {"type": "object"}}})
    assert recipe.to_dict() == {"constraint": {"kind": "json_schema", "schema": {"type": "object"}}}
    with pytest.raises(RecipeError, match="unknown option: did you mean 'schema'"):
        load_recipe({"constraint": {"kind": "json_schema", "shema": {}}})


class TestNestedPlugins:
    def test_created_from_data(self) -> None:
        inner = {"kind": "dola", "layers": "high"}
        mbr = made("strategies", {"kind": "mbr", "inner": inner, "also": ["sample", inner]})
        assert mbr.inner == made("strategies", inner)
        assert mbr.also == (made("strategies", "sample"), made("strategies", inner))
        assert type(mbr)(inner=mbr.inner).inner is mbr.inner

    def test_faults(self) -> None:
        with pytest.raises(RecipeError, match=r"mbr\.inner\.layrs: unknown option: did you mean 'layers'"):
            made("strategies", {"kind": "mbr", "inner": {"kind": "dola", "layrs": 1}})
        with pytest.raises(RecipeError, match=r"beam\.inner: unknown strategy 'dolla': did you mean 'dola'"):
            made("strategies", {"kind": "beam", "inner": "dolla"})
        with pytest.raises(RecipeError, match=r"beam\.inner\.kind: 'mbr' is a SequenceStrategy, not a TokenStrategy"):
            made("strategies", {"kind": "beam", "inner": {"kind": "mbr", "inner": "sample"}})

    def test_an_unknown_kind_outside_is_a_plugin_error(self) -> None:
        with pytest.raises(PluginError, match="unknown strategy 'dolla'"):
            made("strategies", "dolla")


def test_name_of_an_ambiguous_plugin(install: Callable[..., None]) -> None:
    mine = made("rules", "top_p")
    other = type("TopP", (type(mine),), {})
    assert registry.name_of(mine) == "top_p"
    install("rules", "top_p", other)
    assert registry.name_of(mine) == "decodekit:top_p"
    assert registry.name_of(other()) == "other:top_p"


def test_to_dict_is_json() -> None:
    source = {"rules": [{"kind": "bias", "bias": {50256: -1}, "words": ["a"]}], "cache": {"kind": "dynamic"}}
    assert json.loads(json.dumps(load_recipe(source).to_dict())) == {
        "rules": [{"kind": "bias", "bias": {"50256": -1.0}, "words": ["a"]}],
        "cache": {"kind": "dynamic"},
    }
