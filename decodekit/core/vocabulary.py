"""The bytes of every token, for constraints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model as bytes; a character may be spread over several of them.

    Attributes:
        tokens: the bytes that each id adds to the text; ``None`` for special and unused ids, as many as the logits are wide.
        first_tokens: the same for the first token of an output: decoders of the SentencePiece kind drop the space before it.
        eos_ids: the ids that end an output.
        tokenizer: of the model.
    """

    tokens: tuple[bytes | None, ...]
    first_tokens: tuple[bytes | None, ...]
    eos_ids: tuple[int, ...]
    tokenizer: Any

    @property
    def width(self) -> int:
        """The width of the logits."""
        return len(self.tokens)

    @classmethod
    def of(cls, tokenizer: Any, width: int | None = None, eos_ids: tuple[int, ...] | None = None) -> Vocabulary:
        """The vocabulary of a tokenizer, made once and kept in memory and on disk.

        Args:
            tokenizer: any fast tokenizer of transformers.
            width: of the logits; the tokenizer's size by default.
            eos_ids: the ids that end an output; the tokenizer's by default.

        Raises:
            InputError: what its tokens stand for cannot be told.
        """
        raise NotImplementedError

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of ``text`` as it would stand in the middle of an output: their bytes are its bytes."""
        raise NotImplementedError
