import math

import pytest
import torch
from pydantic import ValidationError
from transformers.generation.logits_process import TopHLogitsWarper

from decodekit.rules.top_h import TopH
from decodekit.testing import check_rule, make_rows


@pytest.mark.parametrize("h", [1e-12, 0.4, 0.9, 1.0])
@pytest.mark.parametrize("mode", ["strict", "compat"])
def test_obeys_the_laws_of_a_rule(h: float, mode: str) -> None:
    check_rule(TopH(h=h, mode=mode))


@pytest.mark.parametrize("mode", ["strict", "compat"])
def test_rows_of_a_real_vocabulary_do_not_depend_on_their_neighbours(mode: str) -> None:
    check_rule(TopH(h=0.6, mode=mode), vocab_size=49152, dtypes=[torch.float32])


@pytest.mark.integration
@pytest.mark.parametrize("vocab_size", [50, 5000])
@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("h", [0.1, 0.4, 0.8])
def test_compat_equals_transformers(vocab_size: int, scale: float, h: float) -> None:
    logits = scale * torch.randn(4, vocab_size)
    assert torch.equal(TopH(h=h, mode="compat")(make_rows([[3]] * 4), logits), TopHLogitsWarper(h)(None, logits))


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("h", [0.1, 0.4, 0.8, 0.99])
def test_strict_keeps_the_most_tokens_whose_own_entropy_is_within_the_share(scale: float, h: float) -> None:
    logits = scale * torch.randn(4, 400, dtype=torch.float64)
    for row, kept in zip(logits, (TopH(h=h)(make_rows([[3]] * 4), logits) > -torch.inf).tolist(), strict=True):
        bound = h * torch.distributions.Categorical(logits=row).entropy()
        order = row.argsort(descending=True)
        count = sum(kept)
        assert [token for token, here in enumerate(kept) if here] == sorted(order[:count].tolist())
        assert count == 1 or torch.distributions.Categorical(logits=row[order[:count]]).entropy() <= bound
        assert torch.distributions.Categorical(logits=row[order[: count + 1]]).entropy() > bound


@pytest.mark.parametrize(("h", "kept"), [(0.1, 1), (0.34, 2), (0.6, 3), (0.67, 4), (0.99, 7)])
def test_of_equal_tokens_the_lowest_ids_stay(h: float, kept: int) -> None:
    # k of 8 equal tokens have a share log k / log 8 of the entropy: 0.333, 0.528, 0.667, 0.774, 0.862, 0.936.
    result = TopH(h=h)(make_rows([[3]]), torch.zeros(1, 8))
    assert (result > -math.inf).tolist() == [[token < kept for token in range(8)]]


def test_one_changes_nothing() -> None:
    logits = torch.randn(3, 500)
    assert torch.equal(TopH(h=1.0)(make_rows([[3]] * 3), logits), logits)


def test_nan_stays_visible() -> None:
    assert TopH(h=0.5)(make_rows([[3]]), torch.tensor([[1.0, torch.nan, 2.0]])).isnan().any()


@pytest.mark.parametrize("h", [0, -0.1, 1.1, float("nan")])
def test_refuses_h_outside_its_range(h: float) -> None:
    with pytest.raises(ValidationError, match=r"greater than 0|less than or equal to 1"):
        TopH(h=h)
