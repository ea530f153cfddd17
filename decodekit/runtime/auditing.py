"""Audits: some steps' logits are computed again without any cache and compared; the certificate goes with the output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from decodekit.cache.paged import PagedCache
from decodekit.core.errors import Refused
from decodekit.core.random import AUDIT_LANE, uniform
from decodekit.core.types import Outputs
from decodekit.runtime.forward import inputs_of
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.session import Session


@dataclass(frozen=True)
class Flip:
    """A most likely token that another takes the place of without a cache.

    Attributes:
        branch: of the strategy.
        place: of the token in the output.
        cached: the most likely token as it was decoded.
        uncached: without a cache.
        margin: how much more likely the second is without a cache, as a difference of logits; next to nothing is rounding.
    """

    branch: str
    place: int
    cached: int
    uncached: int
    margin: float


@dataclass
class Certificate:
    """What audits found of one prompt's sequences.

    Attributes:
        share: of the steps that are audited.
        steps: that were.
        worst_difference: the largest difference of a logit.
        flips: where the most likely token is another.
    """

    share: float
    steps: int = 0
    worst_difference: float = 0.0
    flips: list[Flip] = field(default_factory=list)


class Auditor:
    """Checks a share of the steps of a call. Which ones, the row's random stream decides: they are the same in every batch.

    Args:
        share: of the steps.
        sessions: that decode.
        inputs: names of what the forwards are given beside token ids.

    Raises:
        Refused: a step cannot be repeated from the tokens alone.
    """

    def __init__(self, share: float, sessions: Sequence[Session], inputs: Sequence[str] = ()) -> None:
        if inputs:
            raise Refused(
                f"audit repeats steps from token ids, and this call also gives {', '.join(inputs)}; leave audit out"
            )
        if any(isinstance(session.cache, PagedCache) and session.cache.stream is not None for session in sessions):
            raise Refused(
                "audit compares with a forward that forgets nothing, and this cache has a window; leave audit out"
            )
        self._share, self._sessions = share, sessions
        self._certificates: defaultdict[int, Certificate] = defaultdict(lambda: Certificate(share))

    def check(self, sequences: Sequence[SequenceState], outputs: Outputs) -> None:
        """Audit some of these [P] sequences, whose next tokens are about to be chosen from ``outputs``."""
        for position, sequence in enumerate(sequences):
            request, place = sequence.request, len(sequence.tokens)
            if sequence.finish_reason is not None or uniform(request.stream, place, AUDIT_LANE) >= self._share:
                continue
            certificate = self._certificates[request.id]
            certificate.steps += 1
            for session in self._sessions:
                for branch in session.branches(sequence.row):
                    exact = _uncached(session.model, [*sequence.prompts[branch], *sequence.tokens])
                    _compare(certificate, branch, place, outputs[branch].logits[position], exact)

    def certificate(self, request: int) -> dict[str, Any]:
        """What was found of the sequences of a request, as plain data."""
        return asdict(self._certificates[request])

    def forget(self, request: int) -> None:
        """A request is over."""
        self._certificates.pop(request, None)


def _uncached(model: Any, ids: Sequence[int]) -> Tensor:
    """[V] logits after these tokens."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inputs_of(model) else {}
    logits: Tensor = model(torch.tensor([ids], device=model.device), use_cache=False, return_dict=True, **last).logits
    return logits[0, -1]


def _compare(certificate: Certificate, branch: str, place: int, cached: Tensor, uncached: Tensor) -> None:
    uncached = uncached.to(cached.dtype)
    apart = torch.where(cached == uncached, 0.0, (cached - uncached).abs()).nan_to_num(torch.inf)
    certificate.worst_difference = max(certificate.worst_difference, float(apart.max()))
    before, now = int(cached.argmax()), int(uncached.argmax())
    if before != now:
        margin = float(uncached[now] - uncached[before])
        certificate.flips.append(Flip(branch, place, before, now, margin))
