import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decodekit.core.errors import UnsupportedConstraint
from decodekit.llg.engine import CompiledGrammar, is_empty
from decodekit.schemas import numbers
from tests.llg.walks import accepts, byte_vocabulary

VOCABULARY = byte_vocabulary()
NUMERALS = st.one_of(
    st.integers(-2000, 2000).map(str),
    st.decimals(-200, 200, places=3).map(lambda value: f"{value:f}"),
    st.builds(
        "{}{}.{}e{}".format, st.sampled_from(["", "-"]), st.integers(1, 9), st.integers(0, 99), st.integers(-5, 5)
    ),
)
BOUNDS = st.integers(-500, 500).map(lambda value: Fraction(value, 8))


def matches(terminal, text):
    return accepts(CompiledGrammar(f"start: T\nT: {terminal}\n", VOCABULARY), VOCABULARY, text)


@settings(max_examples=60)
@given(BOUNDS, st.booleans(), st.booleans(), st.lists(NUMERALS, min_size=5, max_size=5))
def test_bounds_hold_for_every_way_to_write_a_number(bound, upper, inclusive, texts) -> None:
    terminal = numbers.at_most(bound, inclusive) if upper else numbers.at_least(bound, inclusive)
    for text in [*texts, f"{float(bound)}"]:
        value = Fraction(text)
        assert matches(terminal, text) == (
            (inclusive and value == bound) or (value < bound if upper else value > bound)
        )


@settings(max_examples=40)
@given(
    st.sampled_from([1, 2, 3, 4, 6, 25, Fraction(1, 2), Fraction(1, 100)]), st.lists(NUMERALS, min_size=5, max_size=5)
)
def test_multiples(divisor, texts) -> None:
    terminal = numbers.multiple_of(Fraction(divisor))
    for text in texts:
        if "e" not in text:  # not all of the scientific forms are there
            assert matches(terminal, text) == ((Fraction(text) / divisor).denominator == 1), text


@settings(max_examples=40)
@given(BOUNDS, st.lists(NUMERALS, min_size=5, max_size=5))
def test_one_number(value, texts) -> None:
    for text in [*texts, json.dumps(float(value)), f"{float(value)}00"]:
        assert matches(numbers.exactly(value), text) == (Fraction(text) == value), text


def test_what_no_terminal_can_count_is_refused() -> None:
    with pytest.raises(UnsupportedConstraint, match="more than a terminal can count"):
        numbers.multiple_of(Fraction(7))
    assert is_empty(f"{numbers.at_least(Fraction(3), True)} & {numbers.at_most(Fraction(3), False)}")
