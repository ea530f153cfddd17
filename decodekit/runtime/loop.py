"""The decoding loop: requests in, one token a live row and step, until every row has ended.

A step is: forward every branch, score, rules and pick, commit. Rows end on their own; a row that fails ends alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation import StoppingCriteriaList

from decodekit.core.errors import PluginError, RowError
from decodekit.core.protocols import Rule, TokenStrategy
from decodekit.core.types import BranchOutputs, FinishReason, Outputs, Request, Rows
from decodekit.runtime.guard import guarded
from decodekit.runtime.pipeline import Picked, Pipeline, select
from decodekit.runtime.session import DynamicSession, Session
from decodekit.runtime.text import TextTracker


@dataclass(frozen=True)
class Limits:
    """When a row ends.

    Attributes:
        max_new_tokens: most tokens of output.
        eos: ids that end the output; they are its last token.
        deadline: ``time.perf_counter`` seconds after which no further token is started.
        context: most tokens of prompt and output together.
    """

    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    deadline: float | None = None
    context: int | None = None


@dataclass
class SequenceState:
    """A row in flight; it owns the cache of its request.

    Attributes:
        row: its place in the batch.
        tokens: the output so far.
        logprobs: a token, its log-probability (nats) under the final logits; only when the loop keeps them.
        states: a rule, its state.
        times: when each token was committed, ``time.perf_counter`` seconds.
    """

    request: Request
    row: int
    limits: Limits
    tracker: TextTracker | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None

    def fail(self, why: str) -> None:
        """End this row alone."""
        self.finish_reason, self.error = "error", why

    def commit(self, token: int, now: float) -> str:
        """Take a token; returns the text that became certain and sets ``finish_reason`` when the row ends."""
        self.tokens.append(token)
        self.times.append(now)
        limits = self.limits
        ended: FinishReason | None = None
        piece = ""
        if token in limits.eos:
            ended = "eos"
        elif self.tracker is not None:
            piece = self.tracker.push(token)
            ended = "stop" if self.tracker.stopped else None
        if ended is None:
            length = len(self.request.prompt_ids) + len(self.tokens)
            if len(self.tokens) >= limits.max_new_tokens or (limits.context is not None and length >= limits.context):
                ended = "length"
            elif limits.deadline is not None and now >= limits.deadline:
                ended = "time"
        if ended is not None:
            self.finish(ended)
        return piece

    def finish(self, reason: FinishReason) -> None:
        """End this row."""
        self.finish_reason = reason


@dataclass
class StepRecord:
    """What one step decided, for whoever watches (streams, traces, returned scores).

    Attributes:
        sequences: [P] the rows that were live.
        tokens: [P] what each was given (meaningless for a row that failed).
        pieces: [P] text that became certain.
        outputs: the branches' outputs and the strategy's annotations at these positions.
        picked: the tokens and logits of every stage.
    """

    sequences: Sequence[SequenceState]
    tokens: list[int]
    pieces: list[str]
    outputs: Outputs
    picked: Picked


class History:
    """The tokens of every row without pads, left-aligned, as rules see them.

    Args:
        prompts: [R] prompts.
        device: where rules run.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        self._prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._lengths = self._prompt_lengths.clone()
        self._longest = max(len(prompt) for prompt in prompts)
        self._tokens = torch.zeros(len(prompts), self._longest + 64, dtype=torch.long, device=device)
        for row, prompt in enumerate(prompts):
            self._tokens[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.long, device=device)

    def append(self, rows: Tensor, tokens: Tensor) -> None:
        """Add one token to each of ``rows`` [P]."""
        if self._longest == self._tokens.shape[1]:
            self._tokens = torch.cat([self._tokens, torch.zeros_like(self._tokens)], dim=1)
        self._tokens[rows, self._lengths[rows]] = tokens
        self._lengths[rows] += 1
        self._longest += 1

    def rows(self, sequences: Sequence[SequenceState], eos: tuple[int, ...]) -> Rows:
        """What the rules are told about these sequences."""
        tokens, lengths, prompts = self._tokens[:, : self._longest], self._lengths, self._prompt_lengths
        if len(sequences) < len(tokens):
            index = torch.tensor([sequence.row for sequence in sequences], device=tokens.device)
            tokens, lengths, prompts = tokens[index], lengths[index], prompts[index]
        return Rows(
            tokens=tokens,
            # A copy: the loop goes on counting in place, and a rule may keep what it was given.
            lengths=lengths.clone(),
            prompt_lengths=prompts,
            requests=[sequence.request.id for sequence in sequences],
            streams=[sequence.request.stream for sequence in sequences],
            eos=eos,
        )


