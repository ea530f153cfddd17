"""Chains of tokens from a cached model that shares the target's vocabulary, drafted for all rows at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from decodekit.core.compat import context_length
from decodekit.core.drafts import Draft, DraftHost, DraftRow, DraftState, Runner, Verified
from decodekit.core.random import DRAFT_LANE, inverse_cdf, uniform


@dataclass
class _Growing:
    row: DraftRow
    budget: int
    tokens: list[int] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)


class ChainDrafts(DraftState):
    """Token by token, each row up to its budget. The model's cache goes back to what was accepted.

    Args:
        host: what the drafter was given.
        runner: the model.
        draws: draw from the model's distribution, as the target's rules shape it, and report it; otherwise take its most
            likely token. Draws come from each row's own stream.
    """

    def __init__(self, host: DraftHost, runner: Runner, *, draws: bool) -> None:
        self._host, self._runner, self._draws = host, runner, draws
        self._context = context_length(runner.model)
        self._known = runner.model.get_input_embeddings().weight.shape[0]
        # A row: how many of its tokens the model has seen.
        self._seen: dict[int, int] = {}

    def propose(self, rows: Sequence[DraftRow], budgets: Sequence[int]) -> Sequence[Draft]:
        grown = [_Growing(row, budget) for row, budget in zip(rows, budgets, strict=True)]
        fed: dict[int, Sequence[int]] = {}
        for own in grown:
            ids = own.row.ids
            new = ids[self._seen.get(own.row.row, 0) :]
            # What the model has no embedding or position for, it cannot draft.
            room = own.budget if self._context is None else min(own.budget, self._context - len(ids) + 1)
            if room > 0 and max(new) < self._known:
                own.budget = room
                fed[own.row.row] = new
                self._seen[own.row.row] = len(ids)
        while fed:
            going = [own for own in grown if own.row.row in fed]
            outputs = self._runner.forward(fed)
            self._extend(going, torch.cat([outputs[own.row.row].logits for own in going]))
            fed = {own.row.row: own.tokens[-1:] for own in going if self._goes_on(own)}
        return [Draft(own.tokens, q=torch.stack(own.q) if own.q else None) for own in grown]

    def observe(self, verified: Sequence[Verified]) -> None:
        drop = {}
        for own in verified:
            # The last drafted token was not fed.
            fed = max(0, len(own.draft) - 1)
            kept = min(fed, len(own.accepted))
            drop[own.row.row] = fed - kept
            if fed:
                self._seen[own.row.row] += kept
        self._runner.rollback(drop)

    def fork(self, children: Mapping[int, int]) -> None:
        self._runner.fork(children)
        self._seen |= {row: self._seen[parent] for row, parent in children.items() if parent in self._seen}

    def release(self, rows: Sequence[int]) -> None:
        self._runner.release(rows)
        for row in rows:
            self._seen.pop(row, None)

    def _extend(self, going: Sequence[_Growing], logits: Tensor) -> None:
        """One token more for each, from [P, V'] logits of the model."""
        rows, ahead = [own.row for own in going], [own.tokens for own in going]
        # Heads of one tokenizer are padded to different widths.
        missing = self._host.vocab - logits.shape[-1]
        q = self._host.probabilities(rows, ahead, nn.functional.pad(logits, (0, missing), value=-torch.inf))
        if self._draws:
            places = [(own.row.stream, len(own.row.tokens) + len(own.tokens)) for own in going]
            draws = torch.tensor([uniform(*place, DRAFT_LANE) for place in places], device=q.device)
            tokens = inverse_cdf(q, draws)
        else:
            tokens = q.argmax(-1)
        for place, (own, token) in enumerate(zip(going, tokens.tolist(), strict=True)):
            own.tokens.append(token)
            if self._draws:
                own.q.append(q[place])

    def _goes_on(self, own: _Growing) -> bool:
        return len(own.tokens) < own.budget and own.tokens[-1] < self._known
