"""A sequence in flight: what it has so far, when it ends, and how it forks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from decodekit.core.types import FinishReason, Request
from decodekit.runtime.constraining import RowConstraint
from decodekit.runtime.text import TextTracker


@dataclass(frozen=True)
class Limits:
    """When a sequence ends.

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


@dataclass(eq=False)
class SequenceState:
    """A sequence in flight; it owns cache of its own in every session.

    Attributes:
        row: what the sessions know it by; never used twice in a call.
        tokens: the output so far.
        logprobs: a token, its log-probability (nats) under the final logits; only when the loop keeps them.
        raw_logprobs: likewise under the model's own logits.
        confidences: a token, minus the mean log-probability of the most likely ones at its position; likewise.
        states: a rule, its state.
        times: when each token was committed, ``time.perf_counter`` seconds.
        constraint: its place in the language that it must belong to.
        prompts: a branch, the prompt that it began with.
        given: the tokens that it begins with, whatever would have been chosen.
    """

    request: Request
    row: int
    limits: Limits
    tracker: TextTracker | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    constraint: RowConstraint | None = None
    prompts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    given: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None

    def fail(self, why: str) -> None:
        """End this row alone."""
        self.finish_reason, self.error = "error", why

    @property
    def text(self) -> str:
        """Of the output so far, cut before a stop string; empty where nobody reads it."""
        if self.tracker is None:
            return ""
        if self.finish_reason is not None:
            self.tracker.finish()
        return self.tracker.text

    def fork(self, row: int, request: Request | None = None) -> SequenceState:
        """A second sequence with the same history, of another request if one is given."""
        return replace(
            self,
            request=request or self.request,
            row=row,
            tracker=None if self.tracker is None else self.tracker.fork(),
            tokens=[*self.tokens],
            logprobs=[*self.logprobs],
            raw_logprobs=[*self.raw_logprobs],
            confidences=[*self.confidences],
            states=[*self.states],
            times=[*self.times],
            constraint=None if self.constraint is None else self.constraint.fork(),
        )

    def commit(self, token: int, now: float) -> str:
        """Take a token; returns the text that became certain and sets ``finish_reason`` when the row ends."""
        self.tokens.append(token)
        self.times.append(now)
        piece = ""
        if token not in self.limits.eos and self.tracker is not None:
            piece = self.tracker.push(token)
        self.finish_reason = self._over(token, len(self.tokens), now, self.tracker)
        return piece

    def ends(self, token: int, now: float) -> FinishReason | None:
        """Why the row would be over with this token; ``None`` while it would go on."""
        tracker = self.tracker
        if tracker is not None and tracker.stops and token not in self.limits.eos:
            tracker = tracker.fork()
            tracker.push(token)
        return self._over(token, len(self.tokens) + 1, now, tracker)

    def finish(self, reason: FinishReason) -> None:
        """End this row."""
        self.finish_reason = reason

    def _over(self, last: int, count: int, now: float, tracker: TextTracker | None) -> FinishReason | None:
        limits = self.limits
        if last in limits.eos:
            return "eos"
        if tracker is not None and tracker.stopped:
            return "stop"
        length = len(self.request.prompt_ids) + count
        if count >= limits.max_new_tokens or (limits.context is not None and length >= limits.context):
            return "length"
        return "time" if limits.deadline is not None and now >= limits.deadline else None
