"""When the votes that there are will do, so that the rest need not be sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Adaptive(BaseModel):
    """Stop when the leader will most likely stay in front.

    Aggarwal et al., 2023, arXiv:2305.11860, section 3.2 (Beta): of the two most frequent answers, seen v1 and v2 times, the
    first is the more probable one with the probability that a Beta(v1 + 1, v2 + 1) is above a half.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["adaptive"] = "adaptive"
    confidence: float = Field(0.95, gt=0.5, lt=1, description="probability that the leader stays in front")
    batch: int = Field(
        4, ge=1, description="candidates that are sampled side by side between two looks; the paper's is 1"
    )

    def enough(self, answers: Sequence[str | None]) -> bool:
        """Whether the votes so far will do."""
        counts = sorted((answers.count(answer) for answer in {*answers} - {None}), reverse=True)
        return bool(counts) and leads(counts[0], counts[1] if len(counts) > 1 else 0) > self.confidence


def leads(first: int, second: int) -> float:
    """The probability that a Beta(first + 1, second + 1) is above a half: a binomial tail, as the counts are whole."""
    tosses = first + second + 1
    return sum(comb(tosses, heads) for heads in range(first + 1)) / 2**tosses


class Esc(BaseModel):
    """Stop after a window of candidates that all give the same answer.

    Li et al., 2024, arXiv:2401.10480, section 2.2; the vote is over all windows so far.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["esc"] = "esc"
    batch: int = Field(4, ge=2, description="candidates of a window, sampled side by side between two looks")

    def enough(self, answers: Sequence[str | None]) -> bool:
        """Whether the votes so far will do."""
        window = answers[-self.batch :]
        return len(window) == self.batch and window[0] is not None and len({*window}) == 1


class DeepConf(BaseModel):
    """Cancel candidates that become unsure on the way, and stop when the rest agree.

    Fu et al., 2025, arXiv:2508.15260, section 3.3 (online). A token's confidence is minus the mean log-probability of the
    ``top_k`` most likely tokens, a group's the mean over ``window`` tokens. The warm-up runs to its end; the threshold is the
    least group confidence that the best ``keep`` of it reach; a later candidate whose group confidence falls below is
    cancelled and does not vote. Votes are weighted by the least group confidence.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["deepconf"] = "deepconf"
    warmup: int = Field(4, ge=1, description="candidates that set the threshold")
    keep: float = Field(
        0.9, gt=0, le=1, description="share of the warm-up that reaches the threshold; the paper's: .1 or .9"
    )
    window: int = Field(64, ge=1, description="tokens of a group; the paper's 2048 are for very long reasoning")
    top_k: int = Field(20, ge=1, description="tokens whose mean log-probability is the confidence")
    consensus: float = Field(0.95, gt=0, le=1, description="share of the votes at which sampling stops")
    batch: int = Field(4, ge=1, description="candidates that run side by side after the warm-up")

    def threshold(self, lowest: Sequence[float]) -> float:
        """What the best ``keep`` of these reach."""
        return float(np.quantile(lowest, 1 - self.keep))

    def lowest(self, confidences: Sequence[float]) -> float:
        """The least mean over a window; over all tokens where they fill none."""
        if len(confidences) <= self.window:
            return float(np.mean(confidences))
        sums = np.cumsum([0.0, *confidences])
        return float(((sums[self.window :] - sums[: -self.window]) / self.window).min())

    def hopeless(self, confidences: Sequence[float], threshold: float) -> bool:
        """Whether a group of a candidate has fallen below the threshold."""
        return len(confidences) >= self.window and self.lowest(confidences) < threshold

    def agreed(self, votes: Mapping[str, float]) -> bool:
        """Whether the leader has the consensus."""
        return bool(votes) and max(votes.values()) >= self.consensus * sum(votes.values())


_Any = Annotated[Adaptive | Esc | DeepConf, Field(discriminator="kind")]


def _spelled_out(spec: Any) -> Any:
    return None if spec == "none" else {"kind": spec} if isinstance(spec, str) else spec


AnyStop = Annotated[
    _Any | None,
    BeforeValidator(_spelled_out, json_schema_input_type=_Any | Literal["none", "adaptive", "esc", "deepconf"] | None),
]
"""A stop as ``{kind: ..., ...}`` or by its bare kind; ``none`` samples all candidates."""
