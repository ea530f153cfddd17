import pytest
from pydantic import ValidationError

from decodekit.scorers.regex import Regex
from tests.scorers.texts import scores


def test_is_found_anywhere() -> None:
    assert scores(Regex(pattern=r"\d+"), "a 12", "none", "3") == [1, 0, 1]
    assert scores(Regex(pattern=r"^\d+$"), "a 12", "none", "3") == [0, 0, 1]


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"should be a regular expression, got '\('"):
        Regex(pattern="(")
