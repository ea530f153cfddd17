import pytest
import torch
from sacrebleu.metrics import CHRF

from decodekit.utilities.chrf import Chrf


def test_is_sacrebleus_sentence_score(pools) -> None:
    metric, utility = CHRF(), Chrf()
    for pool in pools[-8:]:
        expected = [[metric.sentence_score(own, [other]).score for other in pool] for own in pool]
        torch.testing.assert_close(utility.pairwise(pool, pool), torch.tensor(expected).double(), atol=1e-6, rtol=1e-6)


def test_hypotheses_and_references_may_differ() -> None:
    scores = Chrf().pairwise(["one two three four", "95"], ["one two three four", "68", "95"])
    assert scores.shape == (2, 3)
    assert scores[0].tolist() == pytest.approx([100, 0, 0], abs=1e-9)
    assert scores[1, 2] > 99
    assert scores.dtype == torch.float64


def test_one_reference_aggregated_is_itself(pools) -> None:
    utility, pool = Chrf(), pools[0]
    alone = utility.aggregated(pool, pool[:1], torch.tensor([1.0]))
    torch.testing.assert_close(alone, utility.pairwise(pool, pool[:1])[:, 0])
    # A reference of no weight changes nothing; one that stands twice weighs twice.
    weightless = utility.aggregated(pool, pool[:2], torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(weightless, alone)
    twice = utility.aggregated(pool, [pool[0], pool[0], pool[1]], torch.tensor([0.25, 0.25, 0.5]))
    torch.testing.assert_close(twice, utility.aggregated(pool, pool[:2], torch.tensor([0.5, 0.5])))


def test_options_are_sacrebleus(pools) -> None:
    metric, pool = CHRF(char_order=3, beta=1), pools[1]
    expected = [[metric.sentence_score(own, [other]).score for other in pool] for own in pool]
    scores = Chrf(char_order=3, beta=1).pairwise(pool, pool)
    torch.testing.assert_close(scores, torch.tensor(expected).double(), atol=1e-6, rtol=1e-6)
