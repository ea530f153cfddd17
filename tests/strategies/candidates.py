"""Decisions without a model: candidates that end in a given order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decodekit.core.candidates import Cancel, Candidate, Decision, Failed, Finished, Progress, Start
from decodekit.core.protocols import SequenceStrategy
from decodekit.core.random import Stream
from decodekit.core.types import Request


def request(seed: int = 0, **inputs: Any) -> Request:
    return Request(0, (5, 6), Stream(seed, 0, 0), inputs=inputs)


def candidate(
    number: int, text: str, logprobs: Sequence[float] = (-1.0,), confidences: Sequence[float] = ()
) -> Candidate:
    return Candidate(number, text, tuple(range(len(logprobs))), tuple(logprobs), "eos", tuple(confidences))


class Played:
    """What a strategy decided over candidates that say these texts, and what it did on the way.

    Args:
        strategy: decides.
        candidates: in the order of their ids; a text alone, or a whole candidate; ``None`` is one that fails.
        given: inputs of the request, and its seed.
    """

    def __init__(self, strategy: SequenceStrategy, candidates: Sequence[str | Candidate | None], **given: Any) -> None:
        known = [own if not isinstance(own, str) else candidate(number, own) for number, own in enumerate(candidates)]
        self.started: list[int] = []
        self.cancelled: set[int] = set()
        deciding, reply, events = strategy.decide(request(**given)), None, []
        while True:
            try:
                action = deciding.send(reply)
            except StopIteration as stop:
                self.decision: Decision = stop.value
                return
            if isinstance(action, Start):
                reply = [*range(len(self.started), len(self.started) + action.count)]
                self.started += reply
                longest = max((len(own.token_ids) for number in reply if (own := known[number])), default=0)
                for length in range(1, longest + 1):  # all grow in step, as in the loop
                    for number in reply:
                        events += _event(number, known[number], length, action.watch) if known[number] else []
                events += [Failed(number, "it broke") for number in reply if known[number] is None]
            elif isinstance(action, Cancel):
                self.cancelled.update(action.ids)
                events, reply = [event for event in events if _id(event) not in self.cancelled], None
            else:
                reply = events.pop(0)

    @property
    def ranking(self) -> list[int]:
        return list(self.decision.ranking)

    @property
    def report(self) -> Mapping[str, Any]:
        return self.decision.report


def _event(number: int, own: Candidate, length: int, watch: int | None) -> list[Finished | Progress]:
    if length == len(own.token_ids):
        return [Finished(own)]
    if watch is None or length > len(own.token_ids) or length % watch:
        return []
    parts = own.token_ids[:length], own.logprobs[:length], own.confidences[:length]
    return [Progress(number, own.text[:length], *parts)]


def _id(event: Any) -> int:
    return event.candidate.id if isinstance(event, Finished) else event.id
