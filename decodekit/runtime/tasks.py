"""A task is one prompt's way to its outputs: one sequence, a group of hypotheses, or candidates that are decided between.

Tasks hold what a strategy of their kind needs between steps; the loop forwards, picks, commits and forks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from decodekit.core.candidates import (
    Cancel,
    Candidate,
    Deciding,
    Decision,
    Event,
    Failed,
    Finished,
    Progress,
    Start,
    Wait,
)
from decodekit.core.errors import DecodekitError, PluginError
from decodekit.core.protocols import SearchStrategy, SequenceStrategy
from decodekit.core.search import Advance, Group
from decodekit.core.types import FinishReason, Outputs
from decodekit.runtime.guard import guarded
from decodekit.runtime.sequence import SequenceState


@dataclass
class Result:
    """One output of a task.

    Attributes:
        sequence: its tokens and how they ended.
        score: what it was ranked by, if anything.
        candidates: what was chosen from, plain data.
        report: what the strategy tells about its decision.
        details: what only a trace carries of it.
    """

    sequence: SequenceState
    score: float | None = None
    candidates: list[dict[str, Any]] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


class Task(ABC):
    """One prompt's way to its outputs.

    Args:
        root: the sequence of the prompt; one that has failed is carried along.

    Attributes:
        rows: every row it ever had in the sessions.
        steps: of the loop in which it took part.
    """

    streams = False
    """Whether its tokens are final as they come."""

    def __init__(self, root: SequenceState) -> None:
        self.root = root
        self.rows = {root.row}
        self.steps = 0

    @property
    @abstractmethod
    def live(self) -> list[SequenceState]:
        """Sequences that wait for a token."""

    @property
    def held(self) -> list[SequenceState]:
        """Sequences whose cache is still needed."""
        return self.live

    @abstractmethod
    def results(self, count: int) -> list[Result]:
        """The best ``count`` outputs, the best first; a failed task gives failed ones."""

    def finish(self, reason: FinishReason = "cancelled") -> None:
        """End where it stands."""
        for sequence in self.live:
            sequence.finish(reason)

    def fail(self, why: str) -> None:
        """The prompt cannot be decoded."""
        self.finish()
        self.root.fail(why)

    def _failed(self, count: int, done: Sequence[Result]) -> list[Result]:
        """``done``, filled up with failures."""
        if len(done) < count and self.root.error is None:
            self.root.fail(f"{count} outputs were asked for and {len(done)} came out")
        return [*done, *[Result(self.root)] * (count - len(done))][:count]


class PlainTask(Task):
    """One sequence of a token-level strategy."""

    streams = True

    @property
    @override
    def live(self) -> list[SequenceState]:
        return [self.root] if self.root.finish_reason is None else []

    @override
    def results(self, count: int) -> list[Result]:
        return [Result(self.root)]


class SearchTask(Task):
    """The hypotheses of a search strategy.

    Args:
        root: the first hypothesis.
        strategy: decides which live on.

    Attributes:
        hypotheses: those that live.
        advance: what the strategy answered last.
    """

    def __init__(self, root: SequenceState, strategy: SearchStrategy) -> None:
        super().__init__(root)
        self.hypotheses = [root] if root.finish_reason is None else []
        self._strategy = strategy
        self.advance = Advance()
        self._ended: list[tuple[float, SequenceState]] = []

    @property
    @override
    def live(self) -> list[SequenceState]:
        return self.hypotheses

    def step(self, group: Group) -> Advance:
        """The strategy's answer, checked.

        Raises:
            PluginError: it failed, or names a row or token that there is not.
        """
        kind = self._strategy.kind
        with guarded(self._strategy, "step"):
            advance = self._strategy.step(group)
        rows, vocab = group.logits.shape
        wrong = [p for p in [*advance.parents, *(ended.parent for ended in advance.ended)] if not 0 <= p < rows]
        fed = [*advance.tokens, *(ended.token for ended in advance.ended if ended.token is not None)]
        if wrong or len(advance.parents) != len(advance.tokens) or any(not 0 <= token < vocab for token in fed):
            raise PluginError(
                f"strategy {kind!r} answered parents {list(advance.parents)} with tokens {list(advance.tokens)} and "
                f"{len(advance.ended)} ended; expected as many tokens as parents, rows below {rows}, ids below {vocab}"
            )
        if len(advance.parents) > self._strategy.width:
            raise PluginError(
                f"strategy {kind!r} keeps {len(advance.parents)} hypotheses; its width is {self._strategy.width}"
            )
        self.advance = advance
        return advance

    def end(self, sequence: SequenceState, score: float) -> None:
        """Note a hypothesis that is over."""
        self._ended.append((score, sequence))

    @override
    def fail(self, why: str) -> None:
        self.root.fail(why)
        self.hypotheses, self._ended = [], []

    @override
    def finish(self, reason: FinishReason = "cancelled") -> None:
        for sequence in self.hypotheses:
            sequence.finish(reason)
            self.end(sequence, sum(sequence.logprobs))
        self.hypotheses = []
        # Those that had ended are what was found so far, not what the search would have found.
        for _, sequence in self._ended:
            sequence.finish(reason)

    @override
    def results(self, count: int) -> list[Result]:
        ranked = sorted(self._ended, key=lambda item: -item[0])
        told = [describe(sequence, id=place, score=score) for place, (score, sequence) in enumerate(ranked)]
        done = [Result(sequence, score, candidates=told) for score, sequence in ranked]
        return self._failed(count, done)


class SequenceTask(Task):
    """The candidates of a sequence-level strategy.

    Args:
        root: the prompt, which candidates are forks of; it is never fed a token.
        strategy: starts, watches and chooses.

    Attributes:
        outputs: the root's own, from which every candidate's first token is chosen; ``None`` until it is prefilled.
        candidates: by id.
        starting: those that have no place in the cache yet.
    """

    def __init__(self, root: SequenceState, strategy: SequenceStrategy) -> None:
        super().__init__(root)
        self.outputs: Outputs | None = None
        self.candidates: list[SequenceState] = []
        self.starting: list[SequenceState] = []
        self._strategy = strategy
        self._running: Deciding | None = None
        self._waits = False
        self._events: deque[Event] = deque()
        self._watch: dict[int, int] = {}
        self._decision: Decision | None = None

    @property
    def done(self) -> bool:
        """Whether the decision is made, or cannot be."""
        return self._decision is not None or self.root.finish_reason is not None

    @property
    @override
    def live(self) -> list[SequenceState]:
        if self.done:
            return []
        if self.outputs is None:
            return [self.root]
        return [candidate for candidate in self.candidates if candidate.finish_reason is None]

    @property
    @override
    def held(self) -> list[SequenceState]:
        more = not self.done and len(self.candidates) < self._strategy.count
        return [*self.live, self.root] if more and self.outputs is not None else self.live

    def begin(self, outputs: Outputs) -> None:
        """The prompt is prefilled: start deciding."""
        self.outputs = outputs
        with guarded(self._strategy, "decide"):
            self._running = self._strategy.decide(self.root.request)
        self._advance(None)

    def grew(self, candidate: SequenceState) -> None:
        """A candidate has a token more, or has ended: tell the decision what it wants to know."""
        if self.done:
            return
        number = self.candidates.index(candidate)
        if candidate.error is not None:
            self._events.append(Failed(number, candidate.error))
        elif candidate.finish_reason is not None:
            self._events.append(Finished(self.candidate(number)))
        elif len(candidate.tokens) % self._watch.get(number, len(candidate.tokens) + 1) == 0:
            known = self.candidate(number)
            self._events.append(Progress(number, known.text, known.token_ids, known.logprobs, known.confidences))
        if self._waits and self._events:
            self._waits = False
            self._advance(self._events.popleft())

    def candidate(self, number: int) -> Candidate:
        """A candidate as strategies, scorers and utilities see it."""
        sequence = self.candidates[number]
        return Candidate(
            id=number,
            text=sequence.text,
            token_ids=tuple(sequence.tokens),
            logprobs=tuple(sequence.raw_logprobs),
            finish_reason=sequence.finish_reason or "cancelled",
            confidences=tuple(sequence.confidences),
        )

    def _advance(self, reply: Any) -> None:
        """Run the decision until it waits for what has not happened yet, or is over."""
        assert self._running is not None
        try:
            with guarded(self._strategy, "decide"):
                while not self._waits:
                    try:
                        action = self._running.send(reply)
                    except StopIteration as stop:
                        self._decision = self._checked(stop.value)
                        break
                    reply = self._answer(action)
        except DecodekitError as error:  # one prompt's decision fails alone
            self.root.fail(str(error))
        if self.done:
            self._running.close()
            self._cancel(range(len(self.candidates)))

    def _answer(self, action: Any) -> Any:
        """Do what the decision asks for; what it is resumed with."""
        if isinstance(action, Start):
            return self._start(action)
        if isinstance(action, Cancel):
            known = len(self.candidates)
            if wrong := [number for number in action.ids if not 0 <= number < known]:
                raise PluginError(f"{self._strategy.kind!r} cancels candidate {wrong[0]}; it has started {known}")
            return self._cancel(action.ids)
        if not isinstance(action, Wait):
            raise PluginError(f"{self._strategy.kind!r} yielded {action!r}; expected Start, Cancel or Wait")
        if self._events:
            return self._events.popleft()
        if not self.live:
            raise PluginError(f"{self._strategy.kind!r} waits, but none of its candidates is running")
        self._waits = True
        return None

    def _start(self, action: Start) -> list[int]:
        first, count = len(self.candidates), self._strategy.count
        if action.count < 1 or first + action.count > count:
            raise PluginError(
                f"{self._strategy.kind!r} starts {action.count} candidates after {first}; its count is {count}"
            )
        numbers = list(range(first, first + action.count))
        for number in numbers:
            stream = self.root.request.stream
            # Copies of one prompt in a call are numbered too: each has samples of its own.
            stream = stream._replace(sample=stream.sample * count + number)
            candidate = self.root.fork(row=-1, request=replace(self.root.request, stream=stream))
            self.candidates.append(candidate)
            self.starting.append(candidate)
            if action.watch is not None:
                self._watch[number] = action.watch
        return numbers

    def _cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self.candidates[number].finish_reason is None:
                self.candidates[number].finish("cancelled")

    def _checked(self, decision: Any) -> Decision:
        known = range(len(self.candidates))
        if not isinstance(decision, Decision) or not decision.ranking or not set(decision.ranking) <= set(known):
            raise PluginError(
                f"{self._strategy.kind!r} returned {decision!r}; expected a Decision that ranks some of {len(known)} candidates"
            )
        return decision

    @override
    def finish(self, reason: FinishReason = "cancelled") -> None:
        super().finish(reason)
        if self._running is not None:
            self._running.close()
        if self.root.finish_reason is None:
            self.root.finish(reason)

    @override
    def results(self, count: int) -> list[Result]:
        decision = self._decision
        if decision is None:
            return self._failed(count, [Result(self.root, candidates=self._told(Decision(())))])
        with guarded(self._strategy, "decide"):
            done = self._ranked(decision)
        return self._failed(count, [result for result in done if result.sequence.error is None])

    def _ranked(self, decision: Decision) -> list[Result]:
        told = self._told(decision)
        rest = (number for number in range(len(self.candidates)) if number not in decision.ranking)
        order = [*dict.fromkeys(decision.ranking), *rest]
        scores, report, details = decision.scores, dict(decision.report), dict(decision.details)
        details |= {"rows": [candidate.row for candidate in self.candidates], "ranking": order}
        return [Result(self.candidates[number], scores.get(number), told, report, details) for number in order]

    def _told(self, decision: Decision) -> list[dict[str, Any]]:
        scores, notes = decision.scores, decision.notes
        return [
            describe(candidate, id=number, score=scores.get(number), **notes.get(number, {}))
            for number, candidate in enumerate(self.candidates)
        ]


def describe(sequence: SequenceState, **more: Any) -> dict[str, Any]:
    """A candidate as plain data for ``Output.candidates``; ``mean_logprob`` is a token's under the model's own logits."""
    raw = sequence.raw_logprobs
    return {
        "text": sequence.text,
        "token_ids": [*sequence.tokens],
        "finish_reason": sequence.finish_reason,
        "logprob": sum(sequence.logprobs),
        **({"mean_logprob": sum(raw) / len(raw)} if raw else {}),
        **({"error": sequence.error} if sequence.error is not None else {}),
        **more,
    }
