from collections import Counter

import pytest
import torch
from sacrebleu.metrics import CHRF

from decodekit.core.ngrams import ChrF, count_ngrams, mean_counts, shared_count, shared_counts

TEXTS = ["the cat the cat", "the the the", "a cat", "", "b"]


def test_shared_counts_are_the_smaller_counts() -> None:
    counts = [count_ngrams(text.split(), 1) for text in TEXTS]
    shared = shared_counts(counts, counts[:3])
    assert shared.tolist() == [[(one & other).total() for other in counts[:3]] for one in counts]
    assert shared.tolist()[0][1] == 2  # "the" twice in one, three times in the other
    assert shared.tolist() == [[shared_count(one, other) for other in counts[:3]] for one in counts]


def test_substrings_and_tuples() -> None:
    assert count_ngrams("abab", 2) == Counter({"ab": 2, "ba": 1})
    assert count_ngrams(["x", "y"], 2) == Counter({("x", "y"): 1})
    assert count_ngrams("a", 2) == Counter()


def test_the_mean_of_counts_is_weighted() -> None:
    assert mean_counts([Counter("aab"), Counter("b")], [0.25, 0.75]) == {"a": 0.5, "b": 1.0}


@pytest.mark.parametrize("word_order", [0, 2])
def test_sums_of_statistics_give_the_score_of_a_corpus(word_order: int) -> None:
    hypotheses, references = ["the cat sat.", "a (small) dog", "x"], ["the cat sits!", "one small dog", "yes"]
    chrf = ChrF(word_order=word_order)
    statistics = sum(chrf.statistics([own], [other]) for own, other in zip(hypotheses, references, strict=True))
    expected = CHRF(word_order=word_order).corpus_score(hypotheses, [references]).score
    assert float(chrf.score(torch.as_tensor(statistics))) == pytest.approx(expected, abs=1e-9)
