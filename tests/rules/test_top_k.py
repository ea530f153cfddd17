import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import TopKLogitsWarper

from decodekit.core.errors import InputError
from decodekit.rules.top_k import TopK
from decodekit.testing import check_rule, make_rows


@pytest.mark.parametrize("k", [1, 5, 96, 97])
def test_obeys_the_laws_of_a_rule(k: int) -> None:
    check_rule(TopK(k=k))


@pytest.mark.parametrize("k", [1, 50, 3000])
def test_equals_transformers_where_nothing_ties(k: int) -> None:
    logits = torch.stack([torch.randperm(4096) for _ in range(3)]).float()
    assert torch.equal(TopK(k=k)(make_rows([[3]] * 3), logits), TopKLogitsWarper(k)(None, logits))


@given(
    rows=st.lists(st.lists(st.sampled_from([-2.0, 0.0, 0.5, 3.0]), min_size=7, max_size=7), min_size=1, max_size=3),
    k=st.integers(1, 7),
)
@settings(max_examples=100)
def test_ties_keep_exactly_k_of_the_lowest_ids(rows: list[list[float]], k: int) -> None:
    result = TopK(k=k)(make_rows([[3]] * len(rows)), torch.tensor(rows))
    for row, kept in zip(rows, (result > -torch.inf).tolist(), strict=True):
        best = sorted(range(7), key=lambda token, row=row: (-row[token], token))[:k]
        assert kept == [token in best for token in range(7)]


def test_ties_are_exact_on_a_large_vocabulary() -> None:
    # A head computed in bfloat16: a few hundred different values among 49152 logits.
    logits = (4 * torch.randn(8, 49152)).bfloat16().float()
    kept = TopK(k=50)(make_rows([[3]] * 8), logits) > -torch.inf
    order = logits.sort(descending=True, stable=True).indices[:, :50]
    assert torch.equal(kept, torch.zeros_like(kept).scatter(1, order, True))


def test_more_than_the_vocabulary_is_an_error_that_names_both() -> None:
    with pytest.raises(InputError, match="k=8 is more than the 7 tokens"):
        TopK(k=8)(make_rows([[3]]), torch.zeros(1, 7))


def test_nan_stays_visible() -> None:
    logits = torch.tensor([[1.0, torch.nan, 2.0, 3.0]])
    assert TopK(k=2)(make_rows([[3]]), logits).isnan().tolist() == [[False, True, False, False]]


def test_masked_tokens_do_not_fill_up_k() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, -torch.inf]])
    assert torch.equal(TopK(k=3)(make_rows([[3]]), logits), logits)
