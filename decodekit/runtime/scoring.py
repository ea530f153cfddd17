"""From the outputs of the branches to the strategy's scores; and given tokens scored without decoding any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decodekit.core import compat
from decodekit.core.errors import PluginError, RowError
from decodekit.core.types import BranchOutputs, Outputs, Rows
from decodekit.runtime.guard import guarded
from decodekit.runtime.pipeline import Pipeline, select
from decodekit.runtime.plan import Plan
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.session import DynamicSession, Session


class Scored(NamedTuple):
    """A given token: its log-probability in nats, and whether no other is likelier."""

    logprob: float
    likeliest: bool


class Scoring:
    """The strategy's scores, checked.

    Args:
        plan: the strategies.
        sessions: what runs the branches; the first has the ``main`` one.
    """

    def __init__(self, plan: Plan, sessions: Sequence[Session]) -> None:
        self._strategy, self._sessions = plan.strategy, sessions
        # What a search or drafter reads beside it is none of the strategy's business.
        others = plan.search is not None or plan.drafter is not None
        config = compat.text_config(sessions[0].model)
        self._layers = plan.strategy.hidden_layers(config) if others else None

    def __call__(self, outputs: Outputs) -> Tensor:
        """[P, V] of the positions.

        Raises:
            PluginError: the strategy failed or gave another shape.
        """
        given = outputs
        if self._layers is not None:
            given = Outputs({**outputs, "main": outputs["main"].only(self._layers)})
            given.annotations = outputs.annotations
        with guarded(self._strategy, "score"):
            scores = self._strategy.score(given)
        expected = given["main"].logits.shape
        if not isinstance(scores, Tensor) or scores.shape != expected or not scores.is_floating_point():
            found = f"{tuple(scores.shape)} {scores.dtype}" if isinstance(scores, Tensor) else type(scores).__name__
            raise PluginError(
                f"strategy {self._strategy.kind!r} returned {found}; expected floating-point {tuple(expected)}"
            )
        return scores

    @torch.no_grad()
    def given(
        self, tokens: Sequence[Sequence[int]], sequences: Sequence[SequenceState], pipeline: Pipeline
    ) -> list[list[Scored]]:
        """Each of these tokens after its row's prompt, [R] of any numbers, from one forward.

        Raises:
            RowError: no distribution is left at some position.
        """
        branches: dict[str, BranchOutputs] = {}
        for session in self._sessions:
            if not isinstance(session, DynamicSession):
                raise TypeError("scoring reads a transformers cache, which keeps all positions")
            branches |= session.read(tokens)
        parts = self(Outputs(branches)).split([len(ids) for ids in tokens])
        return [
            self._row(ids, sequence, scores, pipeline)
            for ids, sequence, scores in zip(tokens, sequences, parts, strict=True)
        ]

    def _row(self, ids: Sequence[int], sequence: SequenceState, scores: Tensor, pipeline: Pipeline) -> list[Scored]:
        device, prompt = scores.device, sequence.request.prompt_ids
        known = torch.tensor(list(ids), device=device)
        rows = Rows(
            tokens=torch.tensor([[*prompt, *ids[:-1]]], device=device).expand(len(ids), -1),
            lengths=torch.arange(len(ids), device=device) + len(prompt),
            prompt_lengths=torch.full((len(ids),), len(prompt), device=device),
            requests=[sequence.request.id] * len(ids),
            streams=[sequence.request.stream] * len(ids),
            eos=pipeline.eos,
        )
        # A stateful rule sees a position only after the one before it was committed.
        groups = [[place] for place in range(len(ids))] if pipeline.stateful else [list(range(len(ids)))]
        scored: list[Scored] = []
        for group in groups:
            states = [[state] * len(group) for state in sequence.states]
            picked = pipeline(select(rows, group), scores[group], states)
            for why in picked.failures.values():
                raise RowError(why)
            logprobs = picked.final.log_softmax(-1)
            taken = logprobs.gather(-1, known[group].unsqueeze(-1)).squeeze(-1)
            likeliest = taken == logprobs.amax(-1)
            scored += map(Scored, taken.tolist(), likeliest.tolist())
            pipeline.commit(sequence.states, ids[group[-1]], picked.final[-1])
        return scored
