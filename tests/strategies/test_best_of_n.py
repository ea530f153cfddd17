import math
from collections import Counter

import pytest
import torch

import decodekit
from decodekit.core.errors import InputError, RecipeError, RowError
from decodekit.core.protocols import Scorer
from decodekit.recipe import load_recipe
from decodekit.runtime.text_call import TextCall
from decodekit.strategies.best_of_n import BestOfN
from tests.strategies.candidates import Played, candidate
from tests.strategies.sequences import check_candidates


def length(prompt: str, text: str) -> float:
    return len(text)


def by(function) -> dict[str, object]:
    return {"kind": "python", "function": function}


def test_the_highest_score_wins_and_of_equal_ones_the_first() -> None:
    played = Played(BestOfN(n=4, scorer=by(length)), ["a", "ccc", "bbb", "dd"])
    assert played.ranking == [1, 2, 3, 0]
    assert played.decision.scores == {0: 1, 1: 3, 2: 3, 3: 2}


def test_the_scorer_is_given_the_prompt() -> None:
    played = Played(BestOfN(n=2, scorer=by(lambda prompt, text: text == prompt)), ["x", "y"], text="y")
    assert played.ranking == [1, 0]


def test_a_verifier_that_raises_costs_that_candidate_alone() -> None:
    played = Played(BestOfN(n=3, scorer=by(lambda prompt, text: 1 / int(text))), ["0", "2", "1"])
    assert played.ranking == [2, 1]
    assert played.decision.scores == {1: 0.5, 2: 1.0}
    assert played.decision.notes == {0: {"scorer_error": "ZeroDivisionError: division by zero"}}
    assert played.report["unscored"] == 1


def test_no_score_is_reported_too() -> None:
    played = Played(BestOfN(n=2, scorer=by(lambda prompt, text: None if text == "a" else 0)), ["a", "b"])
    assert played.ranking == [1]
    assert played.decision.notes == {0: {"scorer_error": "the scorer gave no number"}}


def test_if_no_candidate_has_a_score_the_prompt_fails_and_says_why() -> None:
    with pytest.raises(RowError, match="scorer 'python' gave none of 2 candidates a score: ZeroDivisionError"):
        Played(BestOfN(n=2, scorer=by(lambda prompt, text: 1 / 0)), ["a", "b"])
    with pytest.raises(RowError, match="none of 1 candidates could be decoded: it broke"):
        Played(BestOfN(n=1, scorer="logprob"), [None])


class TooFew(Scorer):
    kind: str = "too_few"

    def score(self, prompt, candidates):
        return [1.0]


def test_a_scorer_with_too_few_scores_is_asked_for_each() -> None:
    assert Played(BestOfN(n=2, scorer=TooFew()), ["a", "b"]).decision.scores == {0: 1.0, 1: 1.0}


def test_soft_draws_in_proportion_to_the_exponent_of_the_score() -> None:
    scores = {"a": 0.0, "b": 1.0, "c": 2.0}
    strategy = BestOfN(n=3, soft=1.0, scorer=by(lambda prompt, text: scores[text]))
    drawn = Counter(Played(strategy, [*scores], seed=seed).ranking[0] for seed in range(3000))
    weights = torch.tensor([*scores.values()]).softmax(0).tolist()
    for number, weight in enumerate(weights):  # five standard errors
        assert abs(drawn[number] / 3000 - weight) < 5 * math.sqrt(weight * (1 - weight) / 3000)
    assert Played(strategy, [*scores], seed=1).ranking == Played(strategy, [*scores], seed=1).ranking
    cold = BestOfN(n=3, soft=1e-3, scorer=strategy.scorer)
    assert {Played(cold, [*scores], seed=seed).ranking[0] for seed in range(20)} == {2}


def test_pruning_cancels_the_worst_at_each_checkpoint() -> None:
    strategy = BestOfN(n=4, scorer=by(lambda prompt, text: text.count("x")), pruning={"every": 2, "fraction": 0.5})
    texts = ["xxaaaa", "aaxxxx", "xaxaaa", "aaaaaa"]
    played = Played(strategy, [candidate(number, text, [-1.0] * 6) for number, text in enumerate(texts)])
    assert played.cancelled == {1, 2, 3}  # 1 and 3 after two tokens, 2 after four, where it stands 2 : 2 with 0
    assert played.ranking == [0]
    assert played.decision.notes == {3: {"pruned_score": 0}, 1: {"pruned_score": 0}, 2: {"pruned_score": 2}}


