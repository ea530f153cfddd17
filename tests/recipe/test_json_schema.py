from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from decodekit.core.errors import RecipeError
from decodekit.recipe import load_recipe, recipe_schema


def validator() -> Draft202012Validator:
    schema, failures = recipe_schema()
    assert failures == []
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


GOOD: list[dict[str, Any]] = [
    {},
    {"strategy": "dola", "rules": ["top_p", {"kind": "temperature", "t": 0.5}], "cache": "dynamic"},
    {"cache": {"kind": "paged", "window": 1024, "sinks": 0}},
    {"strategy": {"kind": "mbr", "n": 1, "inner": {"kind": "dola", "layers": [1, 2]}}},
    {"strategy": {"kind": "decodekit:dola", "layers": "low"}},
    {"generation": {"seed": 2**64 - 1, "stop_strings": ["a"], "sequence_bias": [[[1], 2.0]], "max_time": None}},
    {"constraint": {"kind": "regex", "file": "x"}, "drafter": {"kind": "ngram"}, "fallback": "eos"},
    {"strategy": None, "rules": None, "constraint": None, "drafter": None, "cache": None, "generation": None},
]
BAD: list[dict[str, Any]] = [
    {"strategi": "dola"},
    {"strategy": "dolla"},
    {"strategy": {"layers": "low"}},
    {"strategy": {"kind": "dola", "layrs": "low"}},
    {"strategy": {"kind": "dola", "layers": "mid"}},
    {"strategy": "mbr"},
    {"strategy": {"kind": "beam", "inner": "beam"}},
    {"strategy": "top_p"},
    {"rules": "top_p"},
    {"rules": ["temperature"]},
    {"rules": [{"kind": "temperature", "t": 0}]},
    {"rules": [{"kind": "temperature", "t": "0.5"}]},
    {"constraint": "regex"},
    {"cache": "pages"},
    {"cache": {"kind": "dynamic", "size": 1}},
    {"cache": {"kind": "paged", "window": 0}},
    {"fallback": "none"},
    {"generation": {"max_new_tokens": 0}},
    {"generation": {"do_sample": "yes"}},
    {"generation": {"max_newtokens": 3}},
    {"extends": 3},
]


@pytest.mark.parametrize("source", GOOD)
def test_accepts_what_loads(source: dict[str, Any]) -> None:
    load_recipe(source)
    validator().validate(source)


@pytest.mark.parametrize("source", BAD)
def test_rejects_what_does_not_load(source: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        load_recipe(source)
    assert not validator().is_valid(source)


def test_extends() -> None:
    assert validator().is_valid({"extends": "a.yaml"})
    assert validator().is_valid({"extends": ["a.yaml", "b.yaml"]})


def test_describes() -> None:
    definitions = recipe_schema()[0]["$defs"]
    assert definitions["Temperature"]["properties"]["t"]["description"] == "divides the logits"
    assert definitions["Sample"]["description"] == "Plain decoding."
    assert all("description" in option for option in definitions["Generation"]["properties"].values())
    assert all("description" in section for section in definitions["Recipe"]["properties"].values())


def test_lists_what_failed_to_import(install: Callable[..., None]) -> None:
    install("rules", "broken", ImportError("no module named x"))
    schema, failures = recipe_schema()
    assert [(row.kind, row.distribution) for row in failures] == [("broken", "other")]
    assert "no module named x" in str(failures[0].error)
    assert not Draft202012Validator(schema).is_valid({"rules": ["broken"]})


def test_one_kind_in_two_distributions_must_be_told_apart(install: Callable[..., None]) -> None:
    from decodekit.core import registry

    install("rules", "top_p", type("TopP", (registry.load("rules", "top_p"),), {}))
    check = validator()
    assert check.is_valid({"rules": [{"kind": "other:top_p", "p": 0.5}, "decodekit:top_p"]})
    assert not check.is_valid({"rules": ["top_p"]})


def test_no_plugin_of_a_sort(entries: list[Any]) -> None:
    entries[:] = [entry for entry in entries if entry.group.endswith("strategies")]
    assert not validator().is_valid({"drafter": "ngram"})
    assert validator().is_valid({"strategy": "sample"})
