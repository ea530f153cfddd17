"""Propose what extra heads say about the tokens after the next."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from decodekit.core.checkpoints import check_target, load_weights, read_config, read_tensors
from decodekit.core.compat import text_config
from decodekit.core.drafts import Draft, DraftHost, DraftRow, DraftState, Verified
from decodekit.core.errors import InputError
from decodekit.core.options import RecipePath
from decodekit.core.protocols import Drafter
from decodekit.core.types import Need

BRANCHING = 10
"""Most likely tokens of a head that a tree may hold, as in the paper."""


class ResBlock(nn.Module):
    """[..., H] to [..., H]: x + SiLU(W x + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        return hidden + nn.functional.silu(self.linear(hidden))


def make_heads(hidden: int, vocab: int, heads: int, blocks: int) -> nn.ModuleList:
    """Heads in the published layout: ``head.block.linear.weight`` (and bias), then ``head.blocks.weight`` [V, H]."""
    return nn.ModuleList(
        nn.Sequential(*(ResBlock(hidden) for _ in range(blocks)), nn.Linear(hidden, vocab, bias=False))
        for _ in range(heads)
    )


class Medusa(Drafter):
    """Medusa heads: head k guesses the token k + 1 places after the next, from the last hidden state alone.

    Cai et al., 2024, arXiv:2401.10774, section 2.1; the tree holds the paths that the heads find most probable together, which
    takes the place of the paper's fixed tree (2.1.2). Reads ``medusa_lm_head.pt`` or ``.safetensors`` as published. Verified
    exactly, also when sampling; the paper's typical acceptance is not offered. Helps where heads were trained on what the
    model itself writes.

    Cost: one projection to the vocabulary a head and pass; a row of the tree a leaf.
    """

    cost: ClassVar[str] = "1 head projection a drafted depth"
    needs: ClassVar[frozenset[Need | str]] = frozenset({Need.HIDDEN_STATES})

    kind: Literal["medusa"] = "medusa"
    head: RecipePath = Field(description="folder or file of the trained heads")

    def hidden_layers(self, config: Any) -> tuple[int, ...]:
        return (config.num_hidden_layers,)

    def start(self, host: DraftHost) -> DraftState:
        """The heads on the model's device.

        Raises:
            InputError: the file is no such head.
            Refused: the heads were trained for another model.
        """
        check_target(host.model, read_config(self.head), self.head, self.kind)
        tensors = {
            name.removeprefix("medusa_head."): tensor
            for name, tensor in read_tensors(self.head, r"(medusa_head\.)?\d+\.\d+\.").items()
        }
        places = [tuple(map(int, name.split(".")[:2])) for name in tensors]
        if not places:
            raise InputError(f"no Medusa heads in {str(self.head)!r}: expected tensors named 0.0.linear.weight, ...")
        heads, blocks = (1 + max(place) for place in zip(*places, strict=True))
        weight = host.model.get_output_embeddings().weight
        with torch.device("meta"):
            made = make_heads(text_config(host.model).hidden_size, host.vocab, heads, blocks - 1)
        made = made.to_empty(device=weight.device).to(weight.dtype)
        load_weights(made, tensors, self.head)
        return _Heads(made.requires_grad_(False), text_config(host.model).num_hidden_layers, host.vocab)


class _Heads(DraftState):
    def __init__(self, heads: nn.ModuleList, layer: int, vocab: int) -> None:
        self._heads, self._layer, self._vocab = heads, layer, vocab
        # A row: the hidden state that its last token was chosen from.
        self._hidden: dict[int, Tensor] = {}

    def observe(self, verified: Sequence[Verified]) -> None:
        for own in verified:
            last = 1 + own.accepted[-1] if own.accepted else 0
            self._hidden[own.row.row] = own.outputs.hidden(self._layer)[last]

    @torch.no_grad()
    def propose(self, rows: Sequence[DraftRow], budgets: Sequence[int]) -> Sequence[Draft]:
        known = [row.row for row, budget in zip(rows, budgets, strict=True) if budget and row.row in self._hidden]
        if not known:
            return [Draft()] * len(rows)
        hidden = torch.stack([self._hidden[row] for row in known])
        guesses = [
            head(hidden).float().softmax(-1).topk(min(BRANCHING, self._vocab))
            for head in [*self._heads][: max(budgets)]
        ]
        values, indices = (
            torch.stack(parts, dim=1).tolist()
            for parts in zip(*((own.values, own.indices) for own in guesses), strict=True)
        )
        places = {row: place for place, row in enumerate(known)}
        return [
            _tree(values[places[row.row]], indices[places[row.row]], budget) if row.row in places else Draft()
            for row, budget in zip(rows, budgets, strict=True)
        ]

    def fork(self, children: Mapping[int, int]) -> None:
        self._hidden |= {row: self._hidden[parent] for row, parent in children.items() if parent in self._hidden}

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._hidden.pop(row, None)


def _tree(values: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], budget: int) -> Draft:
    """The most probable paths through the guesses of all heads, [depth][BRANCHING] each in falling order."""
    drafted, parents = list[int](), list[int]()
    # Probability of the path, depth, which guess, parent; the most probable first.
    waiting = [(-values[0][0], 0, 0, -1, 1.0)]
    while waiting and len(drafted) < budget:
        negative, depth, guess, parent, before = heapq.heappop(waiting)
        node = len(drafted)
        drafted.append(tokens[depth][guess])
        parents.append(parent)
        if guess + 1 < len(values[depth]):
            heapq.heappush(waiting, (-before * values[depth][guess + 1], depth, guess + 1, parent, before))
        if depth + 1 < len(values):
            heapq.heappush(waiting, (negative * values[depth + 1][0], depth + 1, 0, node, -negative))
    return Draft(drafted, parents)
