import pytest
import torch
from pydantic import ValidationError

from decodekit.core.errors import Refused
from decodekit.core.sublayers import with_layers
from decodekit.drafters.layer_skip import LayerSkip, search
from decodekit.testing import tiny_model
from decodekit.testing.values import check_value
from tests.drafters.making import OPEN, PROMPTS, accepted, decode, few, ids


@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
@pytest.mark.parametrize("layers", [{"first": 2}, {"skip": [2]}])
def test_greedy_tokens_are_those_of_plain_decoding(family, layers) -> None:
    model, drafter = few(family), {"kind": "layer_skip", "schedule": "constant", **layers}
    plain = ids(decode(model, generation=OPEN))
    outputs = decode(model, drafter, generation=OPEN)
    assert ids(outputs) == plain
    assert accepted(outputs) > 0
    [alone] = decode(model, drafter, PROMPTS[2:], generation=OPEN)
    assert alone.token_ids == plain[2]


@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
def test_the_first_layers_read_out_are_the_models_own(family) -> None:
    model = tiny_model(family, dtype=torch.float64)
    ids = torch.tensor([[5, 17, 42, 8, 9, 30, 61, 77, 12, 4]])
    hidden = model(ids, output_hidden_states=True).hidden_states[2]
    expected = model.get_output_embeddings()(model.get_decoder().norm(hidden))
    torch.testing.assert_close(with_layers(model, [0, 1])(ids).logits, expected)
    weights = {id(weight) for weight in model.parameters()}
    assert {id(weight) for weight in with_layers(model, [0, 1]).parameters()} < weights
    assert model.config.num_hidden_layers == 4


def test_samples_of_the_same_seed_are_reproduced() -> None:
    generation = {"do_sample": True, "seed": 3}
    drafter = {"kind": "layer_skip", "first": 3}
    [one, two] = [ids(decode(few("dense"), drafter, generation=generation)) for _ in range(2)]
    assert one == two
    assert ids(decode(few("dense"), drafter, PROMPTS[1:2], generation=generation)) == [one[1]]


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("dense", {"first": 4}, "first: 4 leaves no part of 4 layers"),
        ("dense", {"skip": [7]}, r"skip: \[7\] leaves no part"),
        ("hybrid", {"first": 1}, "all recurrent"),
    ],
)
def test_what_cannot_be_skipped_is_refused(family, options, why) -> None:
    with pytest.raises(Refused, match=why):
        decode(few(family), {"kind": "layer_skip", **options})


def test_skip_or_first_has_to_be_given() -> None:
    for options in ({}, {"first": 2, "skip": (1,)}):
        with pytest.raises(ValidationError, match="give either skip"):
            LayerSkip(**options)
    check_value(LayerSkip(skip=(1, 2)))


def test_search_finds_layers_that_do_nothing() -> None:
    model = tiny_model("dense", dtype=torch.float64)
    for layer in (1, 2):
        model.model.layers[layer].self_attn.o_proj.weight.data.zero_()
        model.model.layers[layer].mlp.down_proj.weight.data.zero_()
    assert search(model, [[5, 17, 42, 8] * 8, [9, 30, 61] * 5], trials=40) == (1, 2)
