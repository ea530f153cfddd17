import itertools

import pytest
import torch

import decodekit
from decodekit.core.errors import InputError, RecipeError, RowError
from decodekit.strategies.constrained_beam import ConstrainedBeam
from decodekit.testing import check_strategy, tiny_model
from tests.strategies.golden import TINY, left_pad


def holds(output, phrase) -> bool:
    return any(list(output[start : start + len(phrase)]) == list(phrase) for start in range(len(output)))


@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
def test_every_output_holds_all_phrases(family) -> None:
    model, prompts = tiny_model(family, dtype=torch.float64), TINY["tied10"]["prompts"]
    inputs = left_pad(prompts)
    decoder = decodekit.load(
        {
            "strategy": {"kind": "constrained_beam", "ids": [[[30, 31, 32]], [[50], [51, 52]]], "num_beams": 6},
            "generation": {"max_new_tokens": 12, "num_return_sequences": 2},
        }
    )
    out = model.generate(**inputs, custom_generate=decoder)[:, inputs["input_ids"].shape[1] :].tolist()
    assert len(out) == 2 * len(prompts)
    for row in out:
        assert holds(row, [30, 31, 32])
        assert holds(row, [50]) or holds(row, [51, 52])


def test_laws() -> None:
    check_strategy(ConstrainedBeam(phrases=("the", ("cat", "dog"))), new_tokens=10)


@pytest.mark.parametrize("phrases", [[[[3, 4]]], [[[2]], [[4, 4], [3]]], [[[4, 4, 2]]]])
def test_wide_enough_it_finds_the_best_output_that_holds_them(phrases) -> None:
    model, prompt = tiny_model("dense", vocab_size=5, dtype=torch.float64), [3, 4, 2]

    def score(output: tuple[int, ...]) -> float:
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        return float(logits.log_softmax(-1)[range(len(output)), output].sum()) / len(output)

    every = [
        own
        for count in (1, 2, 3)
        for own in itertools.product(range(5), repeat=count)
        if 1 not in own[:-1]
        and (count == 3 or own[-1] == 1)
        and all(any(holds(own, ids) for ids in phrase) for phrase in phrases)
    ]
    decoder = decodekit.strategy("constrained_beam", ids=phrases, num_beams=125, early_stopping="never")
    out = model.generate(
        torch.tensor([prompt]), custom_generate=decoder, max_new_tokens=3, return_dict_in_generate=True, eos_token_id=1
    )
    best = max(every, key=score)
    assert tuple(out.sequences[0, 3 : 3 + len(best)].tolist()) == best
    assert out.sequences_scores[0].item() == pytest.approx(score(best), abs=1e-6)


def test_texts_are_found_with_and_without_a_space_before_them(dense, tokenizer) -> None:
    decoder = decodekit.strategy("constrained_beam", phrases=["the", ["cat", "dog"]])
    outputs = decoder.run(dense, tokenizer, ["Who won?", "a"], max_new_tokens=16)
    assert all("the" in output.text and ("cat" in output.text or "dog" in output.text) for output in outputs)


def test_what_cannot_be_met_is_said(dense, tokenizer) -> None:
    with pytest.raises(RecipeError, match="holds nothing"):
        decodekit.load({"strategy": "constrained_beam"})
    with pytest.raises(RowError, match="have 3 tokens, max_new_tokens is 2; raise it to 3"):
        dense.generate(
            torch.tensor([[5]]),
            custom_generate=decodekit.strategy("constrained_beam", ids=[[[7, 8, 9]]]),
            max_new_tokens=2,
        )
    with pytest.raises(InputError, match="token id 99 is not in the vocabulary"):
        dense.generate(torch.tensor([[5]]), custom_generate=decodekit.strategy("constrained_beam", ids=[[[99]]]))
    with pytest.raises(InputError, match="needs a tokenizer"):
        dense.generate(torch.tensor([[5]]), custom_generate=decodekit.strategy("constrained_beam", phrases=["a"]))
    rules = [{"kind": "bad_words", "ids": [[7]]}]
    decoder = decodekit.load({"strategy": {"kind": "constrained_beam", "ids": [[[7]]]}, "rules": rules})
    [output] = decoder.run(dense, tokenizer, ["Who won?"], max_new_tokens=5)
    assert output.finish_reason == "error"
    assert "none of 8 hypotheses holds all 1 required phrases after 5 tokens" in output.error
