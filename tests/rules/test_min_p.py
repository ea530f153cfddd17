import pytest
import torch
from pydantic import ValidationError
from transformers.generation.logits_process import MinPLogitsWarper

from decodekit.rules.min_p import MinP
from decodekit.testing import check_rule, make_rows


@pytest.mark.parametrize("p", [1e-9, 0.1, 1.0])
def test_obeys_the_laws_of_a_rule(p: float) -> None:
    check_rule(MinP(p=p))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5])
def test_equals_transformers(p: float) -> None:
    logits = 3 * torch.randn(4, 5000, dtype=torch.float64)
    assert torch.equal(MinP(p=p)(make_rows([[3]] * 4), logits), MinPLogitsWarper(p)(None, logits))


def test_keeps_what_is_at_least_p_times_as_likely_as_the_best() -> None:
    logits = torch.tensor([[0.5, 0.051, 0.3, 0.049, 0.1]]).log()
    kept = MinP(p=0.1)(make_rows([[3]]), logits) > -torch.inf
    assert kept.tolist() == [[True, True, True, False, True]]


def test_the_border_is_not_rounded_to_the_dtype_of_the_logits() -> None:
    # 20 + log(0.97) is 19.9695: bfloat16 would round it to 20 and drop what lies between, were there anything.
    logits = torch.tensor([[20.0, 19.875]], dtype=torch.bfloat16)
    assert (MinP(p=0.89)(make_rows([[3]]), logits) > -torch.inf).tolist() == [[True, False]]
    assert (MinP(p=0.88)(make_rows([[3]]), logits) > -torch.inf).tolist() == [[True, True]]


@pytest.mark.parametrize("p", [0, -0.1, 1.1, float("nan")])
def test_refuses_p_outside_its_range(p: float) -> None:
    with pytest.raises(ValidationError, match=r"greater than 0|less than or equal to 1"):
        MinP(p=p)
