"""What plugins that name tokens share: texts to ids, ids against the vocabulary, ids as tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field

from decodekit.core.errors import InputError

TokenId = Annotated[int, Field(ge=0)]


def encode(tokenizer: Any, text: str, used_by: str) -> tuple[int, ...]:
    """``text`` as it would stand in the middle of an output: no special tokens around it.

    Args:
        tokenizer: the model's tokenizer, or ``None``.
        text: what to encode.
        used_by: the option that asks, for the message.

    Raises:
        InputError: there is no tokenizer, or it turns ``text`` into nothing.
    """
    if tokenizer is None:
        raise InputError(
            f"{used_by} needs a tokenizer for {text!r}; give dk_tokenizer=tokenizer or decoder.bind(tokenizer=...), "
            "or name the tokens by their ids"
        )
    if not (ids := tuple(tokenizer.encode(text, add_special_tokens=False))):
        raise InputError(f"{used_by}: {text!r} has no tokens; give a text that has some, or leave it out")
    return ids


def check_ids(ids: Iterable[int], vocab_size: int, used_by: str) -> None:
    """Refuse ids that the model does not know.

    Raises:
        InputError: an id is not below ``vocab_size``; names both.
    """
    if (largest := max(ids)) >= vocab_size:
        raise InputError(
            f"{used_by}: token id {largest} is not in the vocabulary, which has {vocab_size} tokens "
            f"(ids 0 to {vocab_size - 1}); were the ids taken from another tokenizer?"
        )
