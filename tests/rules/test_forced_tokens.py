import pytest
import torch
from pydantic import ValidationError

from decodekit.core.errors import InputError
from decodekit.rules.forced_tokens import ForcedTokens
from decodekit.testing import check_rule, make_rows, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
INF = torch.inf


@pytest.mark.parametrize("rule", [ForcedTokens(ids={0: 4, 3: 9}), ForcedTokens(text="the cat", ids={7: 4})])
def test_obeys_the_laws_of_a_rule(rule: ForcedTokens) -> None:
    check_rule(rule, tokenizer=TOKENIZER)


def test_leaves_the_forced_token_alone_and_only_at_its_position() -> None:
    rule = ForcedTokens(ids={0: 2, 2: 0})
    logits = torch.tensor([1.0, 2.0, 3.0])
    # Outputs of 0, 1, 2 and 3 tokens after prompts of different lengths.
    rows = make_rows([[7, 7], [7, 8], [7, 8, 8], [7, 7, 8, 8, 8]], [2, 1, 1, 2])
    assert rule(rows, logits.expand(4, -1)).tolist() == [
        [-INF, -INF, 3.0],
        [1.0, 2.0, 3.0],
        [1.0, -INF, -INF],
        [1.0, 2.0, 3.0],
    ]


def test_a_masked_token_cannot_be_forced() -> None:
    result = ForcedTokens(ids={0: 1})(make_rows([[7]]), torch.tensor([[1.0, -INF]]))
    assert result.tolist() == [[-INF, -INF]]


def test_text_is_forced_from_the_first_position() -> None:
    rule = ForcedTokens(text="the x").resolve(TOKENIZER)
    assert TOKENIZER.decode([rule.ids[position] for position in range(len(rule.ids))]) == "the x"
    assert rule.resolve(TOKENIZER) == rule


def test_text_and_ids_may_agree_but_not_conflict() -> None:
    assert ForcedTokens(text="ab", ids={1: 6, 4: 9}).resolve(TOKENIZER) == ForcedTokens(ids={0: 5, 1: 6, 4: 9})
    with pytest.raises(InputError, match="position 1 is token 6 of the text 'ab' and token 9 of ids; keep one"):
        ForcedTokens(text="ab", ids={1: 9}).resolve(TOKENIZER)


def test_says_what_is_missing() -> None:
    with pytest.raises(ValidationError, match="forces nothing; give text"):
        ForcedTokens()
    with pytest.raises(InputError, match="forced_tokens needs a tokenizer for 'ab'"):
        ForcedTokens(text="ab").resolve(None)
    with pytest.raises(InputError, match=r"'ab' is not tokenized yet; use rule\.resolve"):
        ForcedTokens(text="ab")(make_rows([[7]]), torch.zeros(1, 97))
    with pytest.raises(InputError, match="token id 97 is not in the vocabulary, which has 97 tokens"):
        ForcedTokens(ids={0: 97})(make_rows([[7]]), torch.zeros(1, 97))
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        ForcedTokens(ids={-1: 3})
