"""Propose the tokens that the model last found most likely after each token."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from decodekit.core.drafts import Draft, DraftHost, DraftRow, DraftState, Verified
from decodekit.core.protocols import Drafter
from decodekit.core.shared import PerModel

STEP = 3.0
"""How many nodes deeper a draft goes along first candidates before the next candidate of a token becomes a branch."""


EMPTY = -1
"""Marks a successor that is not known."""

_MATRICES: PerModel[list[np.ndarray]] = PerModel(list)


class Recycle(Drafter):
    """Token recycling: a matrix of each token's most likely successors, filled from every position the target scores.

    Luo et al., 2024, arXiv:2408.08696, sections 3.1 to 3.3. The matrix is kept from call to call on a model. Drafts follow its
    rows from the last token on: a chain of first candidates, or a static tree that goes deep along likely candidates and is
    broad at its beginning. Helps on any text; knows one token of context only.

    Cost: the top-k of each scored position; [V, top_k] int32 a model.
    """

    cost: ClassVar[str] = "a top-k a scored position"

    kind: Literal["recycle"] = "recycle"
    top_k: int = Field(8, ge=1, le=64, description="successors that are kept for a token")
    leaves: int = Field(
        1,
        ge=1,
        le=64,
        description="most branches of the drafts of all rows; a chain where there are more rows than half of it",
    )

    def start(self, host: DraftHost) -> DraftState:
        """The model's matrix."""
        kept = _MATRICES.of(host.model, (host.vocab, self.top_k))
        if not kept:
            kept.append(np.full((host.vocab, min(self.top_k, host.vocab)), EMPTY, dtype=np.int32))
        return _Recycling(self, kept[0])


class _Recycling(DraftState):
    def __init__(self, options: Recycle, matrix: np.ndarray) -> None:
        self._options, self._matrix = options, matrix

    def propose(self, rows: Sequence[DraftRow], budgets: Sequence[int]) -> Sequence[Draft]:
        leaves = max(1, self._options.leaves // len(rows))
        return [self._draft(row.tokens[-1], budget, leaves) for row, budget in zip(rows, budgets, strict=True)]

    def _draft(self, last: int, budget: int, leaves: int) -> Draft:
        """The likeliest nodes below the last token; parents come out before their children."""
        tokens, parents, ends = list[int](), list[int](), set[int]()
        # (cost, tie-breaker, rank among its siblings, parent node, token before)
        waiting = [(0.0, 0, 0, -1, last)]
        while waiting and len(tokens) < budget:
            cost, _, rank, parent, before = heapq.heappop(waiting)
            token = int(self._matrix[before, rank])
            splits = parent in parents  # its parent has a child already
            if token == EMPTY or (splits and len(ends) >= leaves):
                continue
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            ends = (ends - {parent}) | {node}
            heapq.heappush(waiting, (cost + 1.0, 2 * node + 1, 0, node, token))
            if rank + 1 < self._matrix.shape[1]:
                heapq.heappush(waiting, (cost + STEP, 2 * node + 2, rank + 1, parent, before))
        return Draft(tokens, parents)

    def observe(self, verified: Sequence[Verified]) -> None:
        for own in verified:
            top = own.outputs.logits.topk(self._matrix.shape[1]).indices.cpu().numpy()
            self._matrix[[own.before, *own.draft.tokens]] = top
