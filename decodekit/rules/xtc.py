"""XTC: now and then exclude the top choices, all likely tokens but the least likely of them."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.constants import constant
from decodekit.core.errors import InputError
from decodekit.core.protocols import Rule
from decodekit.core.tokens import TokenId, check_ids, encode
from decodekit.core.types import Rows


class Xtc(Rule):
    """Drop every token at least as likely as the threshold except the least likely of these, with a given probability.

    By p-e-w, 2024, https://github.com/oobabooga/text-generation-webui/pull/6335. Where fewer than two tokens reach the
    threshold nothing happens, nor where the end or a protected token would go: a text could not end or start a new line
    when it should. Of equally likely tokens the lowest id stays. Helps creative writing; not meant for answers that are
    right or wrong. Cost: a softmax and one draw a position.
    """

    cost: ClassVar[str] = "O(V)"
    sampling_only: ClassVar[bool] = True
    keeps_best: ClassVar[bool] = False

    kind: Literal["xtc"] = "xtc"
    threshold: float = Field(0.1, description="probability that makes a token a top choice", gt=0, le=1)
    probability: float = Field(0.5, description="share of the positions at which top choices are excluded", ge=0, le=1)
    protected: tuple[str, ...] = Field(
        ("\n",), description="texts whose last token is never excluded; the ids that end a sequence never are"
    )
    protected_ids: tuple[TokenId, ...] = Field((), description="token ids that are never excluded")

    def resolve(self, tokenizer: Any) -> Xtc:
        ids = (encode(tokenizer, text, "xtc")[-1] for text in self.protected)
        merged = tuple(dict.fromkeys((*self.protected_ids, *ids)))
        return self.model_copy(update={"protected": (), "protected_ids": merged})

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        if self.protected:
            raise InputError(f"xtc: {self.protected[0]!r} is not tokenized yet; use rule.resolve(tokenizer)")
        probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        top = probabilities >= self.threshold
        least = logits.where(top, math.inf)
        ties = least == least.amin(-1, keepdim=True)
        excluded = top & ~(ties & (ties.cumsum(-1, dtype=torch.int32) == 1))
        acts = (rows.random() < self.probability).unsqueeze(-1)
        if kept := tuple(dict.fromkeys((*rows.eos, *self.protected_ids))):
            check_ids(kept, logits.shape[-1], "xtc")
            loses = excluded[:, constant(kept, logits.device, torch.int64)].any(-1, keepdim=True)
            acts = acts & ~loses
        return torch.where(excluded & acts, -math.inf, logits)
