import torch
from decodekit_nsigma import TopNSigma

from decodekit import load
from decodekit.testing import check_rule, make_rows


def test_obeys_the_laws_of_a_rule() -> None:
    check_rule(TopNSigma(n=1.0))


def test_keeps_what_lies_within_n_sigma() -> None:
    # Mean 2, sigma sqrt(2): the floor is 4 - 1.4142 = 2.5858 for n = 1 and 1.1716 for n = 2.
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]])
    rows = make_rows([[1]], prompt_lengths=[1])
    assert TopNSigma(n=1)(rows, logits).tolist() == [[-torch.inf] * 3 + [3.0, 4.0]]
    assert TopNSigma(n=2)(rows, logits).tolist() == [[-torch.inf] * 2 + [2.0, 3.0, 4.0]]


def test_masked_tokens_do_not_count() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, -torch.inf]])
    kept = TopNSigma(n=1)(make_rows([[1]], prompt_lengths=[1]), logits)
    assert (kept > -torch.inf).tolist() == [[False, False, False, True, True, False]]


def test_is_found_by_its_name() -> None:
    decoder = load({"rules": [{"kind": "top_n_sigma", "n": 0.5}]})
    assert decoder.recipe.rules == (TopNSigma(n=0.5),)
