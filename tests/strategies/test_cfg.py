import pytest
import torch

import decodekit
from decodekit.core.errors import InputError, RowError
from decodekit.core.types import BranchOutputs, Outputs
from decodekit.strategies.cfg import ClassifierFree
from decodekit.testing import check_strategy
from tests.strategies.golden import DEMO, TINY, golden_model, left_pad, representative

pytestmark = pytest.mark.integration

RUNS = {"cfg15": None, "cfg3neg": [7, 21, 33]}
OPTIONS = {"max_new_tokens": 24, "eos_token_id": 1, "pad_token_id": 0}


@pytest.mark.parametrize("inputs", [{}, {"negative_prompt": "No, never."}], ids=str)
def test_obeys_the_laws_of_a_strategy(inputs) -> None:
    check_strategy(ClassifierFree(guidance_scale=2.5), inputs=inputs)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("run", RUNS)
def test_gives_the_tokens_and_scores_of_transformers(name, run) -> None:
    model, golden = golden_model(name), TINY[name]["runs"][run]
    decoder = decodekit.strategy("cfg", guidance_scale=golden["settings"]["guidance_scale"])
    inputs = {} if RUNS[run] is None else {"negative_prompt": RUNS[run]}
    for single in golden["single"]:
        output = model.generate(
            torch.tensor([single["prompt"]]),
            custom_generate=decoder,
            dk_inputs=[inputs],
            return_dict_in_generate=True,
            output_scores=True,
            **OPTIONS,
        )
        assert output.sequences[0, len(single["prompt"]) :].tolist() == single["new_ids"][0]
        best = torch.stack([scores.max() for scores in output.scores])
        torch.testing.assert_close(best, torch.tensor(single["step_max_score"]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("run", RUNS)
def test_gives_every_row_of_a_batch_its_solo_run(name, run) -> None:
    golden, prompts = TINY[name]["runs"][run], TINY[name]["prompts"]
    decoder = decodekit.strategy("cfg", guidance_scale=golden["settings"]["guidance_scale"])
    inputs = {} if RUNS[run] is None else {"negative_prompt": RUNS[run]}
    ours = golden_model(name, torch.float64).generate(
        **left_pad(prompts), custom_generate=decoder, dk_inputs=[inputs] * len(prompts), **OPTIONS
    )
    for row, single in zip(ours[:, max(map(len, prompts)) :].tolist(), golden["single"], strict=True):
        [solo] = single["new_ids"]
        assert row == solo + [0] * (24 - len(solo))


@pytest.mark.parametrize(
    "case",
    representative(DEMO["cfg"], DEMO["cfg"][::7]),
    ids=lambda case: f"{case['guidance_scale']}-{case['negative_prompt']}",
)
def test_gives_the_tokens_of_the_demo_model(demo, case) -> None:
    model, tokenizer = demo
    ids = tokenizer(case["prompt"], return_tensors="pt").input_ids
    output = model.generate(
        ids,
        custom_generate=decodekit.strategy("cfg", guidance_scale=case["guidance_scale"]),
        dk_inputs=[{"negative_prompt": case["negative_ids"]} if case["negative_ids"] else {}],
        max_new_tokens=16,
        eos_token_id=2,
        pad_token_id=1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert output.sequences[0, ids.shape[1] :].tolist() == case["new_ids"]
    values, tokens = output.scores[0][0].topk(5)
    assert tokens.tolist() == [token for token, _ in case["step0_top5"]]
    assert values.tolist() == pytest.approx([value for _, value in case["step0_top5"]], abs=1e-3)


# --- what generate itself is given


def test_the_guidance_of_generate_sets_the_strategy(padded_prompts) -> None:
    """Negative prompts of two lengths, padded and masked, as transformers takes them."""
    model = golden_model("untied8", torch.float64)
    negatives = {
        "negative_prompt_ids": torch.tensor([[0, 0, 7, 21, 33], [0, 44, 45, 46, 47]]),
        "negative_prompt_attention_mask": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]),
    }
    decoder = decodekit.strategy("cfg", guidance_scale=1.1)
    ours = model.generate(
        **padded_prompts, **negatives, guidance_scale=3.0, custom_generate=decoder, max_new_tokens=9, eos_token_id=None
    )
    expected = model.generate(
        **padded_prompts,
        custom_generate=decodekit.strategy("cfg", guidance_scale=3.0),
        dk_inputs=[{"negative_prompt": [7, 21, 33]}, {"negative_prompt": [44, 45, 46, 47]}],
        max_new_tokens=9,
        eos_token_id=None,
    )
    assert torch.equal(ours, expected)
    other = model.generate(**padded_prompts, custom_generate=decoder, max_new_tokens=9, eos_token_id=None)
    assert not torch.equal(ours, other)


def test_one_negative_prompt_serves_all_rows_and_another_number_is_refused(padded_prompts) -> None:
    model, decoder = golden_model("untied8", torch.float64), decodekit.strategy("cfg")
    options = {"guidance_scale": 3.0, "max_new_tokens": 5, "eos_token_id": None}
    one = model.generate(
        **padded_prompts, **options, negative_prompt_ids=torch.tensor([[7, 21, 33]]), custom_generate=decoder
    )
    both = model.generate(
        **padded_prompts, **options, custom_generate=decoder, dk_inputs=[{"negative_prompt": [7, 21, 33]}] * 2
    )
    assert torch.equal(one, both)
    with pytest.raises(InputError, match="negative_prompt_ids has 3 rows; expected 1 or one a prompt, 2"):
        model.generate(
            **padded_prompts, **options, negative_prompt_ids=torch.ones(3, 2).long(), custom_generate=decoder
        )


@pytest.fixture
def padded_prompts():
    return left_pad([[5, 17, 42, 8], [50, 3]])


# --- negative prompts


def test_a_negative_prompt_is_a_prompt_of_its_own(model, tokenizer) -> None:
    [ours] = decodekit.strategy("cfg", guidance_scale=2.0, negative_prompt="No, never.").run(
        model, tokenizer, ["Who won?"], max_new_tokens=6
    )
    given, negative = tokenizer("Who won?").input_ids, tokenizer("No, never.").input_ids
    for token in ours.token_ids:
        with torch.no_grad():
            c, u = (model(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in (given, negative))
        assert token == int((u + 2.0 * (c - u)).argmax())
        given, negative = [*given, token], [*negative, token]


@pytest.mark.parametrize(
    ("negative", "message"),
    [
        ("", "cfg: the negative_prompt of prompt 0 is empty; give at least one word"),
        ([1.5], r"cfg: the negative_prompt of prompt 0 should be a text or a list of token ids, got \[1.5\]"),
        ("No.", "cfg needs a tokenizer; give dk_tokenizer=tokenizer"),
    ],
)
def test_a_negative_prompt_that_cannot_be_used_is_one_clear_line(dense, negative, message) -> None:
    with pytest.raises(RowError, match=message):
        dense.generate(
            torch.tensor([[5, 6]]),
            custom_generate=decodekit.strategy("cfg"),
            dk_inputs=[{"negative_prompt": negative}],
        )


def test_scale_1_is_greedy_decoding_and_0_decodes_the_negative_prompt(model, tokenizer) -> None:
    options = {"max_new_tokens": 8}
    plain, other = decodekit.load({}).run(model, tokenizer, ["Who won?", "No, never."], **options)
    one, zero = (
        decodekit.strategy("cfg", guidance_scale=scale, negative_prompt="No, never.").run(
            model, tokenizer, "Who won?", **options
        )[0]
        for scale in (1, 0)
    )
    assert one.token_ids == plain.token_ids
    assert zero.token_ids == other.token_ids


def test_each_branch_forwards_each_token_once(model, tokenizer) -> None:
    prompt = len(tokenizer("Who won?").input_ids)
    decoder = decodekit.load({"strategy": "cfg", "generation": {"suppress_tokens": [1]}})
    for new in (1, 5, 9):
        [output] = decoder.run(model, tokenizer, ["Who won?"], max_new_tokens=new)
        assert output.stats["forwarded_tokens"] == prompt + 1 + 2 * (new - 1)


def test_a_token_that_the_model_excludes_stays_excluded() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 0.0]])
    outputs = Outputs({"main": BranchOutputs(logits), "negative": BranchOutputs(logits)})
    torch.testing.assert_close(ClassifierFree(guidance_scale=3).score(outputs), logits.log_softmax(-1))
