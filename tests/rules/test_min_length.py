import pytest
import torch
from pydantic import ValidationError
from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor

from decodekit.core.errors import InputError
from decodekit.rules.min_length import MinLength
from decodekit.testing import check_rule, make_rows


@pytest.mark.parametrize("eos", [(), (1,), (1, 5)])
def test_obeys_the_laws_of_a_rule(eos: tuple[int, ...]) -> None:
    check_rule(MinLength(n=5), eos=eos)


def test_every_eos_is_banned_until_the_output_has_n_tokens() -> None:
    # Outputs of 0, 1, 2 and 3 tokens.
    rows = make_rows([[7, 7], [7, 8], [7, 8, 8], [7, 7, 8, 8, 8]], [2, 1, 1, 2], eos=(1, 3))
    banned = MinLength(n=2)(rows, torch.zeros(4, 5)) == -torch.inf
    ends, free = [False, True, False, True, False], [False] * 5
    assert banned.tolist() == [ends, ends, free, free]


@pytest.mark.parametrize("output", range(5))
def test_equals_transformers(output: int) -> None:
    history, logits = [7] * (3 + output), torch.randn(1, 9)
    expected = MinNewTokensLengthLogitsProcessor(3, 3, 1, device="cpu")(torch.tensor([history]), logits)
    assert torch.equal(MinLength(n=3)(make_rows([history], [3]), logits), expected)


def test_without_eos_nothing_changes() -> None:
    logits = torch.randn(1, 9)
    assert MinLength(n=3)(make_rows([[7]], eos=()), logits) is logits


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        MinLength(n=0)
    with pytest.raises(InputError, match="token id 9 is not in the vocabulary"):
        MinLength(n=3)(make_rows([[7]], eos=(9,)), torch.zeros(1, 9))
