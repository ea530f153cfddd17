import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import decodekit
from decodekit.core.errors import InputError, RecipeError, Refused
from decodekit.core.protocols import Utility
from decodekit.core.registry import create
from decodekit.recipe import load_recipe
from decodekit.strategies.mbr import ConfidencePruning, Mbr, expected, probability_weights, prune, rank
from tests.strategies.candidates import Played, candidate
from tests.strategies.sequences import PROMPTS, check_candidates

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "mbr_selections.json").read_text())
POOLS = [item["candidates"] for item in GOLDEN["items"]]


def golden_scores(utility: Utility, pool: list[str], run: str) -> torch.Tensor:
    if run == "mbr_split":  # the first half are hypotheses, the second half references
        half = len(pool) // 2
        return expected(utility, pool[: max(1, half)], pool[half:])
    weights = (-0.5 * torch.arange(len(pool))).softmax(0) if run == "mbr_lprobs" else None
    return expected(utility, pool, weights=weights, aggregate=run == "aggregate")


@pytest.mark.parametrize("kind", ["chrf", "chrfpp", "bleu"])
@pytest.mark.parametrize("run", ["mbr", "mbr_lprobs", "mbr_split", "aggregate"])
def test_chooses_as_mbrs_on_30_pools(kind: str, run: str) -> None:
    utility = create("utilities", kind)
    assert len(POOLS) == 30
    for pool, golden in zip(POOLS, GOLDEN["runs"][f"{kind}/{run}"], strict=True):
        scores = golden_scores(utility, pool, run)
        reference = dict(zip(golden["idx"], golden["score"], strict=True))
        assert scores.tolist() == pytest.approx([reference[place] for place in range(len(scores))], abs=1e-3)
        chosen = rank(dict(enumerate(scores.tolist())))[0]
        assert reference[chosen] == pytest.approx(max(reference.values()), abs=1e-6)


class Table(Utility):
    """Utilities from a table, texts being row and column numbers; counts the pairs it was asked for."""

    kind: str = "table"
    table: list[list[float]]
    pairs: list[int] = []  # noqa: RUF012  a test's own

    def pairwise(self, hypotheses, references):
        self.pairs.append(len(hypotheses) * len(references))
        return torch.tensor([[self.table[int(own)][int(other)] for other in references] for own in hypotheses])


def test_pruning_keeps_the_naive_choice_with_its_confidence_and_saves_utilities() -> None:
    pruning, hypotheses, references = ConfidencePruning(confidence=0.95, first=16, rounds=300), 24, 64
    names = [str(place) for place in range(references)]
    kept = pairs = 0
    for seed in range(60):
        generator = np.random.default_rng(seed)
        table = 50 + 5 * generator.normal(size=(hypotheses, 1)) + 8 * generator.normal(size=(hypotheses, references))
        utility = Table(table=table.tolist())
        scores = prune(utility, names[:hypotheses], names, pruning=pruning, generator=generator)
        kept += rank(scores)[0] == int(table.mean(1).argmax())
        pairs += sum(utility.pairs)
    assert kept / 60 >= 0.95
    assert pairs < 0.6 * 60 * hypotheses * references


def test_pruning_without_a_checkpoint_is_the_naive_choice() -> None:
    utility, pool = create("utilities", "chrf"), POOLS[0]
    weights = torch.arange(1.0, 10.0)
    pruning, generator = ConfidencePruning(first=9), np.random.default_rng(0)
    scores = prune(utility, pool, pool, weights, pruning=pruning, generator=generator)
    assert [scores[place] for place in range(9)] == pytest.approx(expected(utility, pool, weights=weights).tolist())


def test_the_probability_of_a_text_counts_once_however_often_it_was_drawn() -> None:
    candidates = [candidate(0, "a", [-1.0]), candidate(1, "b", [-1.0, -1.0]), candidate(2, "a", [-1.0])]
    weights = probability_weights(candidates)
    weights = weights / weights.sum()
    assert weights.tolist() == pytest.approx([0.3655, 0.2689, 0.3655], abs=1e-4)


def test_further_references_are_no_hypotheses() -> None:
    strategy = Mbr(n=2, references=3, utility={"kind": "exact"})
    played = Played(strategy, ["a", "b", "b", "b", "c"])
    assert played.ranking == [1, 0]
    assert played.decision.scores == pytest.approx({0: 0, 1: 200 / 3})
    assert played.report == pytest.approx({"utility": "exact", "expected_utility": 200 / 3, "references": 3})


def test_a_candidate_that_failed_is_left_out() -> None:
    played = Played(Mbr(n=4, utility="exact"), ["a", None, "b", "b"])
    assert played.ranking == [2, 3, 0]


