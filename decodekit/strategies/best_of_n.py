"""Choose the sample that a scorer rates highest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import override

from decodekit.core.candidates import Cancel, Candidate, Deciding, Decision, Failed, Finished, Progress, Start, Wait
from decodekit.core.errors import InputError, RowError
from decodekit.core.protocols import Scorer, SequenceStrategy
from decodekit.core.random import SEARCH_LANE, Stream, uniform
from decodekit.core.types import Need, Request


class SpeculativeRejection(BaseModel):
    """Every so many tokens, score what there is of the candidates and cancel the worst; their cache is free at once.

    Sun et al., 2024, arXiv:2410.20290, algorithm 1, with checkpoints by length in place of by memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    every: int = Field(64, ge=1, description="tokens between checkpoints")
    fraction: float = Field(0.5, gt=0, lt=1, description="of the running candidates, how many are cancelled")


class BestOfN(SequenceStrategy):
    """Best-of-N: n samples, of which the scorer's favourite is the output.

    Stiennon et al., 2020, arXiv:2009.01325. With ``soft`` the output is drawn in proportion to exp(score / soft)
    (Verdun et al., 2025, arXiv:2505.03156), which games a weak scorer less. A candidate whose scoring fails has no score and
    says why; it comes after all that have one, and so do those that were cancelled. Of equal scores the first wins.

    Helps as much as the scorer is right: a verifier (tests, a parser) gains for a long time, a learned reward until its
    errors are found, log-probability hardly at all. Gains grow with log n and saturate.
    Cost: n samples from one prefill, n scores; with ``pruning`` fewer tokens and a score more a checkpoint.
    """

    cost: ClassVar[str] = "n samples, n scores"

    kind: Literal["best_of_n"] = "best_of_n"
    n: int = Field(8, ge=1, description="candidates")
    scorer: Scorer = Field(description="rates candidates; higher is better")
    soft: float | None = Field(None, gt=0, description="draw in proportion to exp(score / soft); left out, the best")
    pruning: SpeculativeRejection | None = Field(None, description="cancel candidates that do badly on the way")

    @property
    def count(self) -> int:
        return self.n

    @override
    def resolve(self, tokenizer: Any) -> Self:
        if tokenizer is None and self.scorer.needs & {Need.TOKENIZER, Need.TEXT}:
            raise InputError(
                f"scorer {self.scorer.kind!r} reads texts, which need a tokenizer; give dk_tokenizer=tokenizer or "
                "decoder.bind(tokenizer=...)"
            )
        return self.model_copy(update={"scorer": self.scorer.resolve(tokenizer)})

    def decide(self, request: Request) -> Deciding:
        needed = Need.TEXT in self.scorer.needs
        prompt = (
            request.require(Need.TEXT, f"scorer {self.scorer.kind!r}") if needed else request.inputs.get(Need.TEXT, "")
        )
        yield Start(self.n, watch=self.pruning.every if self.pruning is not None else None)
        running, done, grown = set(range(self.n)), list[Candidate](), dict[int, Progress]()
        notes: dict[int, dict[str, Any]] = {}
        why = ""
        while running:
            event = yield Wait()
            if isinstance(event, Progress):
                grown[event.id] = event
            elif isinstance(event, Failed):
                running.discard(event.id)
                why = event.error
            elif isinstance(event, Finished):
                running.discard(event.candidate.id)
                done.append(event.candidate)
            if self.pruning is not None and running and running <= grown.keys():
                losers = self._losers(prompt, [_so_far(grown[number]) for number in sorted(running)])
                notes |= {number: {"pruned_score": score} for number, score in losers.items()}
                yield Cancel([*losers])
                running -= losers.keys()
                grown = {}
        if not done:
            raise RowError(f"none of {self.n} candidates could be decoded: {why}")
        rated = _rate(self.scorer, prompt, sorted(done, key=lambda candidate: candidate.id))
        notes |= {number: {"scorer_error": why} for number, why in rated.errors.items()}
        if not rated.scores:
            first = next(iter(rated.errors.values()))
            raise RowError(f"scorer {self.scorer.kind!r} gave none of {len(done)} candidates a score: {first}")
        order = self._order(rated.scores, request.stream)
        return Decision(
            ranking=order,
            scores=rated.scores,
            report={"scorer": self.scorer.kind, "score": rated.scores[order[0]], "unscored": len(rated.errors)},
            notes=notes,
        )

    def _losers(self, prompt: str, candidates: Sequence[Candidate]) -> dict[int, float | None]:
        """The candidates to cancel, with their scores; one without a score is worse than any."""
        assert self.pruning is not None
        scores = _rate(self.scorer, prompt, candidates).scores
        worst = sorted(candidates, key=lambda own: (scores.get(own.id, -math.inf), -own.id))
        return {own.id: scores.get(own.id) for own in worst[: int(self.pruning.fraction * len(worst))]}

    def _order(self, scores: Mapping[int, float], stream: Stream) -> list[int]:
        """The best first; soft: drawn one after the other without replacement."""
        keys = dict(scores)
        if self.soft is not None:
            # The largest of the scores with Gumbel noise is a draw from their softmax, the order one without replacement.
            for number, score in scores.items():
                draw = max(uniform(stream, number, SEARCH_LANE), 1e-30)
                keys[number] = score / self.soft - math.log(-math.log(draw))
        return sorted(keys, key=lambda number: (-keys[number], number))


@dataclass
class _Rated:
    """Scores by id, and why the others have none."""

    scores: dict[int, float] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


def _rate(scorer: Scorer, prompt: str, candidates: Sequence[Candidate]) -> _Rated:
    """Score candidates together, or each alone where that fails, so that one which cannot be scored harms no other."""
    rated = _Rated()
    try:
        scores = [float(score) for score in scorer.score(prompt, candidates)]
        if len(scores) != len(candidates):
            raise ValueError(f"{len(scores)} scores for {len(candidates)} candidates")
    except Exception as error:
        if len(candidates) == 1:
            return _Rated(errors={candidates[0].id: f"{type(error).__name__}: {error}"})
        for own in candidates:
            alone = _rate(scorer, prompt, [own])
            rated.scores |= alone.scores
            rated.errors |= alone.errors
        return rated
    for own, score in zip(candidates, scores, strict=True):
        if math.isnan(score):
            rated.errors[own.id] = "the scorer gave no number"
        else:
            rated.scores[own.id] = score
    return rated


def _so_far(progress: Progress) -> Candidate:
    """A candidate as if it were cut here."""
    return Candidate(
        progress.id, progress.text, progress.token_ids, progress.logprobs, "cancelled", progress.confidences
    )
