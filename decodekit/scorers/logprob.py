"""The model's own log-probability of the candidate, normalised by its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from decodekit.core.candidates import Candidate
from decodekit.core.protocols import Scorer


class Logprob(Scorer):
    """log p / length^length_penalty, in nats.

    Wu et al., 2016, arXiv:1609.08144, section 7, with the plain power of the length. The probabilities are the model's raw
    ones, before any strategy or rule; an ending EOS counts once, pads never. Free, and weak: likely is not good, and what is
    most likely tends to be short and bland. Low penalties favour short candidates.
    """

    cost: ClassVar[str] = "none"

    kind: Literal["logprob"] = "logprob"
    length_penalty: float = Field(1.0, ge=0, description="power of the length; 0 is the plain sum, 1 the mean")

    def score(self, prompt: str, candidates: Sequence[Candidate]) -> Sequence[float]:
        return [sum(own.logprobs) / len(own.logprobs) ** self.length_penalty for own in candidates]
