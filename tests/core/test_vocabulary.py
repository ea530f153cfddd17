import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from decodekit.core import vocabulary as module
from decodekit.core.errors import InputError
from decodekit.core.vocabulary import Vocabulary
from decodekit.testing import tiny_tokenizer


def wrapped(tokens, decoder, **options):
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], **options))
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DECODEKIT_CACHE", str(tmp_path))
    module._vocabulary.cache_clear()
    yield tmp_path
    module._vocabulary.cache_clear()


def test_byte_level_tokens_are_bytes(demo):
    vocabulary = Vocabulary.of(demo[1])
    for text in ("Hello wörld", "😀 日本語\n\n x", " lead", "\tif x:\r\n"):
        ids = vocabulary.encode(text)
        assert b"".join(vocabulary.tokens[token] for token in ids).decode() == text
    assert vocabulary.tokens[demo[1].eos_token_id] is None
    assert all(vocabulary.tokens[token] is None for token in demo[1].added_tokens_decoder)


def test_byte_fallback_and_the_space_of_sentencepiece():
    sequence = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    vocabulary = Vocabulary.of(wrapped(["<eos>", "▁Hi", "<0xF0>", "<0x0A>", "a▁b", "▁"], sequence))
    assert vocabulary.tokens == (None, b" Hi", b"\xf0", b"\n", b"a b", b" ")
    assert vocabulary.first_tokens == (None, b"Hi", b"\xf0", b"\n", b"a b", b"")
    kept = Vocabulary.of(wrapped(["<eos>", "▁Hi"], decoders.Replace("▁", " ")))
    assert kept.first_tokens == kept.tokens == (None, b" Hi")


def test_added_tokens_are_text_unless_they_are_special():
    tokenizer = wrapped(["<eos>", "a"], decoders.ByteLevel())
    tokenizer.add_tokens(["<tool é>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    assert Vocabulary.of(tokenizer).tokens == (None, b"a", "<tool é>".encode(), None)


def test_is_as_wide_as_the_logits():
    vocabulary = Vocabulary.of(tiny_tokenizer(), width=130, eos_ids=(1, 2))
    assert vocabulary.width == 130
    assert vocabulary.tokens[97:] == (None,) * 33
    assert vocabulary.eos_ids == (1, 2)


def test_comes_back_from_disk_as_it_was(own_folder):
    made = Vocabulary.of(tiny_tokenizer())
    (file,) = (own_folder / "vocabularies").iterdir()
    module._vocabulary.cache_clear()
    assert Vocabulary.of(tiny_tokenizer()).tokens == made.tokens
    file.write_bytes(b"broken")
    module._vocabulary.cache_clear()
    assert Vocabulary.of(tiny_tokenizer()).tokens == made.tokens


def test_refuses_what_it_cannot_read():
    with pytest.raises(InputError, match="this one has the decoder WordPiece"):
        Vocabulary.of(wrapped(["<eos>", "##a"], decoders.WordPiece()))
    with pytest.raises(InputError, match="fast tokenizer, got object"):
        Vocabulary.of(object())
    with pytest.raises(InputError, match="cannot spell 'é'"):
        Vocabulary.of(tiny_tokenizer()).encode("é")
