"""Bad words: texts and token sequences that are never completed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from decodekit.core.constants import constant
from decodekit.core.errors import InputError
from decodekit.core.protocols import Rule
from decodekit.core.tokens import TokenId, check_ids, encode
from decodekit.core.types import Rows

Sequences = tuple[Annotated[tuple[TokenId, ...], Field(min_length=1)], ...]


class BadWords(Rule):
    """Ban the last token of a word or token sequence as soon as all tokens before it have been generated.

    A word is tokenized both as it stands and with a space before it: " rain" and "rain" are different tokens. A word of
    one token is banned everywhere, also inside longer words; other tokenizations of the same text stay possible. The
    tokens before the last may be the end of the prompt. Cost: one comparison a sequence with the end of the history.
    """

    cost: ClassVar[str] = "O(V + words)"
    capturable: ClassVar[bool] = True

    kind: Literal["bad_words"] = "bad_words"
    words: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), description="texts to ban")
    ids: Sequences = Field((), description="token sequences to ban")
    case: Literal["exact", "any"] = Field(
        "exact", description="any: ban a word also in lower case, in upper case and capitalized"
    )

    @model_validator(mode="after")
    def _something_to_ban(self) -> Self:
        if not (self.words or self.ids):
            raise ValueError("bad_words bans nothing; give words: [text, ...] or ids: [[id, ...], ...]")
        return self

    def resolve(self, tokenizer: Any) -> BadWords:
        spaced = (text for word in self.words for form in self._forms(word) for text in (form, " " + form))
        encoded = tuple(encode(tokenizer, text, "bad_words") for text in spaced)
        return BadWords(ids=tuple(dict.fromkeys(self.ids + encoded)), case=self.case)

    def _forms(self, word: str) -> Iterable[str]:
        return (word,) if self.case == "exact" else (word, word.lower(), word.upper(), word.capitalize())

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        if self.words:
            raise InputError(f"bad_words: {self.words[0]!r} is not tokenized yet; use rule.resolve(tokenizer)")
        for sequences in _by_length(self.ids):
            # The tokens before the last may lie in the prompt, which may hold more ids than the logits reach.
            check_ids((sequence[-1] for sequence in sequences), logits.shape[-1], "bad_words")
            banned = constant(sequences, logits.device, torch.int64)
            preceding, last = banned[:, :-1], banned[:, -1]
            completed = (rows.tail(preceding.shape[1]).unsqueeze(1) == preceding).all(-1)
            logits = logits.scatter_reduce(
                1, last.expand(len(rows), -1), torch.where(completed, -math.inf, math.inf).to(logits.dtype), "amin"
            )
        return logits


@lru_cache(maxsize=64)
def _by_length(ids: Sequences) -> tuple[Sequences, ...]:
    lengths = sorted({len(sequence) for sequence in ids})
    return tuple(tuple(sequence for sequence in ids if len(sequence) == length) for length in lengths)