class Loop:
    """Decodes the rows of one batch.

    Args:
        sessions: what runs the branches, one a model; the first has the ``main`` branch.
        strategy: scores the positions.
        pipeline: rules and pick.
        sequences: [R] the rows; those that have already failed are only carried along.
        input_ids: [R, T] the prompts as ``generate`` pads them, for those who want to see the rows so.
        pad: id that follows in rows that have ended.
        criteria: the caller's own stopping criteria.
        keep_logprobs: note each token's log-probability.
        keep_stages: record the logits after each rule.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        strategy: TokenStrategy,
        pipeline: Pipeline,
        sequences: Sequence[SequenceState],
        *,
        input_ids: Tensor,
        pad: int,
        criteria: StoppingCriteriaList | None = None,
        keep_logprobs: bool = False,
        keep_stages: bool = False,
    ) -> None:
        self.sessions = tuple(sessions)
        self.sequences = sequences
        self.input_ids = input_ids
        self.started = time.perf_counter()
        self.prefilled: float | None = None
        self._strategy, self._pipeline = strategy, pipeline
        self._pad, self._criteria = pad, criteria
        self._keep_logprobs, self._keep_stages = keep_logprobs, keep_stages
        self._device = input_ids.device
        # A row that cannot be decoded may have no prompt at all; it still takes its place in the batch.
        self._history = History([sequence.request.prompt_ids or (pad,) for sequence in sequences], self._device)
        self._stateful = [
            index
            for index, (_, step) in enumerate(pipeline.steps)
            if isinstance(step, Rule) and type(step).init_state is not Rule.init_state
        ]
        for sequence in sequences:
            sequence.states = [self._initial(step, sequence.request) for _, step in pipeline.steps]

    @property
    def live(self) -> list[SequenceState]:
        """Rows that have not ended."""
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    def run(self) -> Iterator[StepRecord]:
        """Decode until every row has ended, a record a step."""
        with ExitStack() as stack:
            for session in self.sessions:
                stack.callback(session.close)
            while self.live:
                record = self._step()
                if self.prefilled is None:
                    self.prefilled = time.perf_counter()
                    for session in self.sessions:
                        stack.enter_context(session.optimized())
                yield record

    @torch.no_grad()
    def _step(self) -> StepRecord:
        live = self.live
        rows = [sequence.row for sequence in live]
        branches: dict[str, BranchOutputs] = {}
        for session in self.sessions:
            fed = [sequence.tokens[-1] for sequence in live] if self.prefilled is not None else None
            branches |= session.prefill(rows) if fed is None else session.step(rows, fed)
        index = torch.tensor(rows, device=self._device)
        outputs = Outputs(branches)
        picked = self._pipeline(
            self._history.rows(live, self._pipeline.eos),
            score(self._strategy, outputs),
            [[sequence.states[step] for sequence in live] for step in range(len(self._pipeline.steps))],
            record=self._keep_stages,
        )
        self._history.append(index, picked.tokens)
        tokens = picked.tokens.tolist()
        if self._keep_logprobs:
            chosen = picked.final.log_softmax(-1).gather(-1, picked.tokens.unsqueeze(-1)).squeeze(-1).tolist()
        now = time.perf_counter()
        pieces = []
        for position, (sequence, token) in enumerate(zip(live, tokens, strict=True)):
            if position in picked.failures:
                sequence.fail(picked.failures[position])
                pieces.append("")
                continue
            self._commit_states(sequence, token, picked.final[position])
            if self._keep_logprobs:
                sequence.logprobs.append(chosen[position])
            pieces.append(sequence.commit(token, now))
        self._follow(index, picked, live)
        return StepRecord(live, tokens, pieces, outputs, picked)

    @torch.no_grad()
    def score(self, ids: Sequence[int]) -> list[float]:
        """The log-probability (nats) of each of these tokens after the one row's prompt, from one forward.

        Raises:
            RowError: no distribution is left at some position.
        """
        [sequence] = self.sequences
        known = torch.tensor([list(ids)], device=self._device)
        branches: dict[str, BranchOutputs] = {}
        for session in self.sessions:
            if not isinstance(session, DynamicSession):
                raise TypeError("scoring reads a transformers cache, which keeps all positions")
            branches |= session.read(ids)
        scores = score(self._strategy, Outputs(branches))
        prompt = sequence.request.prompt_ids
        rows = Rows(
            tokens=torch.tensor([[*prompt, *ids[:-1]]], device=self._device).expand(len(ids), -1),
            lengths=torch.arange(len(ids), device=self._device) + len(prompt),
            prompt_lengths=torch.full((len(ids),), len(prompt), device=self._device),
            requests=[sequence.request.id] * len(ids),
            streams=[sequence.request.stream] * len(ids),
            eos=self._pipeline.eos,
        )
        # A stateful rule sees a position only after the one before it was committed.
        groups = [[position] for position in range(len(ids))] if self._stateful else [list(range(len(ids)))]
        logprobs: list[float] = []
        for group in groups:
            states = [[state] * len(group) for state in sequence.states]
            picked = self._pipeline(select(rows, group), scores[group], states)
            for why in picked.failures.values():
                raise RowError(why)
            taken = picked.final.log_softmax(-1).gather(-1, known[0, group].unsqueeze(-1))
            logprobs += taken.squeeze(-1).tolist()
            self._commit_states(sequence, ids[group[-1]], picked.final[-1])
        return logprobs

    def _initial(self, step: Any, request: Request) -> Any:
        if not isinstance(step, Rule):
            return None
        with guarded(step, "init_state"):
            return step.init_state(request)

    def _commit_states(self, sequence: SequenceState, token: int, logits: Tensor) -> None:
        for step in self._stateful:
            rule: Any = self._pipeline.steps[step][1]
            with guarded(rule, "commit"):
                sequence.states[step] = rule.commit(sequence.states[step], token, logits)

    def _follow(self, index: Tensor, picked: Picked, live: Sequence[SequenceState]) -> None:
        """Show the chosen tokens to those who see the rows padded: the caller's processors and criteria."""
        following = torch.full((len(self.sequences), 1), self._pad, dtype=torch.long, device=self._device)
        following[index, 0] = picked.tokens
        self.input_ids = torch.cat([self.input_ids, following], dim=-1)
        if not self._criteria:
            return
        final = spread(picked.final, live, len(self.sequences), self._pad)
        done = self._criteria(self.input_ids, (final,)).tolist()
        for sequence in live:
            if done[sequence.row] and sequence.finish_reason is None:
                sequence.finish("stop")


def score(strategy: TokenStrategy, outputs: Outputs) -> Tensor:
    """The strategy's scores, checked.

    Raises:
        PluginError: it failed or gave another shape than [P, V].
    """
    expected = outputs["main"].logits.shape
    with guarded(strategy, "score"):
        scores = strategy.score(outputs)
    if not isinstance(scores, Tensor) or scores.shape != expected or not scores.is_floating_point():
        given = f"{tuple(scores.shape)} {scores.dtype}" if isinstance(scores, Tensor) else type(scores).__name__
        raise PluginError(f"strategy {strategy.kind!r} returned {given}; expected floating-point {tuple(expected)}")
    return scores


def spread(values: Tensor, live: Sequence[SequenceState], rows: int, pad: int) -> Tensor:
    """[P, V] of the live rows as [R, V]; ended rows are certain of the pad, so that sums over scores ignore them."""
    if len(live) == rows:
        return values
    whole = torch.full((rows, values.shape[-1]), -torch.inf, dtype=values.dtype, device=values.device)
    whole[:, pad] = 0.0
    whole[[sequence.row for sequence in live]] = values
    return whole
