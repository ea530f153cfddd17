from __future__ import annotations

from typing import Any

import pytest

from decodekit.core.errors import RecipeError
from decodekit.recipe import check_combinations, innermost, load_recipe, recipe_faults

MBR = {"kind": "mbr", "n": 4, "inner": "sample"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"generation": {"num_beams": 2}}, "generation.num_beams: 2 beams, but strategy 'sample' keeps one hypothesis"),
        ({"strategy": "contrastive_search", "generation": {"num_beams": 2}}, "generation.num_beams: 2 beams, but"),
        ({"generation": {"num_return_sequences": 2}}, "generation.num_return_sequences: 2 outputs of 'sample' are the"),
        ({"strategy": MBR}, "strategy.n: 4 outputs of 'sample' are the same text each time without sampling; say"),
        ({"strategy": {**MBR, "inner": "dola"}, "generation": {"do_sample": False}}, "strategy.n: 4 outputs of 'dola'"),
        (
            {"strategy": "beam", "drafter": "ngram"},
            "drafter: drafts for one hypothesis, and 'beam' keeps several",
        ),
        (
            {"strategy": MBR, "generation": {"do_sample": True, "num_return_sequences": 5}},
            "generation.num_return_sequences: 5 outputs are more than the 4 that 'mbr' chooses between; ask for fewer",
        ),
        (
            {"strategy": "beam", "generation": {"num_return_sequences": 5}},
            "generation.num_return_sequences: 5 outputs are more than the 4 that 'beam' chooses between",
        ),
        (
            {"strategy": MBR, "generation": {"do_sample": True}, "cache": "dynamic"},
            "cache: 'mbr' forks its rows, which a dynamic cache cannot; leave cache out",
        ),
        ({"strategy": "beam", "cache": {"kind": "dynamic"}}, "cache: 'beam' forks its rows"),
        ({"strategy": {**MBR, "inner": "beam"}}, "strategy.inner: 'beam' is a SearchStrategy, not a TokenStrategy"),
        (
            {"cache": {"kind": "paged", "window": 64}, "drafter": "ngram"},
            "cache.window: a drafter verifies several tokens at once",
        ),
        (
            {"cache": {"kind": "paged", "sinks": 4}},
            "cache.sinks: has no effect where all tokens are kept; give a window",
        ),
        ({"fallback": "relax"}, "fallback: there are no rules to relax"),
        ({"fallback": "relax", "rules": []}, "fallback: there are no rules to relax"),
        (
            {"generation": {"min_new_tokens": 3, "max_new_tokens": 2}},
            "generation.min_new_tokens: 3 is more than max_new",
        ),
        ({"generation": {"min_length": 3, "max_length": 2}}, "generation.min_length: 3 is more than max_length: 2"),
    ],
)
def test_refused(source: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(source)
    assert str(caught.value).startswith(f"recipe: {message}")


@pytest.mark.parametrize(
    "source",
    [
        {"generation": {"num_beams": 1, "num_return_sequences": 1}},
        {"strategy": "beam", "generation": {"num_beams": 2, "num_return_sequences": 2}},
        {"generation": {"num_return_sequences": 2, "do_sample": True}},
        {"strategy": MBR, "generation": {"do_sample": True, "num_return_sequences": 2}},
        {"strategy": {**MBR, "n": 1}},
        {"strategy": {**MBR, "n": 1}, "drafter": "ngram"},
        {"fallback": "relax", "rules": ["top_p"]},
        {"rules": ["top_p"], "generation": {"do_sample": False}},
        {"generation": {"min_new_tokens": 2, "max_new_tokens": 2}},
    ],
)
def test_accepted(source: dict[str, Any]) -> None:
    assert check_combinations(load_recipe(source)) == []


def test_all_are_found() -> None:
    faults = recipe_faults({"strategy": MBR, "fallback": "relax", "generation": {"num_beams": 2}})
    assert {fault.path for fault in faults} == {"strategy.n", "fallback", "generation.num_beams"}


def test_innermost() -> None:
    recipe = load_recipe({"strategy": {"kind": "beam", "inner": "dola"}})
    assert innermost(recipe.strategy).kind == "dola"
