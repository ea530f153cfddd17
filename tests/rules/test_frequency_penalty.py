import pytest
import torch
from pydantic import ValidationError

from decodekit.core.types import Scope
from decodekit.rules.frequency_penalty import FrequencyPenalty
from decodekit.testing import check_rule, make_rows


@pytest.mark.parametrize("penalty", [-2.0, 0.0, 0.7])
@pytest.mark.parametrize("scope", ["prompt", "output", "both"])
def test_obeys_the_laws_of_a_rule(penalty: float, scope: Scope) -> None:
    check_rule(FrequencyPenalty(penalty=penalty, scope=scope))


@pytest.mark.parametrize("penalty", [-1.1, 0.7])
def test_equals_the_formula(penalty: float) -> None:
    histories = [torch.randint(0, 9, (length,)).tolist() for length in (3, 30, 17)]
    logits = torch.randn(3, 9, dtype=torch.float64)
    result = FrequencyPenalty(penalty=penalty, scope="both")(make_rows(histories), logits)
    occurred = torch.tensor([[history.count(token) for token in range(9)] for history in histories]).double()
    torch.testing.assert_close(result, logits - penalty * occurred, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("scope", "expected"), [("prompt", [1.5, 1.0, 2.0]), ("output", [2.0, 1.0, 1.5]), ("both", [1.5, 0.0, 1.5])]
)
def test_scope(scope: Scope, expected: list[float]) -> None:
    # Prompt 0 1 1, output 1 1 2; tokens 0, 1 and 2 have the logit 2.
    rows = make_rows([[0, 1, 1, 1, 1, 2]], [3])
    assert FrequencyPenalty(penalty=0.5, scope=scope)(rows, torch.full((1, 3), 2.0)).tolist() == [expected]


def test_the_prompt_does_not_count_by_default() -> None:
    assert FrequencyPenalty(penalty=1)(make_rows([[0, 1]]), torch.zeros(1, 3)).tolist() == [[0.0, 0.0, 0.0]]


def test_columns_beyond_a_history_never_count() -> None:
    rows = make_rows([[2, 3, 4], [1]], beyond=0)
    result = FrequencyPenalty(penalty=1, scope="both")(rows, torch.zeros(2, 5))
    assert result.tolist() == [[0.0, 0.0, -1.0, -1.0, -1.0], [0.0, -1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("penalty", [-2.1, 2.1, float("nan")])
def test_refuses_penalties_out_of_range(penalty: float) -> None:
    with pytest.raises(ValidationError, match="than or equal to"):
        FrequencyPenalty(penalty=penalty)


def test_ids_beyond_the_logits_are_nobodys_count():
    rows = make_rows([[1, 9, 9, 3]], prompt_lengths=[0])
    assert FrequencyPenalty(penalty=1.0)(rows, torch.zeros(1, 4)).tolist() == [[0.0, -1.0, 0.0, -1.0]]
