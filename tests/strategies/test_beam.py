import itertools

import pytest
import torch

import decodekit
from decodekit.core.errors import RecipeError, Refused
from decodekit.strategies.beam import Beam
from decodekit.testing import check_strategy, tiny_model
from tests.strategies.golden import DEMO, TINY, golden_model, left_pad, prompt_ids

pytestmark = pytest.mark.integration


def beams(settings: dict) -> tuple[dict, dict]:
    own = ("num_beams", "num_beam_groups", "diversity_penalty")
    return {name: settings[name] for name in own if name in settings}, {
        name: value for name, value in settings.items() if name not in own
    }


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("run", ["beam4", "beam4_nrs", "beam_group"])
def test_tokens_and_scores_are_those_of_transformers(name: str, run: str) -> None:
    model, golden = golden_model(name), TINY[name]["runs"][run]
    strategy, options = beams(golden["settings"])
    decoder = decodekit.strategy("beam", **strategy)
    for single in golden["single"]:
        ids = torch.tensor([single["prompt"]])
        out = model.generate(
            ids,
            custom_generate=decoder,
            num_beams=4,
            max_new_tokens=24,
            eos_token_id=1,
            pad_token_id=0,
            return_dict_in_generate=True,
            **options,
        )
        tokens = [[token for token in row if token] for row in out.sequences[:, ids.shape[1] :].tolist()]
        assert tokens == [[token for token in row if token] for row in single["new_ids"]]
        torch.testing.assert_close(out.sequences_scores, torch.tensor(single["sequences_scores"]), atol=2e-5, rtol=1e-5)


def test_the_demo_models_beams_are_those_of_transformers(demo) -> None:
    for row in DEMO["single"]["beam4"]["rows"]:
        ids = prompt_ids(row["prompt"])
        out = demo[0].generate(
            ids, custom_generate=decodekit.strategy("beam"), max_new_tokens=16, eos_token_id=2, pad_token_id=1
        )
        assert out[0, ids.shape[1] :].tolist() == row["new_ids"]


@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"length_penalty": 2.0},
        {"length_penalty": 0.0, "early_stopping": True},
        {"early_stopping": "never"},
        {"repetition_penalty": 1.0, "num_return_sequences": 3},
        {"eos_token_id": list(range(20))},
    ],
    ids=str,
)
def test_a_padded_batch_gives_what_each_prompt_gets_from_transformers_alone(family, options) -> None:
    model = tiny_model(family, dtype=torch.float64)
    prompts = TINY["tied10"]["prompts"]
    options = {"num_beams": 3, "max_new_tokens": 10, "pad_token_id": 0, **options}
    inputs = left_pad(prompts)
    out = model.generate(**inputs, custom_generate=decodekit.strategy("beam"), **options)
    copies = options.get("num_return_sequences", 1)
    for row, prompt in enumerate(prompts):
        expected = model.generate(torch.tensor([prompt]), **options)[:, len(prompt) :]
        found = out[row * copies : (row + 1) * copies, inputs["input_ids"].shape[1] :]
        assert torch.equal(found[:, : expected.shape[1]], expected)
        assert not found[:, expected.shape[1] :].any()


def test_laws() -> None:
    check_strategy(Beam(num_beams=3))
    check_strategy(Beam(num_beams=4, num_beam_groups=2, diversity_penalty=0.7), families=("dense",))


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_wide_enough_it_finds_the_best_output_there_is(length_penalty) -> None:
    model, prompt = tiny_model("dense", vocab_size=5, dtype=torch.float64), [3, 4, 2]

    def score(output: tuple[int, ...]) -> float:
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        return float(logits.log_softmax(-1)[range(len(output)), output].sum()) / len(output) ** length_penalty

    def ended(output: tuple[int, ...]) -> bool:
        return 1 not in output[:-1] and (len(output) == 3 or output[-1] == 1)

    every = [own for count in (1, 2, 3) for own in itertools.product(range(5), repeat=count) if ended(own)]
    decoder = decodekit.strategy("beam", num_beams=125, length_penalty=length_penalty, early_stopping="never")
    out = model.generate(
        torch.tensor([prompt]), custom_generate=decoder, max_new_tokens=3, return_dict_in_generate=True, eos_token_id=1
    )
    best = max(every, key=score)
    assert tuple(out.sequences[0, 3 : 3 + len(best)].tolist()) == best
    assert out.sequences_scores[0].item() == pytest.approx(score(best), abs=1e-6)


