import pytest
from rouge_score.rouge_scorer import RougeScorer

from decodekit.utilities.rouge import Rouge

TEXTS = ["the cats sat on the mat", "on the cat", "", "on the mat the cats sat"]


@pytest.mark.parametrize("variant", ["rouge1", "rouge2", "rougeL"])
@pytest.mark.parametrize("stem", [False, True])
def test_is_the_f_measure_times_100(variant: str, stem: bool) -> None:
    scorer = RougeScorer([variant], use_stemmer=stem)
    expected = [[100 * scorer.score(other, own)[variant].fmeasure for other in TEXTS[:3]] for own in TEXTS]
    scores = Rouge(variant=variant, stem=stem).pairwise(TEXTS, TEXTS[:3])
    assert scores.tolist() == [pytest.approx(row, abs=1e-9) for row in expected]
    assert scores[0, 1] > 0
