import pytest
import torch
from pydantic import ValidationError
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from decodekit.core.types import Scope
from decodekit.rules.repetition_penalty import RepetitionPenalty
from decodekit.testing import check_rule, make_rows


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("scope", ["prompt", "output", "both"])
def test_obeys_the_laws_of_a_rule(penalty: float, scope: Scope) -> None:
    check_rule(RepetitionPenalty(penalty=penalty, scope=scope))


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_equals_transformers(penalty: float) -> None:
    histories = torch.randint(0, 500, (3, 40))
    logits = 3 * torch.randn(3, 500)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(histories, logits)
    assert torch.equal(RepetitionPenalty(penalty=penalty)(make_rows(histories.tolist()), logits), expected)


def test_lowers_the_score_whatever_its_sign() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, -torch.inf]])
    result = RepetitionPenalty(penalty=2)(make_rows([[0, 1, 1, 1, 4]]), logits)
    assert result.tolist() == [[1.0, -4.0, 2.0, -2.0, -torch.inf]]


def test_below_one_raises_the_score_whatever_its_sign() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    result = RepetitionPenalty(penalty=0.5)(make_rows([[0, 0, 1, 1]]), logits)
    assert result.tolist() == [[4.0, -1.0, 2.0, -2.0]]


@pytest.mark.parametrize(
    ("scope", "expected"), [("prompt", [1.0, 2.0, 1.0]), ("output", [2.0, 1.0, 1.0]), ("both", [1.0, 1.0, 1.0])]
)
def test_scope(scope: Scope, expected: list[float]) -> None:
    # Prompt 0 2, output 1 2.
    rows = make_rows([[0, 2, 1, 2]], [2])
    assert RepetitionPenalty(penalty=2, scope=scope)(rows, torch.full((1, 3), 2.0)).tolist() == [expected]


def test_columns_beyond_a_history_never_count() -> None:
    rows = make_rows([[2, 3, 4], [1]], beyond=0)
    result = RepetitionPenalty(penalty=2)(rows, torch.full((2, 5), 2.0))
    assert result.tolist() == [[2.0, 2.0, 1.0, 1.0, 1.0], [2.0, 1.0, 2.0, 2.0, 2.0]]


@pytest.mark.parametrize("penalty", [0, -1, float("nan"), float("inf")])
def test_refuses_what_is_no_penalty(penalty: float) -> None:
    with pytest.raises(ValidationError, match=r"greater than 0|finite"):
        RepetitionPenalty(penalty=penalty)


@pytest.mark.parametrize(("penalty", "expected"), [(2.0, [2.0, 1.0, 2.0]), (0.5, [2.0, 4.0, 2.0])])
def test_ids_beyond_the_logits_are_nobodys(penalty: float, expected: list[float]) -> None:
    rows = make_rows([[1, 9, 3]])
    assert RepetitionPenalty(penalty=penalty)(rows, torch.full((1, 3), 2.0)).tolist() == [expected]
