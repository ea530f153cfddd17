import pytest
import torch
from pydantic import ValidationError
from transformers.generation.logits_process import EpsilonLogitsWarper

from decodekit.rules.epsilon import Epsilon
from decodekit.testing import check_rule, make_rows


@pytest.mark.parametrize("epsilon", [1e-9, 0.01, 0.5])
def test_obeys_the_laws_of_a_rule(epsilon: float) -> None:
    check_rule(Epsilon(epsilon=epsilon))


@pytest.mark.parametrize("epsilon", [1e-4, 3e-3, 0.3])
def test_equals_transformers(epsilon: float) -> None:
    logits = 3 * torch.randn(4, 5000, dtype=torch.float64)
    assert torch.equal(
        Epsilon(epsilon=epsilon)(make_rows([[3]] * 4), logits), EpsilonLogitsWarper(epsilon)(None, logits)
    )


def test_keeps_what_reaches_epsilon_and_else_the_most_likely() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.1, 0.2], [0.4, 0.15, 0.05, 0.4]], dtype=torch.float64).log()
    assert (Epsilon(epsilon=0.15)(make_rows([[3]] * 2), logits) > -torch.inf).tolist() == [
        [True, True, False, True],
        [True, True, False, True],
    ]
    # Both of the second row's most likely tokens stay.
    assert (Epsilon(epsilon=0.9)(make_rows([[3]] * 2), logits) > -torch.inf).tolist() == [
        [True, False, False, False],
        [True, False, False, True],
    ]


@pytest.mark.parametrize("epsilon", [0, 1, -0.1, float("nan")])
def test_refuses_epsilon_outside_its_range(epsilon: float) -> None:
    with pytest.raises(ValidationError, match=r"greater than 0|less than 1"):
        Epsilon(epsilon=epsilon)
