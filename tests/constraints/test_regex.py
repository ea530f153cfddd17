import pytest
import torch

from decodekit.constraints.regex import Regex
from decodekit.core.constraint import mask_tokens, mask_words
from decodekit.core.errors import InputError, RecipeError, UnsupportedConstraint
from decodekit.core.registry import create
from decodekit.core.vocabulary import Vocabulary


@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"),
    [
        (r"1(\.5)?", ["1", "1.5"], ["1.", "5"]),
        ("[😀-🙏]+", ["😨😍", "😀"], ["a", "🚀", ""]),
        ("日本|中文", ["日本", "中文"], ["日", "日本中文"]),
        ('"[^"]{1}"', ['"a"', '"😀"', '"中"'], ['""', '"ab"']),
        ("(?!foo)[a-z]{3}", ["bar", "fox"], ["foo"]),
        (r"(?=.*\d)[a-z0-9]{4,8}", ["abc1"], ["abcd", "1"]),
        (r"\bcat\b", ["cat"], ["cats"]),
        ("^(yes|no)$", ["yes", "no"], ["yesno", ""]),
        ("(?i)hello", ["HeLLo"], ["hallo"]),
        (r"\w{2,8}\s\w{2,8}", ["été là"], ["a b"]),
        (".*", ["", "any thing", "héllo 😨"], ["a\nb"]),
        ("[^\\n]{0,2000}", ["x" * 2000], ["x" * 2001]),
        ("[ab]*a[ab]{11}", ["babbbbbbbbbbb"], ["bbbbbbbbbbbb"]),
        ("the end", ["the end"], ["the"]),
    ],
)
def test_accepts_what_python_does(accepts, pattern, valid, invalid):
    assert [text for text in valid if not accepts(Regex(pattern=pattern), text)] == []
    assert [text for text in invalid if accepts(Regex(pattern=pattern), text)] == []


def test_a_literal_may_begin_with_any_token_that_begins_it(demo):
    vocabulary = Vocabulary.of(demo[1])
    out = torch.zeros(1, mask_words(vocabulary.width), dtype=torch.int32)
    Regex(pattern="te").compile(vocabulary).start().mask(out, 0)
    assert {vocabulary.tokens[token] for token in mask_tokens(out[0])} == {b"t", b"te"}


def test_logits_wider_than_the_tokenizer_are_masked(demo):
    vocabulary = Vocabulary.of(demo[1], width=50432)
    out = torch.full((1, mask_words(50432)), -1, dtype=torch.int32)
    Regex(pattern=".*").compile(vocabulary).start().mask(out, 0)
    assert max(mask_tokens(out[0])) < len(demo[1])


@pytest.mark.parametrize("pattern", ["(a{1,1000}){1,1000}", "a{1000000}", "x" * 200_000])
def test_bombs_are_refused(demo, pattern):
    with pytest.raises(UnsupportedConstraint, match=r"repeat less|more than 100,000"):
        Regex(pattern=pattern).compile(Vocabulary.of(demo[1]))


def test_faults_are_named():
    vocabulary = Vocabulary((None, b"a"), False, (0,), None)
    with pytest.raises(UnsupportedConstraint, match="backreference"):
        Regex(pattern=r"(a)\1").compile(vocabulary)
    with pytest.raises(InputError, match="is not one of Python's: missing"):
        Regex(pattern="(").compile(vocabulary)
    with pytest.raises(RecipeError, match="missing: this option is required"):
        create("constraints", {"kind": "regex"})
