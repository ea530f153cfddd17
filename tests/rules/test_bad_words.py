import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from pydantic import ValidationError
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from decodekit.core.errors import InputError
from decodekit.rules.bad_words import BadWords
from decodekit.testing import check_rule, make_rows, tiny_tokenizer

TOKENIZER = tiny_tokenizer()

OVERLOOKS = Version(transformers.__version__) < Version("5.24")
"""Transformers may not see yet that a row as short as the word, less its last token, begins the word."""


def banned(rule: BadWords, *texts: str) -> list[str]:
    histories = [TOKENIZER.encode(text) for text in texts]
    result = rule.resolve(TOKENIZER)(make_rows(histories), torch.zeros(len(texts), 97))
    return [
        "|".join(TOKENIZER.convert_ids_to_tokens((row == -torch.inf).nonzero().flatten().tolist())) for row in result
    ]


@pytest.mark.parametrize(
    "rule", [BadWords(words=("the", "cat"), case="any"), BadWords(ids=((4,), (4, 5), (6, 4, 5), (7, 4, 5)))]
)
def test_obeys_the_laws_of_a_rule(rule: BadWords) -> None:
    histories = [[4], [6, 4], [7, 6, 4, 5, 4], [6, 7, 4], [4, 6]]
    check_rule(rule, tokenizer=TOKENIZER, rows=make_rows(histories, [1, 1, 2, 3, 1], beyond=4))


sequences = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4)


@given(histories=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=7), min_size=1, max_size=4), ids=sequences)
@settings(max_examples=150)
def test_equals_transformers_row_by_row(histories: list[list[int]], ids: list[list[int]]) -> None:
    logits = torch.randn(len(histories), 9)
    result = BadWords(ids=ids)(make_rows(histories), logits)
    for row, history in enumerate(histories):
        if OVERLOOKS and any(len(word) == len(history) + 1 for word in ids):
            continue
        expected = NoBadWordsLogitsProcessor(ids)(torch.tensor([history]), logits[row : row + 1])
        assert torch.equal(result[row : row + 1], expected)


def test_a_word_of_one_token_is_banned_everywhere_with_and_without_a_space() -> None:
    assert banned(BadWords(words=("the",)), "a", "the") == ["the| the", "the| the"]


def test_the_last_token_of_a_longer_word_is_banned_right_after_the_others() -> None:
    assert banned(BadWords(words=("cat",)), "a", "ca", "a ca", "cab", "c", "at ca") == ["", "t", "t", "", "", "t"]


def test_words_are_exact_unless_any_case_is_asked_for() -> None:
    texts = ("ca", "CA", "Ca", "cA")
    assert banned(BadWords(words=("cat",)), *texts) == ["t", "", "", ""]
    assert banned(BadWords(words=("cat",), case="any"), *texts) == ["t", "T", "t", ""]
    # The given spelling is banned too, although it is none of the three.
    assert banned(BadWords(words=("cAt",), case="any"), *texts) == ["t", "T", "t", "t"]


def test_resolving_keeps_ids_and_is_idempotent() -> None:
    resolved = BadWords(words=("ab",), ids=((9,),)).resolve(TOKENIZER)
    assert resolved == BadWords(ids=((9,), (5, 6), (4, 5, 6)))
    assert resolved.resolve(TOKENIZER) == resolved
    assert BadWords(words=("ab", "ab"), ids=((9,), (9,))).resolve(TOKENIZER) == resolved


def test_says_what_is_missing() -> None:
    with pytest.raises(InputError, match="bad_words needs a tokenizer for 'cat'; give dk_tokenizer"):
        BadWords(words=("cat",)).resolve(None)
    with pytest.raises(InputError, match=r"'cat' is not tokenized yet; use rule\.resolve"):
        BadWords(words=("cat",))(make_rows([[3]]), torch.zeros(1, 97))
    with pytest.raises(InputError, match="token id 97 is not in the vocabulary, which has 97 tokens"):
        BadWords(ids=((3,), (96, 97)))(make_rows([[3]]), torch.zeros(1, 97))
    with pytest.raises(ValidationError, match="bans nothing; give words"):
        BadWords()


@pytest.mark.parametrize("options", [{"words": [""]}, {"ids": [[]]}, {"ids": [[-1]]}])
def test_refuses_empty_words_and_negative_ids(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"at least 1|greater than or equal to 0"):
        BadWords(**options)


def test_ids_beyond_the_logits_may_stand_before_the_last() -> None:
    result = BadWords(ids=((120, 3),))(make_rows([[5, 120], [120, 5]]), torch.zeros(2, 97))
    assert (result == -torch.inf).nonzero().tolist() == [[0, 3]]
