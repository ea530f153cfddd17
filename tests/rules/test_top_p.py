import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers.generation.logits_process import TopPLogitsWarper

from decodekit.rules.top_p import TopP
from decodekit.testing import check_rule, make_rows


@pytest.mark.parametrize("p", [1e-12, 0.3, 0.95, 1 - 1e-9, 1.0])
def test_obeys_the_laws_of_a_rule(p: float) -> None:
    check_rule(TopP(p=p))


@pytest.mark.parametrize("p", [0.5, 0.9])
def test_rows_of_a_real_vocabulary_do_not_depend_on_their_neighbours(p: float) -> None:
    check_rule(TopP(p=p), vocab_size=49152, dtypes=[torch.float32])


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.99999])
def test_equals_transformers(scale: float, p: float) -> None:
    logits = scale * torch.randn(4, 5000, dtype=torch.float64)
    assert torch.equal(TopP(p=p)(make_rows([[3]] * 4), logits), TopPLogitsWarper(p)(None, logits))


@pytest.mark.parametrize(("p", "kept"), [(0.39, 1), (0.4, 1), (0.41, 2), (0.7, 2), (0.71, 3), (0.99, 4)])
def test_keeps_the_fewest_tokens_whose_mass_reaches_p(p: float, kept: int) -> None:
    # Powers of two would be exact; these are not, so the borders lie a little off the sums.
    logits = torch.tensor([[0.1, 0.4000001, 0.2, 0.3]], dtype=torch.float64).log()
    expected = torch.tensor([[1, 3, 2, 0]])[:, :kept]
    result = TopP(p=p)(make_rows([[3]]), logits)
    assert torch.equal(result, torch.full_like(logits, -math.inf).scatter(1, expected, logits.gather(1, expected)))


@pytest.mark.parametrize(("p", "kept"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_reaching_p_exactly_is_enough(p: float, kept: int) -> None:
    result = TopP(p=p)(make_rows([[3]]), torch.zeros(1, 4))
    assert (result > -math.inf).tolist() == [[token < kept for token in range(4)]]


def test_p_near_one_is_not_rounded_to_one() -> None:
    # In float32 the first token alone would weigh 1.
    logits = torch.tensor([[1 - 6e-9, 5e-9, 5e-10, 5e-10]], dtype=torch.float64).log()
    kept = TopP(p=1 - 2e-9)(make_rows([[3]]), logits) > -math.inf
    assert kept.tolist() == [[True, True, False, False]]


@given(
    rows=st.lists(st.lists(st.sampled_from([-2.0, 0.0, 0.5, 3.0]), min_size=7, max_size=7), min_size=1, max_size=3),
    p=st.floats(1e-6, 1 - 1e-6),
)
@settings(max_examples=150)
def test_ties_keep_the_lowest_ids(rows: list[list[float]], p: float) -> None:
    result = TopP(p=p)(make_rows([[3]] * len(rows)), torch.tensor(rows))
    for row, kept in zip(rows, (result > -torch.inf).tolist(), strict=True):
        total, mass, nucleus = sum(map(math.exp, row)), 0.0, set()
        for token in sorted(range(7), key=lambda token, row=row: (-row[token], token)):
            if mass >= p:
                break
            mass += math.exp(row[token]) / total
            assume(abs(mass - p) > 1e-5)
            nucleus.add(token)
        assert kept == [token in nucleus for token in range(7)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_returns_bit_identical_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(8, 49152).to(dtype)
    logits[0, :100] = -torch.inf
    logits[1, 5] = torch.nan
    before = logits.clone()
    result = TopP(p=1.0)(make_rows([[3]] * 8), logits)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(result.view(bits), before.view(bits))


@pytest.mark.parametrize("p", [5e-324, 1e-12, 1e-5])
def test_tiny_p_is_greedy(p: float) -> None:
    logits = torch.randn(8, 49152)
    logits[0] = 0.0
    best = logits.argmax(-1)
    best[0] = 0
    kept = TopP(p=p)(make_rows([[3]] * 8), logits) > -torch.inf
    assert kept.nonzero().tolist() == [[row, token] for row, token in enumerate(best.tolist())]


def test_nan_stays_visible() -> None:
    assert TopP(p=0.5)(make_rows([[3]]), torch.tensor([[1.0, torch.nan, 2.0]])).isnan().any()


@pytest.mark.parametrize("p", [0, -0.1, 1.0001, float("nan"), float("inf")])
def test_refuses_p_outside_its_range(p: float) -> None:
    with pytest.raises(ValidationError, match=r"greater than 0|less than or equal to 1"):
        TopP(p=p)
