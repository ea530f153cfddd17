"""The bytes of every token, for constraints."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from decodekit.core.errors import InputError

Tokens = tuple[bytes | None, ...]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a model as bytes; a character may be spread over several of them.

    Attributes:
        tokens: the bytes that each id adds to the text; ``None`` for special and unused ids. As many as the logits are wide.
        drops_first_space: the decoder leaves out a space at the very start of an output, as SentencePiece does.
        eos_ids: the ids that end an output.
        tokenizer: of the model.
    """

    tokens: Tokens
    drops_first_space: bool
    eos_ids: tuple[int, ...]
    tokenizer: Any

    @property
    def width(self) -> int:
        """The width of the logits."""
        return len(self.tokens)

    @cached_property
    def first_tokens(self) -> Tokens:
        """As ``tokens``, for the first token of an output."""
        if not self.drops_first_space:
            return self.tokens
        return tuple(token and token.removeprefix(b" ") for token in self.tokens)

    @classmethod
    def of(cls, tokenizer: Any, width: int | None = None, eos_ids: tuple[int, ...] | None = None) -> Vocabulary:
        """The vocabulary of a tokenizer, made once and kept in memory and on disk.

        Args:
            tokenizer: any fast tokenizer of transformers whose tokens stand for bytes wherever they are.
            width: of the logits; the tokenizer's size by default.
            eos_ids: the ids that end an output; the tokenizer's by default.

        Raises:
            InputError: what its tokens stand for cannot be told.
        """
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise InputError(f"a constraint needs the model's fast tokenizer, got {type(tokenizer).__name__}")
        if eos_ids is None:
            eos_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        return _vocabulary(tokenizer, len(tokenizer), width, eos_ids)

    def encode(self, text: str, *, first: bool = False) -> tuple[int, ...]:
        """The ids of ``text``: their bytes are its bytes.

        Args:
            text: what to encode.
            first: it begins an output; otherwise it stands in the middle of one.

        Raises:
            InputError: the tokenizer cannot spell it.
        """
        wanted = text.encode()
        # A tokenizer that writes a space before every text does not do so after a line break.
        for before in ("", "\n"):
            ids = self.tokenizer.encode(before + text, add_special_tokens=False)
            spelt = [self.tokens[token] or b"" for token in ids]
            if first and self.drops_first_space and not before and spelt:
                spelt[0] = spelt[0].removeprefix(b" ")
            while spelt and len(b"".join(spelt)) > len(wanted):
                spelt.pop(0)
            if b"".join(spelt) == wanted:
                return tuple(ids[len(ids) - len(spelt) :])
        raise InputError(f"the tokenizer cannot spell {text!r}: its tokens read {b''.join(spelt)!r}")


@lru_cache(maxsize=8)
def _vocabulary(tokenizer: Any, size: int, width: int | None, eos_ids: tuple[int, ...]) -> Vocabulary:
    backend = tokenizer.backend_tokenizer.to_str()
    special = {*tokenizer.all_special_ids, *eos_ids}
    special |= {index for index, added in tokenizer.added_tokens_decoder.items() if added.special}
    key = hashlib.sha256(json.dumps([_FORMAT, size, sorted(special)]).encode() + backend.encode()).hexdigest()
    path = Path(os.environ.get("DECODEKIT_CACHE", "~/.cache/decodekit")).expanduser() / "vocabularies" / f"{key}.npz"
    vocabulary = _read(path)
    if vocabulary is None:
        vocabulary = _made(tokenizer, json.loads(backend)["decoder"], special)
        _write(path, vocabulary)
    tokens = vocabulary.tokens
    width = len(tokens) if width is None else width
    return replace(
        vocabulary, tokens=tokens[:width] + (None,) * (width - len(tokens)), eos_ids=eos_ids, tokenizer=tokenizer
    )


def _made(tokenizer: Any, decoder: dict[str, Any] | None, special: set[int]) -> Vocabulary:
    steps = list(_steps(decoder))
    kinds = {step["type"] for step in steps}
    if decoder is None or (unknown := kinds - _KNOWN):
        named = "no decoder" if decoder is None else f"the decoder {', '.join(sorted(unknown))}"
        raise InputError(
            f"constraints need a tokenizer whose tokens stand for the same bytes everywhere (byte-level BPE, SentencePiece); "
            f"this one has {named}"
        )
    byte_of = _byte_level() if "ByteLevel" in kinds else {}
    replaced = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    replaced += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]

    def spelt(token: str) -> bytes:
        if "ByteFallback" in kinds and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        if byte_of and all(char in byte_of for char in token):
            return bytes(byte_of[char] for char in token)
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode()

    ids = tokenizer.get_vocab()
    tokens: list[bytes | None] = [None] * (max(ids.values()) + 1)
    for token, index in ids.items():
        # A token without bytes would let a row go on for ever without text.
        tokens[index] = None if index in special else spelt(token) or None
    drops = any(
        (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in steps
    )
    return Vocabulary(tuple(tokens), drops, (), None)


_KNOWN = {"ByteLevel", "ByteFallback", "Replace", "Metaspace", "Fuse", "Strip"}


def _steps(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A decoder's steps in order, those of nested sequences in their place."""
    if decoder is None:
        return
    if decoder["type"] != "Sequence":
        yield decoder
    for inner in decoder.get("decoders", ()):
        yield from _steps(inner)


def _byte_level() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (GPT-2): printable ones themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_FORMAT = 1
"""Of the files below: raise it when what they hold changes."""


def _read(path: Path) -> Vocabulary | None:
    try:
        with np.load(path, allow_pickle=False) as stored:
            text, lengths, drops = (
                stored["text"].tobytes(),
                stored["lengths"].tolist(),
                bool(stored["drops_first_space"]),
            )
    except (OSError, ValueError, KeyError, EOFError):
        return None
    tokens: list[bytes | None] = []
    place = 0
    for length in lengths:
        tokens.append(text[place : place + length] or None)
        place += length
    return Vocabulary(tuple(tokens), drops, (), None)


def _write(path: Path, vocabulary: Vocabulary) -> None:
    """Store a vocabulary, whole or not at all; a folder that cannot be written only costs time."""
    pieces = [token or b"" for token in vocabulary.tokens]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            np.savez(
                file,
                text=np.frombuffer(b"".join(pieces), dtype=np.uint8),
                lengths=np.array([len(piece) for piece in pieces]),
                drops_first_space=np.array(vocabulary.drops_first_space),
            )
        os.replace(file.name, path)
    except OSError:
        return
