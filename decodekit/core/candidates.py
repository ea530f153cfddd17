"""What a sequence-level strategy yields, is resumed with and returns.

A decision is a generator over whole outputs of one prompt, its *candidates*:

- ``ids = yield Start(8)`` starts eight more; ``Start(8, watch=16)`` also reports every 16 tokens of each;
- ``event = yield Wait()`` is resumed with the next ``Finished`` or ``Progress``;
- ``yield Cancel(ids)`` ends candidates where they stand, and their cache is free at once;
- ``return Decision(...)`` ends the whole; what still runs is cancelled.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decodekit.core.errors import RowError
from decodekit.core.types import FinishReason


@dataclass(frozen=True)
class Candidate:
    """One output of a prompt.

    Attributes:
        id: its number, in the order in which candidates were started.
        text: without special tokens, cut before a stop string.
        token_ids: without the prompt; an ending EOS is part of it.
        logprobs: of each token, nats, under the model's own logits, before any strategy or rule.
        confidences: of each token, minus the mean log-probability of the ``confidence_top_k`` most likely tokens (DeepConf,
            arXiv:2508.15260, section 3.1); empty unless the strategy asks for it.
        finish_reason: why it ended.
    """

    id: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    confidences: Sequence[float] = ()

    @property
    def mean_logprob(self) -> float:
        """Log-probability a token."""
        return sum(self.logprobs) / len(self.logprobs)


@dataclass(frozen=True)
class Start:
    """Start ``count`` more candidates; resumed with their ids. ``watch``: report every so many tokens of each."""

    count: int
    watch: int | None = None


@dataclass(frozen=True)
class Cancel:
    """End these candidates where they stand; those that have ended are left alone."""

    ids: Sequence[int]


@dataclass(frozen=True)
class Wait:
    """Resume with the next event."""


@dataclass(frozen=True)
class Progress:
    """A candidate that is watched has grown; the lists are all it has so far."""

    id: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    confidences: Sequence[float] = ()


@dataclass(frozen=True)
class Finished:
    """A candidate has ended by itself."""

    candidate: Candidate


@dataclass(frozen=True)
class Failed:
    """A candidate could not be decoded; it is none of the choices."""

    id: int
    error: str


@dataclass(frozen=True)
class Decision:
    """What was decided.

    Attributes:
        ranking: ids of candidates, the best first; at least one.
        scores: of candidates by id, whatever was computed.
        report: what else is worth telling (votes, utilities), plain data for ``Output.stats``.
        notes: by id, plain data for that candidate's entry (its extracted answer, for example).
        details: plain data that only a trace carries (a matrix of utilities, for example).
    """

    ranking: Sequence[int]
    scores: Mapping[int, float] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


Action = Start | Cancel | Wait
Event = Finished | Progress | Failed
Deciding = Generator[Action, Any, Decision]


def gather(count: int) -> Generator[Action, Any, list[Candidate]]:
    """Start candidates and wait for all of them: ``candidates = yield from`` this. Those that failed are left out.

    Raises:
        RowError: all failed.
    """
    yield Start(count)
    done: list[Candidate] = []
    why = ""
    for _ in range(count):
        event = yield Wait()
        if isinstance(event, Finished):
            done.append(event.candidate)
        else:
            why = event.error
    if not done:
        raise RowError(f"none of {count} candidates could be decoded: {why}")
    return sorted(done, key=lambda candidate: candidate.id)
