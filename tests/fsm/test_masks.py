import random
import re

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from decodekit.core.constraint import is_legal, mask_tokens, mask_words
from decodekit.core.errors import InputError, RowError
from decodekit.core.vocabulary import Vocabulary
from decodekit.fsm.algebra import Intersection
from decodekit.fsm.automaton import DEAD, Dfa
from decodekit.fsm.masks import CompiledAutomaton
from decodekit.fsm.regex import Regex
from decodekit.fsm.syntax import parse
from decodekit.fsm.trie import TokenTrie
from tests.fsm.patterns import small_regexes

TOKENS = ["a", "b", "A", "1", "_", " ", "\n", "ab", "aa", "aab", "b1", " a", "\n\n", "é", "中", "😀", "中😀", "1_1"]
BYTES = [b"\xc3", b"\xa9", b"\xe4\xb8", b"\xad", b"\xf0\x9f", b"\x98\x80", b"a\xf0", b"\x9f\x98\x80", b"\x80"]


@pytest.fixture(scope="module")
def vocabulary():
    """Tokens of whole and of part characters, in no order of bytes; two ids without text, one of them EOS."""
    tokens = [None, *(token.encode() for token in TOKENS), *BYTES, None]
    return Vocabulary(tuple(tokens), False, (0,), None)


def compiled(pattern, vocabulary):
    return CompiledAutomaton(Regex(parse(pattern)), vocabulary)


def mask_of(state, width):
    out = torch.full((3, mask_words(width)), -1, dtype=torch.int32)
    state.mask(out, 1)
    assert (out[0] == -1).all()
    assert (out[2] == -1).all()
    return out[1].clone()


def walk(state, vocabulary, rng, limit=12):
    """Tokens of a random text of a language: uniform over the legal ones, then by the shortest way to an end."""
    tokens = []
    out = torch.zeros(1, mask_words(vocabulary.width), dtype=torch.int32)
    while True:
        state.mask(out, 0)
        if len(tokens) >= limit:
            if state.is_accepting():
                return tokens
            state.mask_within(out, 0, state.min_tokens_to_accept(100))
        legal = mask_tokens(out[0])
        assert legal, "a dead end"
        token = rng.choice(legal)
        if token in vocabulary.eos_ids:
            return tokens
        state.advance(token)
        tokens.append(token)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(small_regexes, st.randoms(use_true_random=False))
def test_random_walks_end_in_texts_that_re_accepts(vocabulary, pattern, rng):
    try:
        constraint = compiled(pattern, vocabulary)
    except InputError:
        assume(False)
    state = constraint.start()
    tokens = walk(state, vocabulary, rng)
    text = b"".join(vocabulary.tokens[token] for token in tokens).decode()
    assert re.fullmatch(pattern, text), (pattern, text)


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(small_regexes, st.randoms(use_true_random=False))
def test_a_mask_has_the_tokens_after_which_the_text_can_be_completed(vocabulary, pattern, rng):
    """Token by token, by search instead of a walk of all tokens at once."""
    try:
        constraint = compiled(pattern, vocabulary)
    except InputError:
        assume(False)
    dfa, state, here = Dfa(Regex(parse(pattern))), constraint.start(), Dfa.start
    for _ in range(4):
        after = [read(dfa, here, token) for token in vocabulary.tokens]
        legal = [token for token, there in enumerate(after) if can_end(dfa, there, vocabulary)]
        if dfa.accepting[here]:
            legal = sorted([*legal, 0])
        assert mask_tokens(mask_of(state, vocabulary.width)) == legal
        if not (legal := [token for token in legal if token]):
            break
        token = rng.choice(legal)
        state.advance(token)
        here = after[token]


def read(dfa, state, token):
    for byte in token or ():
        state = dfa.step(state, byte)
    return state if token else 0


def can_end(dfa, state, vocabulary):
    return bool(state) and fewest(dfa, state, vocabulary) is not None


