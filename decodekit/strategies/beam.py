"""Keep the most likely hypotheses instead of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from decodekit.core.beams import Continuation, EarlyStopping, can_improve, drawn, log_probabilities, most_likely
from decodekit.core.protocols import SearchStrategy
from decodekit.core.search import Advance, Ended, Group


class Beam(SearchStrategy):
    """Beam search, diverse beams, and with ``do_sample: true`` beam sampling.

    A hypothesis is ranked by the sum of its log-probabilities, after all rules, over its length to the power of
    ``length_penalty`` (Wu et al., 2016, arXiv:1609.08144, section 7, without its constants). Helps where there is one right
    output (translation); open-ended text becomes dull and repetitive.

    With several groups each is charged for tokens that the groups before it chose at the same step (Vijayakumar et al., 2016,
    arXiv:1610.02424, eq. 4, Hamming diversity); the charge stays in the score. Sampling draws the continuations without
    replacement.

    Cost: ``num_beams`` tokens forwarded a token of output, in one forward; beams are forks of one cache.
    """

    cost: ClassVar[str] = "1 forward of num_beams rows a token"
    samples: ClassVar[bool] = True

    kind: Literal["beam"] = "beam"
    num_beams: int = Field(4, ge=1, le=256, description="hypotheses kept; generate's num_beams beats it")
    length_penalty: float = Field(
        1.0, description="power of the length that a score is divided by; above 0 favours length"
    )
    early_stopping: EarlyStopping = Field(
        False,
        description="true: over with num_beams outputs; false: when no better one is likely; never: when none is possible",
    )
    num_beam_groups: int = Field(1, ge=1, description="groups that are kept apart; divides num_beams")
    diversity_penalty: float = Field(0.0, ge=0, description="nats that a token costs for each use in an earlier group")

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.num_beams % self.num_beam_groups:
            raise ValueError(f"num_beam_groups {self.num_beam_groups} does not divide num_beams {self.num_beams}")
        if self.diversity_penalty and self.num_beam_groups == 1:
            raise ValueError("diversity_penalty needs num_beam_groups of 2 or more")
        return self

    @property
    def width(self) -> int:
        """One row a beam."""
        return self.num_beams

    def step(self, group: Group) -> Advance:
        """The best continuations of each group of beams."""
        state: _State = group.state or _State([0.0], [0] * 1, [[] for _ in range(self.num_beam_groups)])
        log_probs = log_probabilities(group.logits)
        totals = log_probs + torch.tensor(state.scores, dtype=log_probs.dtype, device=log_probs.device).unsqueeze(-1)
        used = log_probs.new_zeros(log_probs.shape[-1])
        length = len(group.hypotheses[0].tokens) + 1
        alive, ended, finished = list[tuple[Continuation, int]](), list[Ended](), [*map(list, state.finished)]
        for number in range(self.num_beam_groups):
            # At first all groups grow from the same, empty hypothesis.
            rows = [row for row, own in enumerate(state.groups) if own == number] if group.state else [0]
            if not rows:
                continue
            kept = list[Continuation]()
            for rank, own in enumerate(
                self._continuations(group, totals[rows] - self.diversity_penalty * used, number)
            ):
                best = own._replace(parent=rows[own.parent])
                reason = group.ends(best.parent, best.token)
                if reason is None and len(kept) < self._size:
                    kept.append(best)
                elif reason is not None and rank < self._size:
                    score = best.score / length**self.length_penalty
                    ended.append(Ended(best.parent, best.token, score, reason))
                    finished[number].append(score)
            used = used.index_add(0, *_ones(kept, used))
            if kept and self._improves(kept[0].score, finished[number], length, group.max_new_tokens):
                alive += [(own, number) for own in kept]
        return Advance(
            [own.parent for own, _ in alive],
            [own.token for own, _ in alive],
            ended,
            _State([own.score for own, _ in alive], [number for _, number in alive], finished),
        )

    @property
    def _size(self) -> int:
        return self.num_beams // self.num_beam_groups

    def _continuations(self, group: Group, scores: Tensor, number: int) -> list[Continuation]:
        # So many that beams are left when all that can end do.
        count = max(2, 1 + len(group.eos)) * self._size
        if not group.sample:
            return most_likely(scores, count)
        return drawn(scores, count, lambda lane: group.draw(number * count + lane))

    def _improves(self, running: float, finished: list[float], length: int, max_length: int) -> bool:
        return can_improve(
            running,
            finished,
            self._size,
            length=length,
            max_length=max_length,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )


@dataclass(frozen=True)
class _State:
    """Of the beams, [R]: the sums of log-probabilities and the groups; of each group the scores of what is over."""

    scores: list[float]
    groups: list[int]
    finished: list[list[float]]


def _ones(kept: list[Continuation], like: Tensor) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor([own.token for own in kept], dtype=torch.long, device=like.device)
    return tokens, like.new_ones(len(kept))
