import pytest
from pydantic import ValidationError

from decodekit.constraints.phrases import Phrases


@pytest.mark.parametrize(
    ("options", "valid", "invalid"),
    [
        ({"contains": ["foo", "bar"]}, ["foobar", "a bar\nfoo"], ["foo", "fobar"]),
        ({"never": ["foo", "日本"]}, ["", "fo o", "日x本"], ["foo", "a food", "日本語"]),
        ({"starts": ["He", "Wo"]}, ["He", "World"], ["he", " He", ""]),
        ({"ends": [".", "!"]}, ["Yes.", "No!", "..."], ["Yes", ". "]),
        ({"contains": ["a.c"]}, ["xa.cx"], ["abc"]),
        ({"contains": ["b"], "never": ["bad"], "starts": ["a"], "ends": ["z"]}, ["abz"], ["abadz", "az", "bz", "ab"]),
    ],
)
def test_asks_for_all_it_says(accepts, options, valid, invalid):
    phrases = Phrases(**options)
    assert [text for text in valid if not accepts(phrases, text)] == []
    assert [text for text in invalid if accepts(phrases, text)] == []


def test_phrases_that_ask_for_nothing_are_refused():
    with pytest.raises(ValidationError, match="phrases asks for nothing"):
        Phrases()
