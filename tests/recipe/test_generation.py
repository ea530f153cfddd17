from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from decodekit.core.errors import RecipeError
from decodekit.recipe import Generation, load_recipe


def generation(**named: Any) -> Generation:
    return load_recipe({"generation": named}).generation


def test_every_option_is_one_of_transformers_or_the_seed() -> None:
    from transformers import GenerationConfig

    known = set(vars(GenerationConfig()))
    assert set(Generation.model_fields) - known == {"seed"}
    assert set(Generation.elsewhere) <= known
    assert not set(Generation.elsewhere) & set(Generation.model_fields)


def test_every_option_is_described() -> None:
    assert all(field.description for field in Generation.model_fields.values())


def test_only_what_is_named_is_set() -> None:
    options = generation(top_k=0, do_sample=False, seed=None)
    assert options.model_dump(exclude_unset=True) == {"top_k": 0, "do_sample": False}
    assert repr(options) == "Generation(do_sample=False, top_k=0)"


def test_values_have_the_types_that_transformers_asks_for() -> None:
    from transformers.generation.logits_process import SequenceBiasLogitsProcessor

    options = generation(repetition_penalty=1, sequence_bias=[[[1, 2], 3]], exponential_decay_length_penalty=[5, 2])
    assert isinstance(options.repetition_penalty, float)
    assert options.exponential_decay_length_penalty == (5, 2.0)
    SequenceBiasLogitsProcessor([list(pair) for pair in options.sequence_bias or []])
    SequenceBiasLogitsProcessor(options.sequence_bias)


@pytest.mark.parametrize(
    "named",
    [
        {"max_new_tokens": 1, "min_new_tokens": 0, "max_time": 0.5},
        {"top_p": 1.0, "top_k": 0, "min_p": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0.1, "top_h": 0.3},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"stop_strings": "END"},
        {"stop_strings": ["a", "b"]},
        {"eos_token_id": 2},
        {"eos_token_id": [2, 3]},
        {"bad_words_ids": [[1], [2, 3]]},
        {"suppress_tokens": []},
    ],
)
def test_accepted(named: dict[str, Any]) -> None:
    assert generation(**named).model_dump(exclude_unset=True) == named


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: should be greater than or equal to 1, got 0"),
        ({"max_new_tokens": "10"}, "max_new_tokens: should be a number, got the text '10'; leave the quotes out"),
        ({"max_new_tokens": 10.0}, "max_new_tokens: should be a valid integer, got 10.0"),
        ({"max_new_tokens": True}, "max_new_tokens: should be a valid integer, got true"),
        ({"max_time": 0}, "max_time: should be greater than 0, got 0"),
        ({"do_sample": "yes"}, "do_sample: should be true or false, got 'yes'"),
        ({"do_sample": 1}, "do_sample: should be true or false, got 1"),
        ({"temperature": 0}, "temperature: should be greater than 0, got 0; greedy decoding is do_sample: false"),
        ({"temperature": 0.0}, "temperature: should be greater than 0, got 0; greedy decoding is do_sample: false"),
        ({"temperature": -1}, "temperature: should be greater than 0, got -1"),
        ({"temperature": False}, "temperature: should be a valid number, got false"),
        ({"top_p": 0}, "top_p: should be greater than 0, got 0"),
        ({"top_p": 1.01}, "top_p: should be less than or equal to 1, got 1.01"),
        ({"top_k": -1}, "top_k: should be greater than or equal to 0, got -1"),
        ({"seed": -1}, "seed: should be greater than or equal to 0, got -1"),
        ({"seed": 2**64}, "seed: should be less than 18446744073709551616, got 18446744073709551616"),
        ({"repetition_penalty": 0}, "repetition_penalty: should be greater than 0, got 0"),
        ({"stop_strings": [""]}, "stop_strings.0: should have at least 1 character, got ''"),
        ({"stop_strings": 3}, "stop_strings: should be a valid string or list, got 3"),
        ({"eos_token_id": "</s>"}, "eos_token_id: should be a valid integer or list, got '</s>'"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id.1: should be a valid integer, got 'x'"),
        ({"bad_words_ids": [[]]}, "bad_words_ids.0: should have at least 1 item"),
        ({"sequence_bias": [[[1], "x"]]}, "sequence_bias.0.1: should be a valid number, got 'x'"),
        ({"temprature": 1}, "temprature: unknown option: did you mean 'temperature'?"),
        ({"dola_layers": "low"}, "dola_layers: no option here: write strategy: {kind: dola} instead"),
    ],
)
def test_refused(named: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(f"recipe: generation.{message}")):
        generation(**named)


def test_names_do_not_clash_with_the_sections() -> None:
    from decodekit.recipe import Recipe

    assert not set(Recipe.model_fields) & set(Generation.model_fields)
    assert inspect.getdoc(Generation)
