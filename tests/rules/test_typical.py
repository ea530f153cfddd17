import pytest
import torch
from pydantic import ValidationError
from transformers.generation.logits_process import TypicalLogitsWarper

from decodekit.rules.typical import Typical
from decodekit.testing import check_rule, make_rows


@pytest.mark.parametrize("p", [1e-12, 0.2, 0.9, 1 - 1e-9, 1.0])
def test_obeys_the_laws_of_a_rule(p: float) -> None:
    check_rule(Typical(p=p))


def test_rows_of_a_real_vocabulary_do_not_depend_on_their_neighbours() -> None:
    check_rule(Typical(p=0.5), vocab_size=49152, dtypes=[torch.float32])


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.999])
def test_equals_transformers(scale: float, p: float) -> None:
    logits = scale * torch.randn(4, 5000, dtype=torch.float64)
    logits[1, ::3] = -torch.inf
    assert torch.equal(Typical(p=p)(make_rows([[3]] * 4), logits), TypicalLogitsWarper(p)(None, logits))


@pytest.mark.parametrize(
    ("p", "kept"), [(0.1, [1]), (0.3, [1, 2]), (0.55, [1, 2, 3]), (0.6, [0, 1, 2, 3]), (0.99, [0, 1, 2, 3, 4])]
)
def test_keeps_the_tokens_closest_to_the_entropy(p: float, kept: list[int]) -> None:
    # Entropy 1.41 nats; the tokens say 0.84, 1.61, 1.71, 1.77 and 2.66 nats, so that the likeliest comes fourth.
    probabilities = torch.tensor([[0.43, 0.2, 0.18, 0.17, 0.02]], dtype=torch.float64)
    result = Typical(p=p)(make_rows([[3]]), probabilities.log())
    assert (result > -torch.inf).nonzero()[:, 1].tolist() == kept


def test_equal_deviations_stay_together() -> None:
    result = Typical(p=0.3)(make_rows([[3]]), torch.zeros(1, 8))
    assert torch.equal(result, torch.zeros(1, 8))


def test_nan_stays_visible() -> None:
    assert Typical(p=0.5)(make_rows([[3]]), torch.tensor([[1.0, torch.nan, 2.0]])).isnan().any()


@pytest.mark.parametrize("p", [0, -0.1, 1.1, float("nan")])
def test_refuses_p_outside_its_range(p: float) -> None:
    with pytest.raises(ValidationError, match=r"greater than 0|less than or equal to 1"):
        Typical(p=p)
