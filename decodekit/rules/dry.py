"""DRY ("don't repeat yourself"): the longer a repetition would get, the less likely its next token becomes."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.constants import constant
from decodekit.core.errors import InputError
from decodekit.core.protocols import Rule
from decodekit.core.tokens import TokenId, encode
from decodekit.core.types import Rows, Scope

_LONGEST = 50
"""Tokens of a repetition that count; more would only make the power overflow."""


class Dry(Rule):
    """Lower the logit of a token that would prolong a repetition of n tokens by multiplier * base ** (n - allowed_length).

    By p-e-w, 2024, https://github.com/oobabooga/text-generation-webui/pull/5677. A repetition is the end of the history
    standing earlier in it; n is the longest one that the token once followed, counted up to 50, and shorter ones than
    ``allowed_length`` are free. Sequence breakers neither belong to a repetition nor are penalized, so that names and marks
    of turns may come back. The earlier occurrence and its next token must lie in the scope and the range. Helps against
    loops, and leaves single words alone, unlike a repetition penalty. Cost: up to 50 passes over the history.
    """

    cost: ClassVar[str] = "O(V + 50 L)"
    capturable: ClassVar[bool] = True

    kind: Literal["dry"] = "dry"
    multiplier: float = Field(
        0.8, description="penalty of the shortest repetition that has one; 0 is none", ge=0, allow_inf_nan=False
    )
    base: float = Field(
        1.75, description="each further token of a repetition multiplies the penalty by it", ge=1, allow_inf_nan=False
    )
    allowed_length: int = Field(2, description="longest repetition, in tokens, whose next token costs multiplier", ge=1)
    range: int = Field(0, description="last tokens of the history that are searched; 0 is all", ge=0)
    scope: Scope = Field("both", description="where the earlier occurrence must lie: prompt, output or both")
    sequence_breakers: tuple[str, ...] = Field(
        ("\n", ":", '"', "*"), description="texts whose last token, behind a letter, ends a repetition"
    )
    breaker_ids: tuple[TokenId, ...] = Field((), description="token ids that end a repetition")

    def resolve(self, tokenizer: Any) -> Dry:
        # Behind a letter, as they stand in a text: at its beginning some tokenizers add a space.
        ids = (encode(tokenizer, "a" + text, "dry")[-1] for text in self.sequence_breakers)
        merged = tuple(dict.fromkeys((*self.breaker_ids, *ids)))
        return self.model_copy(update={"sequence_breakers": (), "breaker_ids": merged})

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        if self.sequence_breakers:
            raise InputError(f"dry: {self.sequence_breakers[0]!r} is not tokenized yet; use rule.resolve(tokenizer)")
        if self.multiplier == 0 or rows.tokens.shape[1] < 2:
            return logits
        following, reached = (values[:, 1:] for values in rows.occurrences(logits.shape[-1], self.scope))
        lengths = self._match_lengths(rows).where(reached & ~self._breaks(following), 0)
        longest = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
        longest = longest.scatter_reduce(1, following, lengths, "amax")
        wide = torch.promote_types(logits.dtype, torch.float32)
        penalty = self.multiplier * torch.pow(self.base, (longest - self.allowed_length).to(wide))
        return (logits - penalty.where(longest >= self.allowed_length, 0.0)).to(logits.dtype)

    def _match_lengths(self, rows: Rows) -> Tensor:
        """[P, L - 1] how many tokens up to each column equal those at the end of the history; 0 where none may count."""
        tokens, lengths = rows.tokens, rows.lengths.unsqueeze(-1)
        inside = rows.within(self.scope)
        if self.range:
            inside = inside & (torch.arange(tokens.shape[1], device=tokens.device) >= lengths - self.range)
        end = rows.tail(min(_LONGEST, tokens.shape[1])).flip(-1)
        unbroken = ~self._breaks(end)
        matched = torch.zeros_like(tokens[:, 1:])
        # The next token is part of the occurrence, so that the end of the history is no earlier occurrence of itself.
        alive = inside[:, 1:]
        for back in range(end.shape[1]):
            shifted = slice(0, tokens.shape[1] - 1 - back)
            here = inside[:, shifted] & (tokens[:, shifted] == end[:, back : back + 1]) & unbroken[:, back : back + 1]
            alive = (alive[:, 1:] if back else alive) & here
            matched[:, back:] += alive
            # On a GPU the test would cost more than it saves: it makes the host wait.
            if not (tokens.is_cuda or bool(alive.any())):
                break
        return matched

    def _breaks(self, tokens: Tensor) -> Tensor:
        # isin makes the host wait where there are many breakers.
        return (tokens.unsqueeze(-1) == constant(self.breaker_ids, tokens.device, torch.int64)).any(-1)