def fewest(dfa, state, vocabulary):
    """The fewest tokens to acceptance, by breadth."""
    queue, lengths = [state], {state: 0}
    for here in queue:
        if dfa.accepting[here]:
            return lengths[here]
        for token in vocabulary.tokens:
            there = read(dfa, here, token)
            if there and there not in lengths:
                lengths[there] = lengths[here] + 1
                queue.append(there)
    return None


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(small_regexes, st.integers(0, 4))
def test_the_shortest_end_is_the_shortest(vocabulary, pattern, limit):
    try:
        state = compiled(pattern, vocabulary).start()
    except InputError:
        assume(False)
    dfa = Dfa(Regex(parse(pattern)))
    expected = fewest(dfa, Dfa.start, vocabulary)
    assert state.min_tokens_to_accept(limit) == (expected if expected <= limit else None)
    assert state.min_tokens_to_accept(expected) == expected
    out = torch.zeros(1, mask_words(vocabulary.width), dtype=torch.int32)
    state.mask_within(out, 0, limit)
    ends = [fewest(dfa, read(dfa, Dfa.start, token), vocabulary) for token in vocabulary.tokens]
    in_time = [token for token, end in enumerate(ends) if token and end is not None and end < limit]
    assert [token for token in mask_tokens(out[0]) if token] == in_time


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(small_regexes, st.randoms(use_true_random=False))
def test_rollback_is_replay_and_forks_go_their_own_way(vocabulary, pattern, rng):
    try:
        constraint = compiled(pattern, vocabulary)
    except InputError:
        assume(False)
    tokens = walk(constraint.start(), vocabulary, rng)
    kept = rng.randrange(len(tokens) + 1)
    state, replayed = constraint.start(), constraint.start()
    for token in tokens:
        state.advance(token)
    for token in tokens[:kept]:
        replayed.advance(token)
    fork = state.fork()
    state.rollback(len(tokens) - kept)
    assert torch.equal(mask_of(state, vocabulary.width), mask_of(replayed, vocabulary.width))
    assert state.is_accepting() == replayed.is_accepting()
    assert fork.is_accepting()
    for token in tokens[kept:]:
        state.advance(token)
    assert torch.equal(mask_of(state, vocabulary.width), mask_of(fork, vocabulary.width))


def test_what_is_not_legal_is_refused_and_changes_nothing(vocabulary):
    state = compiled("ab|a1", vocabulary).start()
    before = mask_of(state, vocabulary.width)
    for token in (0, vocabulary.tokens.index(b"b"), vocabulary.width - 1, vocabulary.width, -1):
        with pytest.raises(RowError, match="is not legal after 0 tokens"):
            state.advance(token)
    assert torch.equal(mask_of(state, vocabulary.width), before)
    with pytest.raises(InputError, match="cannot take back 1 tokens of 0"):
        state.rollback(1)


def test_after_the_end_only_the_end_is_legal(vocabulary):
    state = compiled("a*", vocabulary).start()
    state.advance(vocabulary.tokens.index(b"aa"))
    state.advance(0)
    assert mask_tokens(mask_of(state, vocabulary.width)) == [0]
    state.advance(0)
    assert state.is_accepting()
    assert state.forced_tokens() == []
    state.rollback(2)
    assert mask_tokens(mask_of(state, vocabulary.width)) == [0, *sorted(map(vocabulary.tokens.index, (b"a", b"aa")))]


def test_part_of_a_character_is_legal_only_on_the_way_to_a_legal_one(vocabulary):
    legal = mask_tokens(mask_of(compiled("[😀-🙏]+", vocabulary).start(), vocabulary.width))
    assert [vocabulary.tokens[token] for token in legal] == ["😀".encode(), b"\xf0\x9f"]
    legal = mask_tokens(mask_of(compiled("中+", vocabulary).start(), vocabulary.width))
    assert [vocabulary.tokens[token] for token in legal] == ["中".encode(), b"\xe4\xb8"]


@pytest.mark.parametrize("pattern", ["x", "a[^ -z\n]é?x", "(?!)"])
def test_refuses_a_language_that_the_tokens_cannot_spell(vocabulary, pattern):
    with pytest.raises(InputError, match="no text that the tokenizer can spell"):
        compiled(pattern, vocabulary)


def test_the_space_that_a_decoder_drops_at_the_start_costs_nothing():
    tokens = (None, b"a", b" a", b" ", b"b", b" b")
    state = CompiledAutomaton(Regex(parse("a b")), Vocabulary(tokens, True, (0,), None)).start()
    assert mask_tokens(mask_of(state, 6)) == [1, 2]
    state.advance(2)
    assert mask_tokens(mask_of(state, 6)) == [3, 5]
    assert not is_legal(mask_of(state, 6), 4)


