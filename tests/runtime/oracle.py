"""A drafter for tests, which knows what will come and is wrong now and then."""

import random
from typing import Any, Literal

import torch

from decodekit.core.drafts import Draft, DraftState
from decodekit.core.protocols import Drafter


class Oracle(Drafter):
    """Right with probability ``right`` a token; a tree where ``tree``; silent at ``silent`` places of the output."""

    kind: Literal["oracle"] = "oracle"
    truth: dict[tuple[int, ...], list[int]]
    right: float = 0.7
    tree: bool = False
    silent: tuple[int, ...] = ()

    def start(self, host) -> DraftState:
        return _Knowing(self, host.vocab)


class _Knowing(DraftState):
    def __init__(self, options: Oracle, vocab: int) -> None:
        self._options, self._vocab = options, vocab

    def propose(self, rows, budgets):
        return [self._draft(row, budget) for row, budget in zip(rows, budgets, strict=True)]

    def _draft(self, row, budget: int) -> Draft:
        if len(row.tokens) in self._options.silent or not budget:
            return Draft()
        rng = random.Random(len(row.tokens))
        truth = self._options.truth[tuple(row.prompt_ids)][len(row.tokens) :]
        tokens = [
            token if rng.random() < self._options.right else (token + 1) % self._vocab
            for token in truth[: budget if not self._options.tree else budget - budget // 2]
        ]
        if not self._options.tree or len(tokens) < 2:
            return Draft(tokens)
        # A wrong sibling of the first, then one of the last that is right where the last is wrong.
        others = [(tokens[0] + 3) % self._vocab, truth[len(tokens) - 1]]
        nodes, parents = [others[0], *tokens], [-1, -1, *range(1, len(tokens))]
        if budget > len(nodes) and others[1] != tokens[-1]:
            nodes.append(others[1])
            parents.append(len(tokens) - 1)
        return Draft(nodes, parents)


class Sampled(Drafter):
    """Draws from the target's distribution of ``temperature`` over logits that it made up, and says so."""

    kind: Literal["sampled"] = "sampled"
    siblings: int = 1
    honest: bool = True

    def start(self, host: Any) -> DraftState:
        return _Drawing(self, host.vocab)


class _Drawing(DraftState):
    def __init__(self, options: Sampled, vocab: int) -> None:
        self._options, self._vocab = options, vocab

    def propose(self, rows, budgets):
        from decodekit.core.random import DRAFT_LANE, inverse_cdf, uniform

        drafts = []
        for row, budget in zip(rows, budgets, strict=True):
            tokens, parents, laws = [], [], []
            parent = -1
            while len(tokens) + self._options.siblings <= budget:
                law = (torch.arange(self._vocab) * 7 % 11 / 4.0).softmax(0)
                for _ in range(self._options.siblings):
                    lane = DRAFT_LANE + len(tokens)
                    own = torch.tensor([uniform(row.stream, len(row.tokens), lane)])
                    token = int(inverse_cdf(law.unsqueeze(0), own)) if self._options.honest else int(law.argmax())
                    tokens.append(token)
                    parents.append(parent)
                    laws.append(law)
                    law = law.clone()
                    law[token] = 0
                    law = law / law.sum()
                parent = len(tokens) - 1
            q = torch.stack(laws) if laws else None
            drafts.append(Draft(tokens, parents, q))
        return drafts
