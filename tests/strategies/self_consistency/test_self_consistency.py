import math

import pytest

import decodekit
from decodekit.core.errors import RecipeError, RowError
from decodekit.recipe import load_recipe
from decodekit.strategies.self_consistency import SelfConsistency
from tests.strategies.candidates import Played, candidate
from tests.strategies.sequences import check_candidates

SAMPLED = {"do_sample": True}


def test_the_majority_wins_and_its_first_candidate_is_the_output() -> None:
    played = Played(SelfConsistency(n=5), ["it is 3", "4", "= 4.0", "none", "5"])
    assert played.ranking == [1, 2, 0, 4, 3]
    assert played.report["answer"] == "4"
    assert played.report["votes"] == {"4": 2, "3": 1, "5": 1}
    assert played.report["agreement"] == 0.5
    assert played.decision.notes[3] == {"answer": None}
    assert 3 not in played.decision.scores


def test_a_tie_goes_to_the_answer_that_came_first() -> None:
    assert Played(SelfConsistency(n=4), ["7", "8", "8", "7"]).ranking == [0, 3, 1, 2]


def test_a_vote_may_weigh_as_much_as_the_model_trusts_it() -> None:
    sure, unsure = [-0.1, -0.3], [-2.0, -3.0]
    candidates = [candidate(0, "1", unsure), candidate(1, "1", unsure), candidate(2, "2", sure)]
    assert Played(SelfConsistency(n=3), candidates).report["answer"] == "1"
    weighted = Played(SelfConsistency(n=3, weights="logprob"), candidates)
    assert weighted.ranking == [2, 0, 1]
    assert weighted.report["votes"] == pytest.approx({"2": math.exp(-0.2), "1": 2 * math.exp(-2.5)})


def test_without_any_answer_the_most_likely_text_is_taken_and_that_is_said() -> None:
    candidates = [candidate(0, "a", [-2.0]), candidate(1, "b", [-1.0, -1.0]), candidate(2, "c", [-1.5])]
    played = Played(SelfConsistency(n=3), candidates)
    assert played.ranking == [1, 2, 0]
    assert played.report["answer"] is None
    assert played.report["fallback"] == "no answer in any of 3 candidates: ranked by mean log-probability"


def test_an_extractor_that_raises_costs_that_vote_alone() -> None:
    played = Played(SelfConsistency(n=3, extract=lambda text: 1 / int(text)), ["0", "2", "2"])
    assert played.ranking == [1, 2, 0]
    assert played.decision.notes[0] == {"answer": None, "extract_error": "ZeroDivisionError: division by zero"}


def test_candidates_that_fail_do_not_vote() -> None:
    assert Played(SelfConsistency(n=3), [None, "1", "2"]).ranking == [1, 2]
    with pytest.raises(RowError, match="none of 2 candidates could be decoded: it broke"):
        Played(SelfConsistency(n=2), [None, None])


def test_adaptive_stops_with_a_clear_leader() -> None:
    strategy = SelfConsistency(n=12, stop={"kind": "adaptive", "batch": 2})
    played = Played(strategy, ["1", "1", "2"] + ["1"] * 9)
    assert len(played.started) == 8  # 3:1, 5:1 (.9375) and at 7:1 .98
    assert played.report["stopped"] == "adaptive"
    assert Played(strategy, ["1", "2"] * 6).report["stopped"] is None


def test_esc_stops_after_a_window_of_one_answer() -> None:
    strategy = SelfConsistency(n=9, stop={"kind": "esc", "batch": 3})
    played = Played(strategy, ["1", "1", "2", "3", "3", "3", "4", "4", "4"])
    assert len(played.started) == 6
    assert played.report["votes"] == {"3": 3, "1": 2, "2": 1}


def test_deepconf_cancels_what_falls_below_the_warm_up_and_weighs_the_rest() -> None:
    stop = {"kind": "deepconf", "warmup": 2, "window": 8, "batch": 3, "keep": 1.0}
    steady, weak = [3.0] * 40, [3.0] * 16 + [0.5] * 24
    candidates = [
        candidate(number, text, [-1.0] * 40, confidences)
        for number, (text, confidences) in enumerate(
            [("1", steady), ("2", [2.0] * 40), ("2", weak), ("1", steady), ("3", [2.5] * 40)]
        )
    ]
    played = Played(SelfConsistency(n=5, stop=stop), candidates)
    assert played.cancelled == {2}
    assert played.report["votes"] == {"1": 6, "3": 2.5, "2": 2}
    agreeing = [candidate(number, "1", [-1.0] * 9, [3.0] * 9) for number in range(5)]
    played = Played(SelfConsistency(n=5, stop=stop), agreeing)
    assert len(played.started) == 2
    assert played.report["stopped"] == "deepconf"


def test_deepconf_leaves_the_unsure_of_the_warm_up_out_of_the_vote() -> None:
    stop = {"kind": "deepconf", "warmup": 3, "keep": 0.4, "consensus": 1.0}
    candidates = [candidate(number, str(number), [-1.0] * 2, [float(number)] * 2) for number in range(3)]
    assert Played(SelfConsistency(n=3, stop=stop), candidates).report["votes"] == {"2": 2.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "strategy.n: should be greater than or equal to 1, got 0"),
        (
            {"extract": {"kind": "regex", "pattern": "("}},
            "strategy.extract.pattern: should be a regular expression, got '('",
        ),
        ({"stop": "adaptive", "weights": "logprob"}, "strategy: stop: adaptive counts votes; leave weights out"),
        ({"n": 2, "stop": "deepconf"}, "strategy: stop: deepconf warms up with 4 candidates, n is 2; raise n"),
        ({"inner": "mbr"}, "strategy.inner: 'mbr' is a SequenceStrategy, not a TokenStrategy"),
    ],
)
def test_refused(options, message) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe({"strategy": {"kind": "self_consistency", **options}, "generation": SAMPLED})
    assert message in str(caught.value)


def test_an_unknown_extractor_names_those_there_are() -> None:
    with pytest.raises(RecipeError, match=r"strategy\.extract.*'last_letter'.*last_number"):
        load_recipe({"strategy": {"kind": "self_consistency", "extract": "last_letter"}, "generation": SAMPLED})


LETTER = {"kind": "regex", "pattern": "[a-z]"}


@pytest.mark.integration
@pytest.mark.parametrize(
    "options",
    [{}, {"stop": {"kind": "esc", "batch": 2}}, {"stop": {"kind": "deepconf", "warmup": 2, "window": 3, "batch": 2}}],
    ids=["all", "esc", "deepconf"],
)
def test_every_row_of_a_batch_is_its_solo_run(model, tokenizer, options) -> None:
    check_candidates(decodekit.strategy("self_consistency", n=5, extract=LETTER, **options), model, tokenizer)


@pytest.mark.integration
def test_what_deepconf_cancels_is_cut_where_it_stood(dense, tokenizer) -> None:
    stop = {"kind": "deepconf", "warmup": 4, "window": 2, "keep": 0.5, "consensus": 1.0}
    decoder = decodekit.strategy("self_consistency", n=8, extract=LETTER, stop=stop)
    [output] = decoder.run(dense, tokenizer, "Who won?", max_new_tokens=12, do_sample=True, seed=0)
    cut = [own for own in output.candidates if own["finish_reason"] == "cancelled"]
    assert cut
    assert all(len(own["token_ids"]) < 12 and "answer" not in own for own in cut)
    assert output.stats["answer"] == next(own["answer"] for own in output.candidates if own["text"] == output.text)
