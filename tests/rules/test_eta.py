import math

import pytest
import torch
from pydantic import ValidationError
from transformers.generation.logits_process import EtaLogitsWarper

from decodekit.rules.eta import Eta
from decodekit.testing import check_rule, make_rows


@pytest.mark.parametrize("epsilon", [1e-9, 0.01, 0.5])
def test_obeys_the_laws_of_a_rule(epsilon: float) -> None:
    check_rule(Eta(epsilon=epsilon))


@pytest.mark.parametrize("epsilon", [1e-4, 3e-3, 0.3])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_equals_transformers(epsilon: float, scale: float) -> None:
    logits = scale * torch.randn(4, 5000, dtype=torch.float64)
    logits[1, ::3] = -torch.inf
    assert torch.equal(Eta(epsilon=epsilon)(make_rows([[3]] * 4), logits), EtaLogitsWarper(epsilon)(None, logits))


def test_the_threshold_falls_with_entropy() -> None:
    # 100 tokens of one probability and a rare one: the entropy is about log 100, the threshold sqrt(0.04) / 100.
    flat = torch.zeros(1, 101, dtype=torch.float64)
    for rare, kept in ((0.25, True), (0.15, False)):
        flat[0, 100] = math.log(rare)
        assert bool(Eta(epsilon=0.04)(make_rows([[3]]), flat)[0, 100] > -torch.inf) == kept
    # Where the model is sure, it is epsilon itself.
    sure = torch.tensor([[0.95, 0.045, 0.005], [0.96, 0.035, 0.005]], dtype=torch.float64).log()
    kept = Eta(epsilon=0.04)(make_rows([[3]] * 2), sure) > -torch.inf
    assert kept.tolist() == [[True, True, False], [True, False, False]]


@pytest.mark.parametrize("epsilon", [0, 1, -0.1, float("nan")])
def test_refuses_epsilon_outside_its_range(epsilon: float) -> None:
    with pytest.raises(ValidationError, match=r"greater than 0|less than 1"):
        Eta(epsilon=epsilon)