def test_under_exact_match_it_is_the_majority_vote() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        texts = [str(letter) for letter in generator.integers(0, 4, size=9)]
        votes = Counter(texts)
        winner = max(texts, key=lambda text: (votes[text], -texts.index(text)))
        vote = Played(decodekit.strategy("self_consistency", n=9).recipe.strategy, texts)
        mbr = Played(Mbr(n=9, utility="exact"), texts)
        assert texts[mbr.ranking[0]] == winner
        assert mbr.ranking[0] == vote.ranking[0]


def test_equal_texts_have_equal_scores_and_the_first_wins() -> None:
    scores = expected(create("utilities", "chrf"), ["same words", "other", "same words"])
    assert float(scores[0]) == float(scores[2]) > float(scores[1])
    assert rank({0: 1.0, 1: 2.0, 2: 2.0}) == [1, 2, 0]


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0]])
def test_weights_must_fit(weights) -> None:
    with pytest.raises(InputError, match="weights should be 2 numbers of at least 0 with a positive sum"):
        expected(create("utilities", "exact"), ["a", "b"], weights=torch.tensor(weights))


def test_no_references_is_an_error_and_aggregation_may_be_refused() -> None:
    with pytest.raises(InputError, match="there are no references"):
        expected(create("utilities", "exact"), ["a"], [])
    with pytest.raises(Refused, match="utility 'exact' cannot aggregate its references"):
        expected(create("utilities", "exact"), ["a"], aggregate=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "strategy.utility: missing: this option is required"),
        ({"utility": "chr"}, "strategy.utility: unknown utility 'chr': did you mean 'chrf'"),
        ({"utility": "exact", "aggregate": True}, "strategy: utility 'exact' cannot aggregate its references"),
        ({"utility": "chrf", "aggregate": True, "pruning": {}}, "strategy: aggregate leaves nothing to prune"),
        ({"utility": "chrf", "n": 0}, "strategy.n: should be greater than or equal to 1, got 0"),
        (
            {"utility": "chrf", "pruning": {"confidence": 1}},
            "strategy.pruning.confidence: should be less than 1, got 1",
        ),
    ],
)
def test_refused(options, message) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe({"strategy": {"kind": "mbr", **options}, "generation": {"do_sample": True}})
    assert message in str(caught.value)


@pytest.mark.integration
@pytest.mark.parametrize(
    "options",
    [{}, {"references": 3, "weights": "probability"}, {"pruning": {"first": 2, "rounds": 20, "confidence": 0.6}}],
    ids=["plain", "references", "pruning"],
)
def test_every_row_of_a_batch_is_its_solo_run(model, tokenizer, options) -> None:
    check_candidates(decodekit.strategy("mbr", n=4, utility="chrf", **options), model, tokenizer)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "options"),
    [("mbr", {"utility": "chrf"}), ("best_of_n", {"scorer": "logprob"}), ("self_consistency", {})],
)
@pytest.mark.parametrize("inner", ["sample", "dola"])
@pytest.mark.parametrize("sampled", [True, False])
def test_n_1_is_its_inner_strategy(model, tokenizer, kind, options, inner, sampled) -> None:
    generation = {"max_new_tokens": 8, "do_sample": sampled, "seed": 5}
    ours = decodekit.strategy(kind, n=1, inner=inner, **options).run(model, tokenizer, PROMPTS, **generation)
    plain = decodekit.strategy(inner).run(model, tokenizer, PROMPTS, **generation)
    assert [output.token_ids for output in ours] == [output.token_ids for output in plain]
    assert [output.text for output in ours] == [output.text for output in plain]


@pytest.mark.integration
def test_num_return_sequences_are_the_best(dense, tokenizer) -> None:
    decoder = decodekit.strategy("mbr", n=4, utility="chrf")
    options = {"max_new_tokens": 6, "do_sample": True, "seed": 0}
    outputs = decoder.run(dense, tokenizer, ["Who won?"], num_return_sequences=3, **options)
    scores = [next(own["score"] for own in outputs[0].candidates if own["text"] == output.text) for output in outputs]
    assert scores == sorted(scores, reverse=True)
    assert max(own["score"] for own in outputs[0].candidates) == scores[0]


@pytest.mark.integration
def test_without_sampling_several_candidates_are_refused(dense, tokenizer) -> None:
    decoder = decodekit.strategy("mbr", n=4, utility="chrf")
    with pytest.raises(
        Refused, match="4 outputs of 'sample' are the same text each time without sampling; give do_sample"
    ):
        decoder.run(dense, tokenizer, "Who won?")
    with pytest.raises(InputError, match="strategy 'mbr' reads texts, which need a tokenizer"):
        dense.generate(torch.tensor([[5, 6]]), custom_generate=decoder, do_sample=True)
