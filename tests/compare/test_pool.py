import pytest

import decodekit
from decodekit.compare.pool import MOST, TEMPERATURE, draws_plain_samples, lacking, price, sampler, samples_of
from decodekit.recipe import load_recipe

OPTIONS = {"max_new_tokens": 8, "eos_token_id": 96}
VOTE = {
    "strategy": {"kind": "mbr", "n": 3, "utility": "exact"},
    "rules": [{"kind": "temperature", "t": TEMPERATURE}],
    "generation": {**OPTIONS, "do_sample": True, "seed": 5},
}


def sample(tokens):
    return {"text": "", "tokens": tokens, "score": 0.0}


def test_candidates_of_the_same_distribution_are_plain_samples() -> None:
    plain = sampler(OPTIONS)
    assert draws_plain_samples(load_recipe(VOTE), plain)
    for change in (
        {"strategy": {"kind": "sample"}},
        {"strategy": {**VOTE["strategy"], "inner": {"kind": "dola"}}},
        {"rules": [{"kind": "temperature", "t": 0.8}]},
        {"rules": [*VOTE["rules"], {"kind": "top_p", "p": 0.9}]},
        {"generation": {**VOTE["generation"], "max_new_tokens": 9}},
        {"constraint": {"kind": "regex", "pattern": "a*"}},
        {"drafter": {"kind": "ngram"}},
    ):
        assert not draws_plain_samples(load_recipe({**VOTE, **change}), plain), change


def test_candidates_have_the_score_that_plain_samples_are_chosen_by(dense, tokenizer) -> None:
    [vote] = decodekit.load(VOTE).run(dense, tokenizer, "Who won?")
    scored = {**VOTE, "strategy": {"kind": "best_of_n", "n": 3, "scorer": "logprob"}}
    [best] = decodekit.load(scored).run(dense, tokenizer, "Who won?")
    samples = samples_of(vote)
    assert [own["text"] for own in samples] == [own["text"] for own in best.candidates]
    assert [own["score"] for own in samples] == pytest.approx([own["score"] for own in best.candidates])
    assert [own["tokens"] for own in samples] == [len(own["token_ids"]) for own in best.candidates]


def test_candidates_that_were_cancelled_leave_no_samples(dense, tokenizer) -> None:
    pruned = {"kind": "best_of_n", "n": 4, "scorer": "logprob", "pruning": {"every": 2}}
    [output] = decodekit.load({**VOTE, "strategy": pruned}).run(dense, tokenizer, "Who won?")
    assert "cancelled" in [own["finish_reason"] for own in output.candidates]
    assert samples_of(output) == []


def test_samples_are_drawn_until_the_budget_is_spent() -> None:
    assert price(10, [sample(5), sample(1), sample(0)]) == 14
    # Without samples a plain output tells their length.
    assert lacking([], budget=50, prompt_tokens=10, output_tokens=11) == 4
    assert lacking([sample(21)], budget=50, prompt_tokens=10, output_tokens=11) == 1
    assert lacking([sample(21), sample(21)], budget=50, prompt_tokens=10, output_tokens=11) == 0
    # One that does not fit any more is what tells that it does not.
    assert lacking([sample(21), sample(20)], budget=50, prompt_tokens=10, output_tokens=11) == 1
    assert lacking([], budget=10, prompt_tokens=10, output_tokens=11) == 0
    assert lacking([], budget=10**6, prompt_tokens=10, output_tokens=1) == MOST
    assert lacking([sample(2)] * MOST, budget=10**6, prompt_tokens=10, output_tokens=1) == 0
