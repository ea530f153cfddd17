import pytest
import torch
from pydantic import ValidationError

from decodekit.rules.temperature import Temperature
from decodekit.testing import check_rule, make_rows


@pytest.mark.parametrize("t", [1e-30, 1e-3, 0.7, 1.0, 5.0])
def test_obeys_the_laws_of_a_rule(t: float) -> None:
    check_rule(Temperature(t=t))


def test_divides_the_logits() -> None:
    result = Temperature(t=0.5)(make_rows([[3]]), torch.tensor([[1.0, -2.0, -torch.inf]]))
    assert result.tolist() == [[2.0, -4.0, -torch.inf]]


def test_one_changes_nothing() -> None:
    logits = torch.randn(2, 5)
    assert Temperature(t=1)(make_rows([[3], [4]]), logits) is logits


@pytest.mark.parametrize("peak", [60000.0, -60000.0, 3.0])
def test_a_tiny_temperature_is_greedy_even_where_the_quotient_overflows(peak: float) -> None:
    logits = torch.tensor([[peak - 100, peak, peak - 200]], dtype=torch.float16)
    assert Temperature(t=1e-4)(make_rows([[3]]), logits).softmax(-1).tolist() == [[0.0, 1.0, 0.0]]


def test_a_masked_row_stays_masked() -> None:
    logits = torch.full((1, 3), -torch.inf)
    assert torch.equal(Temperature(t=0.5)(make_rows([[3]]), logits), logits)


@pytest.mark.parametrize("t", [0, -1])
def test_zero_and_below_point_to_greedy(t: float) -> None:
    with pytest.raises(
        ValidationError, match=f"t must be above 0, got {t}; for greedy decoding set .*do_sample: false"
    ):
        Temperature(t=t)


@pytest.mark.parametrize("t", [float("nan"), float("inf")])
def test_refuses_what_is_not_a_number(t: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Temperature(t=t)
