import re

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from decodekit.fsm.algebra import Concatenation, Difference, Intersection, Texts, Union, any_text
from decodekit.fsm.automaton import DEAD, Dfa
from decodekit.fsm.regex import Regex
from decodekit.fsm.syntax import parse
from tests.fsm.patterns import has, plain_regexes, texts

relaxed = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def dfa(pattern):
    return Dfa(Regex(parse(pattern)))


def matches(pattern, text):
    return re.fullmatch(pattern, text) is not None


@relaxed
@given(plain_regexes, plain_regexes, texts)
@example("a+", "b+", "")
def test_union_intersection_and_difference_are_those_of_sets(one, other, text):
    in_one, in_other = matches(one, text), matches(other, text)
    assert has(Dfa(Union([dfa(one), dfa(other)])), text) == (in_one or in_other)
    assert has(Dfa(Intersection([dfa(one), dfa(other)])), text) == (in_one and in_other)
    assert has(Dfa(Difference(dfa(one), dfa(other))), text) == (in_one and not in_other)


@relaxed
@given(plain_regexes, plain_regexes, texts)
def test_concatenation_cuts_anywhere(one, other, text):
    cuts = range(len(text) + 1)
    expected = any(matches(one, text[:cut]) and matches(other, text[cut:]) for cut in cuts)
    assert has(Dfa(Concatenation(dfa(one), dfa(other))), text) == expected


@relaxed
@given(plain_regexes, plain_regexes, texts)
def test_de_morgan(one, other, text):
    def complement(inner):
        return Dfa(Difference(any_text(), inner))

    inner = Dfa(Union([complement(dfa(one)), complement(dfa(other))]))
    assert has(complement(inner), text) == has(Dfa(Intersection([dfa(one), dfa(other)])), text)


@relaxed
@given(st.sets(texts, min_size=1, max_size=6), texts)
def test_texts_are_those_texts(choices, text):
    automaton = Dfa(Texts(choices))
    assert has(automaton, text) == (text in choices)
    assert all(has(automaton, choice) for choice in choices)


@pytest.mark.parametrize(
    ("one", "other", "live"),
    [
        ("a+", "b+", False),
        ("a+", ".*b", False),
        ("[ab]{4}", ".*b.*", True),
        (r"[^\n]{1500}", r".*\d.*", True),
        ("中", "丮", False),
    ],
)
def test_an_empty_intersection_is_seen_at_its_start(one, other, live):
    both = Dfa(Intersection([dfa(one), dfa(other)]))
    assert both.is_live(Dfa.start) is live


def test_dead_ends_are_seen_before_they_are_met():
    # After "ac" only "b" may follow for one side, and only "d" for the other.
    both = Dfa(Intersection([dfa("ac?b|xb"), dfa("acd|xb")]))
    assert has(both, "xb")
    state = both.step(Dfa.start, ord("a"))
    assert state != DEAD
    assert not both.is_live(state)
