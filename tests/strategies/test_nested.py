"""Token-level strategies inside sequence-level ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import decodekit
from decodekit.core.errors import InputError, RecipeError
from decodekit.recipe.costs import cost_of
from decodekit.testing import tiny_model

pytestmark = pytest.mark.integration

PROMPTS = [
    {"prompt": "Who won?", "context": "Ann won it in 2031."},
    {"prompt": "a", "context": "b"},
    {"prompt": "The other one: 1 + 2 = ", "context": "So it is."},
]
OUTER: dict[str, dict[str, Any]] = {
    "self_consistency": {"extract": {"kind": "regex", "pattern": "[a-z]"}},
    "mbr": {"utility": "chrf"},
    "best_of_n": {"scorer": "logprob"},
}
INNER: dict[str, tuple[dict[str, Any], int]] = {
    "cad": ({"kind": "cad", "alpha": 0.5}, 2),
    "dola": ({"kind": "dola", "layers": [0, 1, 2]}, 1),
    "contrastive_decoding": ({"kind": "contrastive_decoding", "amateur": "small", "alpha": 0.01}, 2),
}


@pytest.mark.parametrize(
    ("outer", "inner"),
    [("self_consistency", "cad"), ("mbr", "dola"), ("mbr", "contrastive_decoding"), ("best_of_n", "cad")],
)
def test_candidates_are_the_samples_of_the_inner_strategy_at_the_cost_that_check_names(
    model, tokenizer, outer, inner
) -> None:
    strategy, branches = INNER[inner]
    models = {"small": tiny_model("dense", layers=2, dtype=torch.float64, seed=1)}
    generation = {"do_sample": True, "seed": 2, "max_new_tokens": 6, "suppress_tokens": [1]}
    rules = [{"kind": "temperature", "t": 2.0}]
    nested = decodekit.load(
        {
            "strategy": {"kind": outer, "n": 3, "inner": strategy, **OUTER[outer]},
            "rules": rules,
            "generation": generation,
        }
    ).bind(models=models)
    alone = decodekit.load({"strategy": strategy, "rules": rules, "generation": generation}).bind(models=models)
    outputs = nested.run(model, tokenizer, PROMPTS)
    samples = alone.run(model, tokenizer, PROMPTS, num_return_sequences=3)
    single = [alone.run(model, tokenizer, prompt)[0].stats["forwarded_tokens"] for prompt in PROMPTS]
    assert len({tuple(sample.token_ids) for sample in samples}) > 4
    for place, output in enumerate(outputs):
        own = samples[3 * place : 3 * place + 3]
        assert [told["token_ids"] for told in output.candidates] == [sample.token_ids for sample in own]
        # Each prompt once, then every candidate in every branch.
        prompts = single[place] - branches * 5
        assert output.stats["forwarded_tokens"] == prompts + cost_of(nested.recipe).forwarded_tokens * 5
        assert cost_of(nested.recipe).forwarded_tokens == 3 * branches


def test_what_the_inner_strategy_needs_is_asked_for(dense, tokenizer) -> None:
    voting = decodekit.strategy("self_consistency", n=2, inner="cad")
    good, bad = voting.run(dense, tokenizer, [PROMPTS[0], "a"], do_sample=True, seed=0, max_new_tokens=3)
    assert good.error is None
    assert "cad needs 'context' for prompt 1" in bad.error
    contrasting = decodekit.strategy("mbr", n=2, utility="exact", inner=INNER["contrastive_decoding"][0])
    with pytest.raises(InputError, match="needs a model called 'small'"):
        contrasting.run(dense, tokenizer, "a", do_sample=True)
    with pytest.raises(RecipeError, match="'beam' is a SearchStrategy, not a TokenStrategy"):
        decodekit.load({"strategy": {"kind": "mbr", "utility": "exact", "inner": "beam"}})


def test_dola_under_a_json_constraint_keeps_to_it(dense, tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    recipe = {
        "strategy": {"kind": "dola", "relative_top": 0.0},
        "constraint": {"kind": "json_schema", "schema": schema},
    }
    for output in decodekit.load(recipe).run(dense, tokenizer, ["Who won?", "a"], max_new_tokens=40):
        assert output.error is None
        assert decodekit.accepts(decodekit.load(recipe).recipe.constraint, output.text, tokenizer)
