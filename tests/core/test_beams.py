import random

import torch
from scipy.stats import chisquare

from decodekit.core.beams import can_improve, drawn, log_probabilities, most_likely


def test_the_best_continuations_come_first_and_none_is_impossible() -> None:
    scores = torch.tensor([[-1.0, -torch.inf, -3.0], [-0.5, -2.0, -torch.inf]])
    assert most_likely(scores, 3) == [(-0.5, 1, 0), (-1.0, 0, 0), (-2.0, 1, 1)]
    assert len(most_likely(scores, 100)) == 4


def test_draws_follow_the_distribution_without_replacement() -> None:
    probabilities = torch.tensor([[0.4, 0.1, 0.0], [0.2, 0.05, 0.25]], dtype=torch.float64)
    generator = random.Random(0)
    first: dict[tuple[int, int], int] = {}
    pairs: dict[frozenset[tuple[int, int]], int] = {}
    for _ in range(5_000):
        uniforms = [generator.random() for _ in range(2)]
        both = drawn(probabilities.log(), 2, uniforms.__getitem__)
        assert both[0].score >= both[1].score
        places = [(own.parent, own.token) for own in both]
        assert len(set(places)) == 2
        pairs[frozenset(places)] = pairs.get(frozenset(places), 0) + 1
        [only] = drawn(probabilities.log(), 1, uniforms.__getitem__)
        first[only.parent, only.token] = first.get((only.parent, only.token), 0) + 1
    legal = [(row, token) for row in range(2) for token in range(3) if probabilities[row, token] > 0]
    expected = [float(probabilities[place]) * 5_000 for place in legal]
    assert chisquare([first[place] for place in legal], expected).pvalue > 1e-3
    mass = {place: float(probabilities[place]) for place in legal}
    both_ways = {
        pair: sum(mass[a] * mass[b] / (1 - mass[a]) for a, b in ((x, y), (y, x))) * 5_000
        for pair in pairs
        for x, y in [tuple(pair)]
    }
    assert chisquare([pairs[pair] for pair in both_ways], list(both_ways.values())).pvalue > 1e-3


def test_fewer_are_drawn_where_fewer_are_possible() -> None:
    assert [own.token for own in drawn(torch.tensor([[0.0, -torch.inf]]), 5, lambda _: 0.5)] == [0]


def test_when_nothing_better_can_come() -> None:
    common = {"length": 4, "max_length": 8, "length_penalty": 1.0}
    assert can_improve(-9.0, [-1.0], 2, early_stopping=True, **common)  # fewer than are kept
    assert not can_improve(-1.0, [-1.0, -2.0], 2, early_stopping=True, **common)
    assert can_improve(-4.0, [-1.0, -2.0], 2, early_stopping=False, **common)  # -1 now against -2
    assert not can_improve(-12.0, [-1.0, -2.0], 2, early_stopping=False, **common)  # -3 now
    assert can_improve(-12.0, [-1.0, -2.0], 2, early_stopping="never", **common)  # -1.5 at the end


def test_a_hypothesis_without_a_legal_token_has_no_continuation() -> None:
    logits = torch.tensor([[-torch.inf] * 3, [0.0, 1.0, -torch.inf]])
    scores = log_probabilities(logits)
    torch.testing.assert_close(scores[1], logits[1].log_softmax(-1))
    assert {own.parent for own in most_likely(scores, 6)} == {1}
    assert {own.parent for own in drawn(scores, 6, lambda lane: 0.5)} == {1}
    assert most_likely(scores[:1], 6) == drawn(scores[:1], 6, lambda lane: 0.5) == []
