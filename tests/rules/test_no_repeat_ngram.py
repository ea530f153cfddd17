import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

from decodekit.core.types import Scope
from decodekit.rules.no_repeat_ngram import NoRepeatNgram
from decodekit.testing import check_rule, make_rows


def banned(rule: NoRepeatNgram, histories: list[list[int]], prompt_lengths: list[int] | None = None) -> list[set[int]]:
    result = rule(make_rows(histories, prompt_lengths), torch.zeros(len(histories), 9))
    return [set((row == -torch.inf).nonzero().flatten().tolist()) for row in result]


@pytest.mark.parametrize("n", [1, 2, 3, 50])
@pytest.mark.parametrize("scope", ["prompt", "output", "both"])
def test_obeys_the_laws_of_a_rule(n: int, scope: Scope) -> None:
    check_rule(NoRepeatNgram(n=n, scope=scope))


@given(
    histories=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=4),
    n=st.integers(1, 4),
)
@settings(max_examples=150)
def test_equals_transformers_row_by_row(histories: list[list[int]], n: int) -> None:
    logits = torch.randn(len(histories), 9)
    result = NoRepeatNgram(n=n)(make_rows(histories), logits)
    for row, history in enumerate(histories):
        expected = NoRepeatNGramLogitsProcessor(n)(torch.tensor([history]), logits[row : row + 1])
        assert torch.equal(result[row : row + 1], expected)


def test_bans_every_token_that_followed_the_same_prefix() -> None:
    assert banned(NoRepeatNgram(n=2), [[1, 2, 1, 3, 1], [1, 2, 3, 4, 5]]) == [{2, 3}, set()]
    assert banned(NoRepeatNgram(n=3), [[1, 2, 7, 1, 2], [1, 2, 1, 2, 1]]) == [{7}, {2}]
    assert banned(NoRepeatNgram(n=1), [[1, 2, 1], [8]]) == [{1, 2}, {8}]


@pytest.mark.parametrize(("scope", "expected"), [("prompt", {2}), ("output", {5}), ("both", {2, 4, 5})])
def test_scope_is_where_the_whole_first_ngram_lies(scope: Scope, expected: set[int]) -> None:
    # Prompt 1 2 3 1, output 4 1 5 1; the bigram 1 4 lies in both.
    assert banned(NoRepeatNgram(n=2, scope=scope), [[1, 2, 3, 1, 4, 1, 5, 1]], [4]) == [expected]


def test_the_prefix_may_reach_back_into_the_prompt() -> None:
    # Prompt 1 2 3 1, output 2: the trigram 1 2 3 would start in the prompt.
    assert banned(NoRepeatNgram(n=3, scope="prompt"), [[1, 2, 3, 1, 2]], [4]) == [{3}]


def test_infinity_and_signed_zero_elsewhere_are_left_alone() -> None:
    logits = torch.tensor([[-0.0, 1.0, torch.inf]])
    result = NoRepeatNgram(n=1)(make_rows([[1, 2]]), logits)
    assert torch.equal(result.view(torch.int32), torch.tensor([[-0.0, -torch.inf, -torch.inf]]).view(torch.int32))


def test_refuses_n_below_one() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        NoRepeatNgram(n=0)


def test_ids_beyond_the_logits_lead_to_bans_but_are_not_banned() -> None:
    # 20 was followed by 3; after 3 stood 20, which has no logit.
    assert banned(NoRepeatNgram(n=2), [[20, 3, 20], [3, 20, 3], [20, 3, 3]]) == [{3}, set(), {3}]
    assert banned(NoRepeatNgram(n=1), [[8, 20]]) == [{8}]
