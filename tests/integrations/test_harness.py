import math
from types import SimpleNamespace

import pytest
import torch

from decodekit.recipe import load_recipe

pytest.importorskip("lm_eval")

from decodekit.integrations.harness import HarnessModel


@pytest.fixture
def harness(dense, tokenizer):
    def make(recipe, **options):
        return HarnessModel(load_recipe(recipe), dense, tokenizer, **options)

    return make


def asked(*requests):
    return [SimpleNamespace(args=own) for own in requests]


def test_continuations_are_scored_as_the_recipe_decodes(harness, dense, tokenizer) -> None:
    model = harness({"generation": {"max_new_tokens": 4, "eos_token_id": 96}}, batch=2)
    pairs = [("Who won? ", "me"), ("Who won?", " me too"), ("", "a b"), ("a", "the")]
    found = model.loglikelihood(asked(*pairs))
    for (context, continuation), (logprob, greedy) in zip(pairs, found, strict=True):
        text = (context or tokenizer.bos_token) + continuation
        ids = tokenizer(text).input_ids
        known = len(tokenizer(context.rstrip() or tokenizer.bos_token).input_ids)
        logits = dense(torch.tensor([ids])).logits[0].log_softmax(-1)
        own = [logits[place - 1] for place in range(known, len(ids))]
        assert logprob == pytest.approx(sum(float(row[ids[known + at]]) for at, row in enumerate(own)), abs=1e-9)
        assert greedy == all(int(row.argmax()) == ids[known + at] for at, row in enumerate(own))
    ids = dense.generate(**tokenizer("a", return_tensors="pt"), max_new_tokens=3, do_sample=False, eos_token_id=96)[0]
    best = tokenizer.decode(ids[1:])
    if tokenizer("a" + best).input_ids == ids.tolist():
        assert model.loglikelihood(asked(("a", best)))[0][1]


def test_outputs_end_where_the_task_says(harness, dense, tokenizer) -> None:
    model = harness({"generation": {"eos_token_id": 96}})
    [free] = model.generate_until(asked(("Who won?", {"until": [], "max_gen_toks": 9})))
    stop = free[3]
    cut, short = model.generate_until(
        asked(("Who won?", {"until": [stop], "max_gen_toks": 9}), ("Who won?", {"until": stop, "max_gen_toks": 2}))
    )
    assert cut == free[: free.index(stop)]
    assert free.startswith(short)
    assert len(tokenizer(short).input_ids) == 2


def test_whole_texts_are_scored_in_windows(harness, dense, tokenizer) -> None:
    model = harness({"generation": {"max_new_tokens": 4}})
    text = "the one " * 3
    ids = [tokenizer.bos_token_id, *tokenizer(text).input_ids]
    logits = dense(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = sum(float(logits[place, token]) for place, token in enumerate(ids[1:]))
    [found] = model.loglikelihood_rolling(asked((text,)))
    assert found == pytest.approx(expected, abs=1e-8)
    assert math.isfinite(model.loglikelihood_rolling(asked(("the one " * 900,)))[0])
