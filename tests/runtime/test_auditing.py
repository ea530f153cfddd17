"""Audits find what is wrong, nothing where all is right, and change no token."""

import pytest
import torch

import decodekit
from decodekit.core.errors import RecipeError, Refused
from decodekit.testing import tiny_model
from decodekit.testing.mutants import planted
from decodekit.testing.mutants.faults import FAULTS

pytestmark = pytest.mark.integration

PROMPTS = ["Who won?", "a", "The other one, please: 1 + 2 = "]
OPTIONS = {"raw": True, "max_new_tokens": 12, "eos_token_id": None}

RECIPES = [
    {},
    {"cache": {"kind": "dynamic"}},
    {"strategy": {"kind": "cfg", "guidance_scale": 2.0}},
    {"strategy": {"kind": "beam", "num_beams": 3}},
    {"strategy": {"kind": "self_consistency", "n": 3}, "generation": {"do_sample": True, "seed": 0}},
    {"drafter": {"kind": "ngram", "schedule": "constant"}},
]


def decode(model, tokenizer, recipe, prompts=PROMPTS, **options):
    return decodekit.load(recipe).run(model, tokenizer, prompts, **{**OPTIONS, **options})


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_what_is_right_has_a_clean_certificate(model, tokenizer, recipe) -> None:
    plain = decode(model, tokenizer, recipe)
    audited = decode(model, tokenizer, {**recipe, "audit": 1})
    assert [own.token_ids for own in audited] == [own.token_ids for own in plain]
    for output in audited:
        certificate = output.stats["audit"]
        assert certificate["steps"] >= 12
        assert certificate["worst_difference"] < 1e-3
        assert all(flip["margin"] < 1e-3 for flip in certificate["flips"])
    assert all("audit" not in output.stats for output in plain)


def test_a_share_of_the_steps_is_audited_the_same_in_any_batch(dense, tokenizer) -> None:
    recipe = {"audit": 0.3, "generation": {"seed": 1}}
    outputs = decode(dense, tokenizer, recipe, max_new_tokens=60)
    steps = [output.stats["audit"]["steps"] for output in outputs]
    assert 30 < sum(steps) < 80
    assert steps == [
        decode(dense, tokenizer, recipe, [own], max_new_tokens=60)[0].stats["audit"]["steps"] for own in PROMPTS
    ]


@pytest.mark.parametrize(
    ("fault", "family"),
    [
        ("a window is gathered a token short", "sliding"),
        ("the mask is one short", "dense"),
    ],
)
def test_a_fault_shows_with_its_flips_and_margins(tokenizer, fault, family) -> None:
    model = tiny_model(family, dtype=torch.float64)
    [mutant] = [own for own in FAULTS if own.name == fault]
    with planted(mutant):
        outputs = decode(model, tokenizer, {"audit": 1, "cache": {"kind": "paged"}})
    worst = max(outputs, key=lambda output: output.stats["audit"]["worst_difference"]).stats["audit"]
    assert worst["worst_difference"] > 0.1
    for flip in worst["flips"]:
        assert flip["branch"] == "main"
        assert flip["cached"] != flip["uncached"]
        assert flip["margin"] > 0


def test_what_cannot_be_repeated_is_refused(dense) -> None:
    with pytest.raises(RecipeError, match="audit: without a cache nothing forgets what a window drops"):
        decodekit.load({"audit": 0.1, "cache": {"kind": "paged", "window": 8}})
    cache = decodekit.PagedCache(dense.config, num_blocks=16, window=8)
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(Refused, match="this cache has a window"):
        dense.generate(ids, past_key_values=cache, custom_generate=decodekit.load({"audit": 0.1}), max_new_tokens=4)
    with pytest.raises(RecipeError, match="audit"):
        decodekit.load({"audit": 2})
