import re
import warnings

import pytest
from hypothesis import HealthCheck, assume, example, given, settings

from decodekit.core.errors import InputError, UnsupportedConstraint
from decodekit.fsm.automaton import DEAD, Dfa
from decodekit.fsm.regex import Regex
from decodekit.fsm.syntax import parse
from tests.fsm.patterns import CHARACTERS, has, regexes, texts


def automaton(pattern):
    return Dfa(Regex(parse(pattern)))


def matches(pattern, text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return re.fullmatch(pattern, text) is not None


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(regexes, texts)
@example(r"1(\.5)?", "1.5")
@example(r"(?:(?=a)|b){2}a", "bba")
@example(r"((?!foo).)*bar", "xfoo bar")
@example(r"a$\n", "a\n")
@example(r"\B", "")
@example(r"(a?b?)*1", "ab1")
def test_accepts_what_re_accepts(pattern, text):
    try:
        dfa = automaton(pattern)
    except InputError:
        with pytest.raises(re.error):
            re.compile(pattern)
        return
    assert has(dfa, text) == matches(pattern, text)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(regexes, texts, texts)
def test_a_state_is_dead_only_where_no_text_goes_on(pattern, text, more):
    try:
        dfa = automaton(pattern)
    except InputError:
        assume(False)
    state = Dfa.start
    for byte in text.encode():
        state = dfa.step(state, byte)
    if matches(pattern, text + more):
        assert dfa.is_live(state)
    if dfa.is_live(state):
        assert dfa.least[state] <= len(shortest(dfa, state))


def shortest(dfa, state):
    """The bytes of a shortest way to acceptance, by breadth."""
    ways = {state: b""}
    queue = [state]
    for here in queue:
        if dfa.accepting[here]:
            return ways[here]
        for byte in range(256):
            after = dfa.step(here, byte)
            if after != DEAD and after not in ways:
                ways[after] = ways[here] + bytes([byte])
                queue.append(after)
    raise AssertionError("called live, but accepts nothing")


@pytest.mark.parametrize("pattern", [".", r"\w", r"[^a]", r"\S", "[é-😀]", r"(?i)ſ", r"(?i)[^k]", r"(?a:\w)", r"\D"])
def test_a_class_has_the_characters_that_re_gives_it(pattern):
    dfa = automaton(pattern)
    compiled = re.compile(pattern)
    points = [
        *range(0x250),
        *range(0x1E90, 0x1EA8),
        0x212A,
        *range(0xD7F0, 0xD800),
        *range(0xE000, 0xE010),
        0x1F600,
        0x10FFFF,
    ]
    wrong = [hex(point) for point in points if has(dfa, chr(point)) != bool(compiled.fullmatch(chr(point)))]
    assert not wrong


def test_only_utf8_is_text():
    dfa = automaton("(?s).*")
    for bad in (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe4\xb8", b"\x80"):
        assert not has(dfa, bad)
    for good in (b"\xe4\xb8\xad", b"\xf4\x8f\xbf\xbf", b"\x00"):
        assert has(dfa, good)


@pytest.mark.parametrize(
    ("pattern", "feature"),
    [
        (r"(a|b)\1", "backreference"),
        (r"(a)?(?(1)b|c)", "conditional group"),
        ("(?>a+)b", "atomic group"),
        ("a++b", "possessive quantifier"),
        ("(?<=(?=a)a)b", "look-around inside a look-behind"),
        (r"(?<=\ba)b", "anchor inside a look-behind"),
        ("(a{1,1000}){1,1000}", "repetition"),
        ("a{1000000}", "repetition"),
        ("(" * 4000 + "a" + ")" * 4000, "nesting"),
    ],
)
def test_refuses_by_name_what_it_cannot_enforce(pattern, feature):
    with pytest.raises(UnsupportedConstraint) as raised:
        parse(pattern)
    assert raised.value.keywords == (feature,)


@pytest.mark.parametrize("pattern", ["(", r"\p{L}+", "(?<=a*)b", "a{2,1}"])
def test_refuses_what_re_refuses(pattern):
    with pytest.raises(InputError, match="is not one of Python's"):
        parse(pattern)


def test_what_re_says_is_told_in_one_line():
    with pytest.raises(InputError, match="unknown extension") as raised:
        parse("(?\n:a)")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("pattern", ["((a*)*)*b", "(a|a)*b", "(a?){60}a{60}", "([ab]*a){3}[ab]{4}"])
def test_nested_quantifiers_take_few_states(pattern):
    dfa = automaton(pattern)
    has(dfa, "a" * 200 + "b")
    assert len(dfa) < 500


def test_refuses_an_automaton_that_grows_too_large():
    dfa = automaton("(.*a.{60})(.*b.{60})(.*[ab].{60})!")
    texts = ("".join(CHARACTERS[bit == "1"] for bit in f"{number:020b}") for number in range(1 << 20))
    with pytest.raises(UnsupportedConstraint, match="more than the work allowed"):
        all(has(dfa, text) or True for text in texts)
