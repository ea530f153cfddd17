import random

import pytest
import torch

from decodekit.constraints.grammar import Grammar
from decodekit.core.constraint import mask_tokens, mask_words
from decodekit.core.errors import InputError, RowError, UnsupportedConstraint
from decodekit.core.vocabulary import Vocabulary
from decodekit.llg import engine
from decodekit.llg.engine import CompiledGrammar
from tests.llg.walks import EOS, accepts, byte_vocabulary, masked, random_text

VOCABULARY = byte_vocabulary()
NESTED = 'start: list\nlist: "[" (item ("," item)*)? "]"\nitem: list | WORD\nWORD: /[a-zé日😀]+/\n'


def fed(state, text):
    for token in VOCABULARY.encode(text):
        state.advance(token)
    return state


def test_the_text_may_end_where_the_grammar_does() -> None:
    compiled = CompiledGrammar(NESTED, VOCABULARY)
    assert accepts(compiled, VOCABULARY, "[ab,[日本,é]]".replace("本", "日"))
    assert not accepts(compiled, VOCABULARY, "[ab,")
    assert not accepts(compiled, VOCABULARY, "[ab]]")


def test_a_character_is_never_cut_short() -> None:
    state = fed(CompiledGrammar(NESTED, VOCABULARY).start(), "[")
    state.advance(0xF0)
    assert mask_tokens(masked(state, VOCABULARY)) == [0x9F]


def test_rollback_is_a_replay() -> None:
    compiled = CompiledGrammar(NESTED, VOCABULARY)
    rng = random.Random(0)
    for seed in range(20):
        rng = random.Random(seed)
        text = random_text(compiled, VOCABULARY, rng, 12)
        tokens = VOCABULARY.encode(text)
        cut = rng.randrange(len(tokens))
        state = fed(compiled.start(), text)
        state.advance(EOS)
        state.rollback(len(tokens) - cut + 1)
        replayed = compiled.start()
        for token in tokens[:cut]:
            replayed.advance(token)
        for token in [*tokens[cut:], EOS]:
            assert torch.equal(masked(state, VOCABULARY), masked(replayed, VOCABULARY))
            assert state.is_accepting() == replayed.is_accepting()
            assert state.forced_tokens() == replayed.forced_tokens()
            state.advance(token)
            replayed.advance(token)


def test_a_fork_goes_its_own_way() -> None:
    state = fed(CompiledGrammar(NESTED, VOCABULARY).start(), "[ab")
    before = masked(state, VOCABULARY).clone()
    fork = fed(state.fork(), ",[")
    fork.rollback(2)
    fed(fork, "]")
    assert fork.is_accepting()
    assert not state.is_accepting()
    assert torch.equal(masked(state, VOCABULARY), before)


def test_after_an_eos_only_eos_is_legal() -> None:
    state = fed(CompiledGrammar(NESTED, VOCABULARY).start(), "[]")
    state.advance(EOS)
    assert mask_tokens(masked(state, VOCABULARY)) == [EOS]
    with pytest.raises(RowError, match="not legal"):
        state.advance(ord("["))
    state.advance(EOS)
    state.rollback(3)
    assert ord("[") not in mask_tokens(masked(state, VOCABULARY)) or not state.is_accepting()


@pytest.mark.parametrize("token", [ord("]"), EOS, len(VOCABULARY.tokens) - 1, 10_000, -1])
def test_an_illegal_token_leaves_the_state_as_it_was(token) -> None:
    state = CompiledGrammar(NESTED, VOCABULARY).start()
    before = masked(state, VOCABULARY).clone()
    with pytest.raises(RowError):
        state.advance(token)
    assert torch.equal(masked(state, VOCABULARY), before)
    fed(state, "[]")


def test_forced_tokens_are_cut_as_the_tokenizer_cuts() -> None:
    state = CompiledGrammar('start: "{" "\\"the\\":" ("1" | "2")\n', VOCABULARY).start()
    assert state.forced_tokens() == list(VOCABULARY.encode('{"the":'))
    assert fed(state, '{"the":').forced_tokens() == []


def test_the_mask_within_a_limit_leads_to_an_end() -> None:
    compiled = CompiledGrammar(NESTED, VOCABULARY)
    state = fed(compiled.start(), "[[[ab")
    assert state.min_tokens_to_accept(3) == 3
    assert state.min_tokens_to_accept(2) is None
    out = torch.zeros(1, mask_words(VOCABULARY.width), dtype=torch.int32)
    state.mask_within(out, 0, 3)
    assert mask_tokens(out[0]) == [ord("]")]
    state.mask_within(out, 0, 2)
    assert mask_tokens(out[0]) == []


@pytest.mark.parametrize(("text", "end"), [('J if "H', '" else A'), ("J if f('é", "') else A")])
def test_an_end_behind_a_keyword_is_found(text, end) -> None:
    compiled = Grammar(name="python_expression").compile(VOCABULARY)
    assert fed(compiled.start(), text).shortest_end() == end.encode()
    cut = compiled.start()
    for byte in text.encode() + "日".encode()[:1]:
        cut.advance(byte)
    assert cut.shortest_end().endswith(end.encode())


def test_the_place_over_bytes_follows_rollbacks_and_forks() -> None:
    compiled = CompiledGrammar(NESTED, VOCABULARY)
    for seed in range(10):
        rng = random.Random(seed)
        tokens = VOCABULARY.encode(random_text(compiled, VOCABULARY, rng, 12))
        state = compiled.start()
        for count, token in enumerate(tokens, start=1):
            state.min_tokens_to_accept(99)
            state.advance(token)
            fork = state.fork()
            fork.min_tokens_to_accept(99)
            kept = rng.randrange(count + 1)
            fork.rollback(count - kept)
            replayed = compiled.start()
            for again in tokens[:kept]:
                replayed.advance(again)
            assert fork.shortest_end() == replayed.shortest_end()
            assert fork.forced_tokens() == replayed.forced_tokens()


def test_a_space_that_the_decoder_drops_is_legal_at_the_start() -> None:
    spaced = Vocabulary(VOCABULARY.tokens, True, (EOS,), VOCABULARY.tokenizer)
    state = CompiledGrammar('start: "ab"\n', spaced).start()
    assert ord(" ") in mask_tokens(masked(state, spaced))
    assert ord("a") in mask_tokens(masked(state, spaced))


def test_faults_are_told_in_one_line() -> None:
    with pytest.raises(InputError, match=r"^the grammar has an error: [^\n]*$"):
        CompiledGrammar("start: unknown\n", VOCABULARY)
    with pytest.raises(UnsupportedConstraint, match="more than"):
        CompiledGrammar("start: " + '"a" ' * engine.MAX_GRAMMAR, VOCABULARY)
    with pytest.raises(InputError, match="EOS"):
        CompiledGrammar(NESTED, Vocabulary(VOCABULARY.tokens, False, (), VOCABULARY.tokenizer))


def test_a_terminal_without_texts_is_empty() -> None:
    assert engine.is_empty("/[a-z]/ & /[0-9]/")
    assert not engine.is_empty("/[a-z]/ & /[0-9a]/")


def test_a_grammar_that_is_no_text_is_refused():
    with pytest.raises(InputError, match="half of a surrogate pair"):
        CompiledGrammar('start: "a"  // \ud800', byte_vocabulary())
