import pytest
from tokenizers.processors import TemplateProcessing

from decodekit.core.errors import InputError
from decodekit.core.tokens import check_ids, encode
from decodekit.testing import tiny_tokenizer


def test_encode_adds_no_special_tokens() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    assert tokenizer("ab").input_ids == [2, 5, 6]
    assert encode(tokenizer, "ab", "rule") == (5, 6)


def test_encode_says_what_is_missing() -> None:
    with pytest.raises(InputError, match="rule needs a tokenizer for 'ab'"):
        encode(None, "ab", "rule")
    with pytest.raises(InputError, match="rule: '' has no tokens"):
        encode(tiny_tokenizer(), "", "rule")


def test_check_ids_names_the_id_and_the_vocabulary() -> None:
    check_ids([0, 8], 9, "rule")
    with pytest.raises(
        InputError, match=r"rule: token id 9 is not in the vocabulary, which has 9 tokens \(ids 0 to 8\)"
    ):
        check_ids([0, 9], 9, "rule")
