"""Logit bias: add a constant to the logits of named tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, FiniteFloat, field_validator
from torch import Tensor

from decodekit.core.constants import constant
from decodekit.core.errors import InputError
from decodekit.core.frozen import FrozenDict
from decodekit.core.protocols import Rule
from decodekit.core.tokens import TokenId, check_ids, encode
from decodekit.core.types import Rows

Key = TokenId | Annotated[str, Field(min_length=1)]


class LogitBias(Rule):
    """Add a bias to the logits of the tokens named by id or text, at every position.

    The ``logit_bias`` of the OpenAI API, where 100 all but forces a token and -100 all but bans it. Keys made of digits
    alone are ids, as there and because JSON has no other keys; name the token of a digit by its id. Cost: one pass over
    the logits.
    """

    cost: ClassVar[str] = "O(V)"
    capturable: ClassVar[bool] = True

    kind: Literal["logit_bias"] = "logit_bias"
    bias: FrozenDict[Key, FiniteFloat] = Field(
        description="token id, or the text of exactly one token, to what is added to its logit"
    )

    @field_validator("bias")
    @classmethod
    def _something_to_bias(cls, bias: FrozenDict[Key, float]) -> FrozenDict[Key, float]:
        if not bias:
            raise ValueError("logit_bias biases nothing; give bias: {token id or text: number}")
        return bias

    @field_validator("bias", mode="before")
    @classmethod
    def _digits_are_ids(cls, bias: Any) -> Any:
        if not isinstance(bias, dict):
            return bias
        return {int(key) if isinstance(key, str) and key.isdecimal() else key: value for key, value in bias.items()}

    def resolve(self, tokenizer: Any) -> LogitBias:
        resolved: dict[int, float] = {}
        for key, value in self.bias.items():
            token = key if isinstance(key, int) else _single_token(tokenizer, key)
            if resolved.setdefault(token, value) != value:
                raise InputError(
                    f"logit_bias: {key!r} is token {token}, which has another bias already; keep one of the two"
                )
        return LogitBias(bias=FrozenDict(resolved))

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        ids = tuple(key for key in self.bias if isinstance(key, int))
        if len(ids) < len(self.bias):
            raise InputError(
                f"logit_bias: {self} names tokens by text; turn them into ids with rule.resolve(tokenizer)"
            )
        check_ids(ids, logits.shape[-1], "logit_bias")
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        values = constant(tuple(self.bias.values()), logits.device, wide.dtype)
        biased = wide.index_add(1, constant(ids, logits.device, torch.int64), values.expand(len(rows), -1))
        return biased.to(logits.dtype)


def _single_token(tokenizer: Any, text: str) -> int:
    ids = encode(tokenizer, text, "logit_bias")
    if len(ids) > 1:
        pieces = ", ".join(f"{tokenizer.decode([token])!r} ({token})" for token in ids)
        raise InputError(
            f"logit_bias: {text!r} is {len(ids)} tokens: {pieces}; give the text of exactly one token (often with a "
            "space before it), or one of these ids"
        )
    return ids[0]