@pytest.fixture(scope="module")
def smol(demo):
    """The demo model's vocabulary: merges go across almost any boundary."""
    return Vocabulary.of(demo[1])


@pytest.mark.parametrize(
    ("pattern", "forced"),
    [
        ("name: (foo|bar)", ["name", ":"]),
        ('"name": "[a-z]+"', ['"', "name", '":', ' "']),
        (r"The answer is \d+", ["The", " answer", " is"]),
        ("hello", ["hello"]),
        ("hello|help", []),
        ("(hello)?", []),
        ("(😨|😍)+", []),
        ("日本語です?", None),
    ],
)
def test_forced_tokens_are_cut_as_the_tokenizer_cuts_the_text(smol, pattern, forced):
    state = compiled(pattern, smol).start()
    tokens = state.forced_tokens()
    if forced is not None:
        assert [smol.tokens[token].decode() for token in tokens] == forced
    for text in ("日本語です", "日本語で") if forced is None else ():
        assert list(smol.encode(text)[: len(tokens)]) == tokens
    for token in tokens:
        state.advance(token)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    text=st.text(alphabet="abt e\n1é中", min_size=1, max_size=12),
    ends=st.lists(st.text("at e\n1.é", max_size=4), min_size=2, max_size=4),
)
def test_every_text_of_the_language_begins_with_its_forced_tokens(smol, text, ends):
    state = compiled(f"{re.escape(text)}(?:{'|'.join(map(re.escape, ends))})", smol).start()
    forced = state.forced_tokens()
    for end in ends:
        assert list(smol.encode(text + end)[: len(forced)]) == forced, (text, end)


def test_states_of_a_product_never_meet_a_dead_end(vocabulary):
    rng = random.Random(0)
    members = [Dfa(Regex(parse(pattern))) for pattern in ("(a|b1|中)*", ".{3}|.{5}", r".*1.*")]
    for _ in range(50):
        tokens = walk(CompiledAutomaton(Intersection(members), vocabulary).start(), vocabulary, rng)
        text = b"".join(vocabulary.tokens[token] for token in tokens).decode()
        assert re.fullmatch("(a|b1|中)*", text)
        assert len(text) in (3, 5)
        assert "1" in text


def test_where_there_is_room_no_fewest_tokens_are_searched_for(vocabulary, monkeypatch) -> None:
    tokens = (None, *(bytes([byte]) for byte in b"ab "), b"abab", b"ab ")
    constraint = compiled("[ab]{2000,}", Vocabulary(tokens, False, (0,), None))
    searches, reached = [], TokenTrie.reached
    monkeypatch.setattr(TokenTrie, "reached", lambda *given: searches.append(given) or reached(*given))
    state, out = constraint.start(), torch.zeros(1, 1, dtype=torch.int32)
    assert state.ends_within(2500)
    state.mask_within(out, 0, 2500)
    assert mask_tokens(out[0]) == [1, 2, 4]
    assert not searches
    assert state.min_tokens_to_accept(2500) == 500
    state.mask_within(out, 0, 500)
    assert mask_tokens(out[0]) == [4]
    assert not state.ends_within(499)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(small_regexes)
def test_tokens_of_the_same_classes_are_read_together(vocabulary, pattern):
    dfa, trie = Dfa(Regex(parse(pattern))), TokenTrie(vocabulary.tokens)
    merged = trie.merged(dfa.byte_class)
    after = trie.walk(dfa, Dfa.start)
    assert (merged.walk(dfa, Dfa.start) == after).all()
    assert merged.reached(dfa, Dfa.start) == sorted({*after.tolist()} - {DEAD})
    assert len(merged) <= len(trie)


def test_a_vocabulary_read_by_few_classes_is_small() -> None:
    rng = random.Random(0)
    trie = TokenTrie([bytes(rng.choices(b"abcdefgh", k=rng.randrange(1, 9))) for _ in range(2000)])
    assert len(trie) > 1000
    assert len(trie.merged(Regex(parse("[a-z]+")).byte_class)) == 1 + 8
