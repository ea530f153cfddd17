"""Forced tokens: what the output must hold at given positions."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from decodekit.core.constants import constant
from decodekit.core.errors import InputError
from decodekit.core.frozen import FrozenDict
from decodekit.core.protocols import Rule
from decodekit.core.tokens import TokenId, check_ids, encode
from decodekit.core.types import Rows


class ForcedTokens(Rule):
    """Leave one token to choose from at each named position, such as the beginning that an output must have.

    The forced token keeps its logit: one that was masked before stays masked, and its row has no token left. Cost: one
    pass over the logits.
    """

    cost: ClassVar[str] = "O(V)"
    capturable: ClassVar[bool] = True

    kind: Literal["forced_tokens"] = "forced_tokens"
    ids: FrozenDict[Annotated[int, Field(ge=0)], TokenId] = Field(
        FrozenDict(), description="position in the output (0 is its first token) to the id of the token there"
    )
    text: str = Field("", description="text that the output begins with")

    @model_validator(mode="after")
    def _something_to_force(self) -> Self:
        if not (self.ids or self.text):
            raise ValueError("forced_tokens forces nothing; give text: ... or ids: {position: id}")
        return self

    def resolve(self, tokenizer: Any) -> ForcedTokens:
        if not self.text:
            return self
        beginning = dict(enumerate(encode(tokenizer, self.text, "forced_tokens")))
        for position, token in self.ids.items():
            if beginning.get(position, token) != token:
                raise InputError(
                    f"forced_tokens: position {position} is token {beginning[position]} of the text {self.text!r} and "
                    f"token {token} of ids; keep one of the two"
                )
        return ForcedTokens(ids=FrozenDict(self.ids | beginning))

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        if self.text:
            raise InputError(f"forced_tokens: {self.text!r} is not tokenized yet; use rule.resolve(tokenizer)")
        check_ids(self.ids.values(), logits.shape[-1], "forced_tokens")
        here = rows.positions.unsqueeze(-1) == constant(tuple(self.ids), logits.device, torch.int64)
        token = (here * constant(tuple(self.ids.values()), logits.device, torch.int64)).sum(-1, keepdim=True)
        alone = torch.full_like(logits, -math.inf).scatter(1, token, logits.gather(1, token))
        return torch.where(here.any(-1, keepdim=True), alone, logits)