def test_pruning_never_cancels_the_last_one() -> None:
    strategy = BestOfN(n=3, scorer="logprob", pruning={"every": 1, "fraction": 0.9})
    played = Played(strategy, [candidate(number, "abc", [-number - 1.0] * 9) for number in range(3)])
    assert played.ranking == [0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "strategy.scorer: missing: this option is required"),
        ({"scorer": "logprob", "n": 0}, "strategy.n: should be greater than or equal to 1, got 0"),
        ({"scorer": "log_prob"}, "strategy.scorer: unknown scorer 'log_prob': did you mean 'logprob'"),
        ({"scorer": "logprob", "soft": 0}, "strategy.soft: should be greater than 0, got 0"),
        ({"scorer": {"kind": "python", "function": "os.system"}}, "strategy.scorer.function: should be callable"),
    ],
)
def test_refused(options, message) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe({"strategy": {"kind": "best_of_n", **options}, "generation": {"do_sample": True}})
    assert message in str(caught.value)


@pytest.mark.integration
def test_a_scorer_of_texts_needs_a_tokenizer(dense) -> None:
    ids = torch.tensor([[5, 6]])
    decoder = decodekit.strategy("best_of_n", n=2, scorer=by(length))
    with pytest.raises(InputError, match="scorer 'python' reads texts, which need a tokenizer"):
        dense.generate(ids, custom_generate=decoder, do_sample=True)
    decoder = decodekit.strategy("best_of_n", n=2, scorer="logprob")
    assert dense.generate(ids, custom_generate=decoder, do_sample=True, max_new_tokens=3).shape == (1, 5)


@pytest.mark.integration
@pytest.mark.parametrize("options", [{}, {"soft": 0.5}, {"pruning": {"every": 3}}], ids=["best", "soft", "pruning"])
def test_every_row_of_a_batch_is_its_solo_run(model, tokenizer, options) -> None:
    check_candidates(decodekit.strategy("best_of_n", n=4, scorer="logprob", **options), model, tokenizer)


@pytest.mark.integration
def test_the_score_is_that_of_the_models_own_logits(dense, tokenizer) -> None:
    strategy = {"kind": "best_of_n", "n": 3, "scorer": {"kind": "logprob", "length_penalty": 0.5}}
    options = {"do_sample": True, "seed": 0, "max_new_tokens": 6}
    rules = [{"kind": "temperature", "t": 0.5}, {"kind": "top_k", "k": 5}]
    decoder = decodekit.load({"strategy": strategy, "rules": rules, "generation": options})
    [output] = decoder.run(dense, tokenizer, "Who won?")
    prompt = tokenizer("Who won?").input_ids
    for own in output.candidates:
        ids = torch.tensor([[*prompt, *own["token_ids"]]])
        logprobs = dense(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        total = float(logprobs.gather(-1, ids[0, len(prompt) :, None]).sum())
        assert own["score"] == pytest.approx(total / len(own["token_ids"]) ** 0.5)
    assert output.token_ids == max(output.candidates, key=lambda own: own["score"])["token_ids"]


@pytest.mark.integration
def test_the_blocks_of_what_is_pruned_are_free_at_once(model, tokenizer) -> None:
    strategy = {"kind": "best_of_n", "n": 8, "scorer": "logprob", "pruning": {"every": 6, "fraction": 0.5}}
    recipe = load_recipe(
        {
            "strategy": strategy,
            "cache": {"kind": "paged", "block_size": 4},
            "generation": {"do_sample": True, "seed": 0, "max_new_tokens": 8, "suppress_tokens": [1]},
        }
    )
    call = TextCall(recipe, model, tokenizer, ["Who won?"], {})
    used = []
    for _ in call.run():
        [session] = call._call.loop.sessions
        used.append([group["used"] for group in session.cache.stats()["groups"]])
    # The record after the sixth token is made before its cancelled rows are let go, the next one after.
    assert all(after < before for before, after in zip(used[6], used[7], strict=True))
    [(_, output)] = call.outputs()
    assert [own["finish_reason"] for own in output.candidates].count("cancelled") == 4
