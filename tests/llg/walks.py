"""A vocabulary of bytes and a few longer tokens, and random texts of a constraint."""

import torch

from decodekit.core.constraint import mask_tokens, mask_words
from decodekit.core.errors import RowError
from decodekit.core.vocabulary import Vocabulary

LONGER = ['{"', '":', '",', '"}', "ab", "the", "12", "SELECT ", "FROM ", "日本", "😀", '"]', "null", "  ", "</"]
EOS = 256


class Spelling:
    """Encodes by the longest token that fits, as greedy as a tokenizer can be."""

    def __init__(self, tokens):
        self.ids = {token: index for index, token in enumerate(tokens) if token is not None}

    def encode(self, text, add_special_tokens=True):
        rest, found = text.encode(), []
        while rest:
            piece = next(rest[:length] for length in range(min(8, len(rest)), 0, -1) if rest[:length] in self.ids)
            found.append(self.ids[piece])
            rest = rest[len(piece) :]
        return found


def byte_vocabulary():
    tokens = (*(bytes([byte]) for byte in range(256)), None, *(token.encode() for token in LONGER), None)
    return Vocabulary(tokens, False, (EOS,), Spelling(tokens))


def masked(state, vocabulary):
    out = torch.full((2, mask_words(vocabulary.width)), -1, dtype=torch.int32)
    state.mask(out, 1)
    assert (out[0] == -1).all()
    return out[1]


def accepts(compiled, vocabulary, text):
    state = compiled.start()
    for token in vocabulary.encode(text, first=True):
        legal = token in mask_tokens(masked(state, vocabulary))
        try:
            state.advance(token)
        except RowError:
            assert not legal
            return False
        assert legal
    assert (EOS in mask_tokens(masked(state, vocabulary))) == state.is_accepting()
    return state.is_accepting()


def random_text(compiled, vocabulary, rng, length, state=None):
    """Uniform over the legal tokens, then by the shortest way to an end; from a state on, if one is given."""
    state, tokens = state or compiled.start(), []
    while True:
        if len(tokens) < length:
            legal = mask_tokens(masked(state, vocabulary))
        elif state.is_accepting():
            break
        else:
            out = torch.zeros(1, mask_words(vocabulary.width), dtype=torch.int32)
            needed = state.min_tokens_to_accept(2000)
            assert needed is not None, b"".join(vocabulary.tokens[token] for token in tokens)
            state.mask_within(out, 0, needed)
            legal = mask_tokens(out[0])
        assert legal, "a dead end"
        token = rng.choice(legal)
        if token == EOS:
            break
        state.advance(token)
        tokens.append(token)
    return b"".join(vocabulary.tokens[token] for token in tokens).decode()
