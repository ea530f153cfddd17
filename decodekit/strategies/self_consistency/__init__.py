"""Sample several ways to an answer and take the answer that most of them reach."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from decodekit.core.candidates import Action, Cancel, Candidate, Deciding, Decision, Finished, Progress, Start, Wait
from decodekit.core.errors import RowError
from decodekit.core.protocols import SequenceStrategy
from decodekit.core.types import Need, Request
from decodekit.strategies.self_consistency.extractors import AnyExtractor, LastNumber
from decodekit.strategies.self_consistency.stops import Adaptive, AnyStop, DeepConf


@dataclass
class _Votes:
    """What the candidates answered.

    Attributes:
        done: candidates that ended by themselves.
        answers: by id; ``None`` where no answer was found.
        weights: by id, of those that have an answer.
        errors: by id, why the extractor failed.
    """

    done: list[Candidate] = field(default_factory=list)
    answers: dict[int, str | None] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    why: str = ""

    @property
    def totals(self) -> dict[str, float]:
        """The weight of each answer, the winner first; of equal ones the answer whose first candidate came first."""
        totals: dict[str, float] = {}
        for number in sorted(self.weights):
            answer = self.answers[number]
            assert answer is not None
            totals[answer] = totals.get(answer, 0.0) + self.weights[number]
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


class SelfConsistency(SequenceStrategy):
    """Self-consistency: a vote over the answers of n samples.

    Wang et al., 2022, arXiv:2203.11171, section 2. ``weights: logprob`` weighs a vote by exp(mean log-probability) (their
    eq. 1, a form of CISC, Taubenfeld et al., 2025, arXiv:2502.06233). The output is the first candidate with the winning
    answer; ties go to the answer whose first candidate came first. A candidate in which no answer is found does not vote. When
    none has one, the output is the candidate of the highest mean log-probability, and ``stats`` says so (``answer`` is null).

    Helps where an answer is short, can be told apart and is reached in several ways (arithmetic, multiple choice) and the
    model is right more often than it makes any one mistake; not for free text, nor where the model is mostly wrong. Most of the
    gain comes with the first 5 to 10 samples. Cost: up to n samples from one prefill.
    """

    cost: ClassVar[str] = "up to n samples"
    needs: ClassVar[frozenset[Need | str]] = frozenset({Need.TOKENIZER})

    kind: Literal["self_consistency"] = "self_consistency"
    n: int = Field(8, ge=1, description="most candidates")
    extract: AnyExtractor = Field(default=LastNumber(), description="finds the answer in a text")
    weights: Literal["uniform", "logprob"] = Field("uniform", description="of the votes")
    stop: AnyStop = Field(None, description="when fewer candidates will do; none samples all of them")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.weights == "logprob" and isinstance(self.stop, Adaptive | DeepConf):
            how = "counts votes" if isinstance(self.stop, Adaptive) else "weighs votes by its own confidence"
            raise ValueError(f"stop: {self.stop.kind} {how}; leave weights out")
        if isinstance(self.stop, DeepConf) and self.stop.warmup > self.n:
            raise ValueError(f"stop: deepconf warms up with {self.stop.warmup} candidates, n is {self.n}; raise n")
        return self

    @property
    def count(self) -> int:
        return self.n

    @property
    @override
    def confidence_top_k(self) -> int:
        return self.stop.top_k if isinstance(self.stop, DeepConf) else 0

    def decide(self, request: Request) -> Deciding:
        votes = _Votes()
        stopped = yield from self._sample(votes)
        if not votes.done:
            raise RowError(f"none of {self.n} candidates could be decoded: {votes.why}")
        totals, answers = votes.totals, votes.answers
        order = list(totals)
        ids = sorted(votes.weights, key=lambda number: (order.index(str(answers[number])), number))
        rest = sorted(
            (own for own in votes.done if own.id not in votes.weights), key=lambda own: (-own.mean_logprob, own.id)
        )
        total = sum(totals.values())
        report: dict[str, Any] = {
            "answer": order[0] if order else None,
            "votes": totals,
            "agreement": totals[order[0]] / total if order else 0.0,
            "stopped": stopped,
        }
        if not order:
            report["fallback"] = f"no answer in any of {len(votes.done)} candidates: ranked by mean log-probability"
        return Decision(
            ranking=[*ids, *(own.id for own in rest)],
            scores={number: totals[str(answers[number])] / total for number in ids},
            report=report,
            notes={
                number: {
                    "answer": answer,
                    **({"extract_error": votes.errors[number]} if number in votes.errors else {}),
                }
                for number, answer in answers.items()
            },
        )

    def _sample(self, votes: _Votes) -> Generator[Action, Any, str | None]:
        """Start candidates and take their votes; why it stopped before all n."""
        stop = self.stop
        if stop is None:
            yield from self._round(votes, self.n)
            return None
        if isinstance(stop, DeepConf):
            return (yield from self._sample_online(votes, stop))
        for first in range(0, self.n, stop.batch):
            yield from self._round(votes, min(stop.batch, self.n - first))
            if first + stop.batch < self.n and stop.enough([votes.answers[own.id] for own in votes.done]):
                return stop.kind
        return None

    def _sample_online(self, votes: _Votes, stop: DeepConf) -> Generator[Action, Any, str | None]:
        yield from self._round(votes, stop.warmup)
        if not votes.done:
            return None
        threshold = stop.threshold([stop.lowest(own.confidences) for own in votes.done])
        started = stop.warmup
        while True:
            votes.weights = {number: weight for number, weight in votes.weights.items() if weight >= threshold}
            if started == self.n:
                return None
            if stop.agreed(votes.totals):
                return stop.kind
            count = min(stop.batch, self.n - started)
            yield from self._round(votes, count, threshold)
            started += count

    def _round(self, votes: _Votes, count: int, threshold: float = -math.inf) -> Generator[Action, Any, None]:
        """Sample so many candidates side by side, those that fall below the threshold cancelled."""
        watch = max(1, self.stop.window // 8) if isinstance(self.stop, DeepConf) and threshold > -math.inf else None
        running = {*(yield Start(count, watch=watch))}
        while running:
            event = yield Wait()
            if isinstance(event, Progress):
                assert isinstance(self.stop, DeepConf)
                if self.stop.hopeless(event.confidences, threshold):
                    running.discard(event.id)
                    yield Cancel([event.id])
            elif isinstance(event, Finished):
                running.discard(event.candidate.id)
                self._vote(votes, event.candidate)
            else:
                running.discard(event.id)
                votes.why = event.error

    def _vote(self, votes: _Votes, candidate: Candidate) -> None:
        votes.done.append(candidate)
        try:
            answer = self.extract(candidate.text)
        except Exception as error:  # a function of the user's: its failure costs this vote alone
            answer, votes.errors[candidate.id] = None, f"{type(error).__name__}: {error}"
        votes.answers[candidate.id] = answer
        if answer is None:
            return
        if isinstance(self.stop, DeepConf):
            votes.weights[candidate.id] = self.stop.lowest(candidate.confidences)
        else:
            votes.weights[candidate.id] = math.exp(candidate.mean_logprob) if self.weights == "logprob" else 1.0
