import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decodekit.core.errors import UnsupportedConstraint
from decodekit.llg.engine import CompiledGrammar, is_empty
from decodekit.schemas import patterns
from decodekit.schemas.ecmascript import matcher, parse
from tests.llg.walks import accepts, byte_vocabulary

VOCABULARY = byte_vocabulary()
TEXTS = st.text('ab1_ "\\/é日😀\n', max_size=5)
ATOMS = st.sampled_from(["a", "b", "é", ".", "[^a]", r"\d", r"\w", r"\S", "[a-b1]", "😀", r"\/", r"\p{L}", "(?:a|1)"])
PATTERNS = st.builds(
    "{}{}{}".format,
    st.sampled_from(["", "^", "^(?!a)", "(?=b)"]),
    st.lists(st.builds("{}{}".format, ATOMS, st.sampled_from(["", "*", "+", "?", "{2}"])), max_size=3).map("".join),
    st.sampled_from(["", "$"]),
)


@settings(max_examples=80)
@given(PATTERNS, st.lists(TEXTS, min_size=4, max_size=4))
def test_a_pattern_is_found_however_the_string_is_written(pattern, texts) -> None:
    terminal = patterns.found(pattern)
    compiled = None if is_empty(terminal) else CompiledGrammar(f"start: T\nT: {terminal}\n", VOCABULARY)
    for text in texts:
        found = matcher(pattern).search(text) is not None
        for ascii_only in (True, False):
            written = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
            assert (compiled is not None and accepts(compiled, VOCABULARY, written)) == found, text


@pytest.mark.parametrize("pattern", ["a+b", "^x|y$", r"[\d_]{2,3}", "a(?=b)", r"(?:ab)*$"])
@settings(max_examples=20)
@given(text=st.text("abxy1_\n", max_size=6))
def test_patterns_without_differences_are_found_where_re_finds_them(pattern, text) -> None:
    expected = re.search(pattern.replace("$", r"\Z"), text) is not None
    assert (matcher(pattern).search(text) is not None) == expected


@pytest.mark.parametrize("pattern", [r"(a)\1", r"\bword", "(?<=a)b", "a**", "(", "[b-a]", r"\p{Script=Greek}"])
def test_what_no_automaton_can_match_is_refused(pattern) -> None:
    with pytest.raises(UnsupportedConstraint, match="the pattern"):
        parse(pattern)