def test_scores_are_reproduced_from_the_returned_parts(dense, tokenizer) -> None:
    decoder = decodekit.load(
        {"strategy": {"kind": "beam", "length_penalty": 0.7}, "generation": {"num_return_sequences": 4}}
    )
    outputs = decoder.run(dense, tokenizer, ["Who won?"], max_new_tokens=8)
    assert [own["score"] for own in outputs[0].candidates][:4] == sorted(
        (sum(output.logprobs) / len(output.token_ids) ** 0.7 for output in outputs), reverse=True
    )
    prompt = tokenizer("Who won?").input_ids
    for output in outputs:
        logits = dense(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
        uncached = logits.log_softmax(-1)[range(len(output.token_ids)), output.token_ids]
        torch.testing.assert_close(torch.tensor(output.logprobs, dtype=uncached.dtype), uncached, atol=1e-5, rtol=1e-5)


def test_beams_share_their_prompt(dense, tokenizer) -> None:
    [output] = decodekit.strategy("beam", num_beams=4).run(
        dense, tokenizer, ["Who won the game?"], max_new_tokens=6, eos_token_id=None
    )
    prompt = len(tokenizer("Who won the game?").input_ids)
    assert output.stats["forwarded_tokens"] == prompt + 4 * 5


def test_rules_and_stop_strings_hold_for_every_beam(dense, tokenizer) -> None:
    plain = decodekit.strategy("beam").run(dense, tokenizer, ["Who won?"], max_new_tokens=12)[0]
    banned = plain.token_ids[3]
    decoder = decodekit.load({"strategy": "beam", "rules": [{"kind": "bad_words", "ids": [[banned]]}]})
    outputs = decoder.run(dense, tokenizer, ["Who won?", "a"], max_new_tokens=12, num_return_sequences=4, num_beams=4)
    assert len(outputs) == 8
    assert all(banned not in output.token_ids for output in outputs)
    stop = plain.text[2:4]
    [output] = decodekit.strategy("beam").run(
        dense, tokenizer, ["Who won?"], max_new_tokens=12, stop_strings=[stop], num_beams=1
    )
    assert stop not in output.text


def test_samples_are_reproducible_and_differ_between_seeds(dense, tokenizer) -> None:
    decoder = decodekit.load({"strategy": "beam", "generation": {"do_sample": True, "max_new_tokens": 8}})
    prompts = ["Who won?", "a", "Is it so?"]
    first, again = (decoder.run(dense, tokenizer, prompts, seed=3) for _ in range(2))
    assert [own.token_ids for own in first] == [own.token_ids for own in again]
    assert [own.token_ids for own in first] != [own.token_ids for own in decoder.run(dense, tokenizer, prompts, seed=4)]
    assert decoder.run(dense, tokenizer, prompts[1:2], seed=3)[0].token_ids == first[1].token_ids


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(RecipeError, match="does not divide"):
        decodekit.load({"strategy": {"kind": "beam", "num_beams": 4, "num_beam_groups": 3}})
    with pytest.raises(RecipeError, match="dynamic cache cannot"):
        decodekit.load({"strategy": "beam", "cache": "dynamic"})
    model, ids = tiny_model("dense"), torch.tensor([[5, 6]])
    with pytest.raises(RecipeError, match="5 outputs are more than the 4 that 'beam' chooses between"):
        decodekit.load({"strategy": "beam", "generation": {"num_return_sequences": 5}})
    with pytest.raises(Refused, match="use_cache is off"):
        model.generate(ids, custom_generate=decodekit.strategy("beam"), use_cache=False, max_new_tokens=3)


@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
def test_one_beam_is_greedy_decoding_also_where_rows_end_early(family) -> None:
    model, inputs = tiny_model(family, dtype=torch.float64), left_pad(TINY["tied10"]["prompts"])
    options = {"max_new_tokens": 12, "eos_token_id": list(range(20)), "pad_token_id": 0}
    greedy = model.generate(**inputs, custom_generate=decodekit.load({}), **options)
    single = decodekit.strategy("beam", num_beams=1)
    assert torch.equal(model.generate(**inputs, custom_generate=single, **options), greedy)
