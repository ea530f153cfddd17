import pytest
import torch
from pydantic import ValidationError

from decodekit.core.errors import InputError
from decodekit.rules.logit_bias import LogitBias
from decodekit.testing import check_rule, make_rows, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def test_obeys_the_laws_of_a_rule() -> None:
    check_rule(LogitBias(bias={4: -100, " the": 3.5, "x": 1}), tokenizer=TOKENIZER)


def test_adds_to_the_named_tokens_only() -> None:
    logits = torch.tensor([[1.0, 2.0, -torch.inf, 4.0], [0.0, 0.0, 0.0, 0.0]])
    result = LogitBias(bias={1: 0.5, 2: 7, 3: -3})(make_rows([[3], [3]]), logits)
    assert result.tolist() == [[1.0, 2.5, -torch.inf, 1.0], [0.0, 0.5, 7.0, -3.0]]


def test_texts_become_ids() -> None:
    the, spaced_the = TOKENIZER.convert_tokens_to_ids(["the", " the"])
    resolved = LogitBias(bias={"the": 1, " the": -2, 9: 3}).resolve(TOKENIZER)
    assert resolved == LogitBias(bias={the: 1, spaced_the: -2, 9: 3})


def test_digits_are_ids_so_that_json_can_name_them() -> None:
    rule = LogitBias(bias={"17": 1, "x": 2})
    assert rule == LogitBias(bias={17: 1, "x": 2})
    assert LogitBias.model_validate_json(rule.model_dump_json()) == rule


def test_a_text_of_several_tokens_says_which_and_what_to_do() -> None:
    message = r"logit_bias: 'cat' is 3 tokens: 'c' \(7\), 'a' \(5\), 't' \(24\); give the text of exactly one token"
    with pytest.raises(InputError, match=message):
        LogitBias(bias={"cat": 1}).resolve(TOKENIZER)


def test_two_biases_for_one_token_are_refused_unless_they_agree() -> None:
    the = TOKENIZER.convert_tokens_to_ids("the")
    with pytest.raises(InputError, match=f"'the' is token {the}, which has another bias already"):
        LogitBias(bias={the: 1, "the": 2}).resolve(TOKENIZER)
    assert LogitBias(bias={the: 1, "the": 1}).resolve(TOKENIZER) == LogitBias(bias={the: 1})


def test_says_what_is_missing() -> None:
    with pytest.raises(InputError, match="logit_bias needs a tokenizer for 'x'"):
        LogitBias(bias={"x": 1}).resolve(None)
    with pytest.raises(InputError, match=r"names tokens by text; turn them into ids with rule\.resolve"):
        LogitBias(bias={"x": 1})(make_rows([[3]]), torch.zeros(1, 97))
    with pytest.raises(InputError, match="token id 50256 is not in the vocabulary, which has 97 tokens"):
        LogitBias(bias={50256: -100})(make_rows([[3]]), torch.zeros(1, 97))


@pytest.mark.parametrize("bias", [{}, {"": 1}, {-1: 1}, {3: float("inf")}, {3: float("nan")}, [3]])
def test_refuses_what_is_no_bias(bias: object) -> None:
    with pytest.raises(ValidationError):
        LogitBias(bias=bias)
