"""The decoding loop: requests in, one token a live row and step, until every row has ended.

A step is: rearrange rows, forward every branch, score, rules and pick, commit. Rows begin, fork and end on their own; a row
that fails ends alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.generation import StoppingCriteriaList

from decodekit.core.drafts import Draft
from decodekit.core.types import BranchOutputs, Outputs
from decodekit.runtime.auditing import Auditor
from decodekit.runtime.choosing import Chooser, StepRecord, select_positions
from decodekit.runtime.constraining import leaves_a_core
from decodekit.runtime.pipeline import Pipeline
from decodekit.runtime.plan import Plan
from decodekit.runtime.scoring import Scoring
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.session import Session
from decodekit.runtime.speculation import Fan, Speculation, Walk
from decodekit.runtime.tasks import PlainTask, SequenceTask, Task

Live = tuple[Task, SequenceState]


class Loop:
    """Decodes the prompts of one call.

    Args:
        sessions: what runs the branches, one a model; the first has the ``main`` branch.
        plan: the strategies.
        pipeline: rules and pick.
        tasks: [R] the prompts and their rows; those that have already failed are only carried along.
        input_ids: [R, T] the prompts as ``generate`` pads them, for those who want to see the rows so.
        pad: id that follows in rows that have ended.
        criteria: the caller's own stopping criteria.
        keep_logprobs: note each token's log-probability.
        keep_stages: record the logits after each rule.
        speculation: makes what drafts for the rows, if anything does.
        auditor: checks some of the steps, if any are to be.

    Attributes:
        chooser: from outputs to tokens.
        scorer: from outputs to scores.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        plan: Plan,
        pipeline: Pipeline,
        tasks: Sequence[Task],
        *,
        input_ids: Tensor,
        pad: int,
        criteria: StoppingCriteriaList | None = None,
        keep_logprobs: bool = False,
        keep_stages: bool = False,
        speculation: Callable[[Loop], Speculation] | None = None,
        auditor: Auditor | None = None,
    ) -> None:
        self.sessions, self.auditor = tuple(sessions), auditor
        self.tasks = tasks
        self.started = time.perf_counter()
        self.prefilled: float | None = None
        self.scorer = Scoring(plan, self.sessions)
        self.chooser = Chooser(
            plan,
            pipeline,
            tasks,
            input_ids=input_ids,
            pad=pad,
            prompt_hidden=lambda row: self.sessions[0].prompt_hidden.pop(row, {}),
            criteria=criteria,
            keep_logprobs=keep_logprobs,
            keep_stages=keep_stages,
            shows_rows=speculation is None and all(isinstance(task, PlainTask) for task in tasks),
        )
        self.pipeline = pipeline
        # Rows that the sessions hold.
        self._held: set[int] = set()
        self.speculation = self.chooser.speculation = speculation(self) if speculation is not None else None

    @property
    def live(self) -> list[Live]:
        """Sequences that wait for a token, with their tasks."""
        return [(task, sequence) for task in self.tasks for sequence in task.live]

    def run(self) -> Generator[StepRecord, None, None]:
        """Decode until every task is over, a record a token that each live sequence gets."""
        with ExitStack() as stack:
            for session in self.sessions:
                stack.callback(session.close)
            if self.speculation is not None:
                stack.callback(self.speculation.close)
            while live := self.live:
                records = self._step(live)
                if self.prefilled is None:
                    self.prefilled = time.perf_counter()
                    for session in self.sessions:
                        stack.enter_context(session.optimized())
                yield from records

    @torch.no_grad()
    def _step(self, live: Sequence[Live]) -> list[StepRecord]:
        """One forward, and all tokens that it gives."""
        self._rearrange()
        given = self._forward(live)
        scores = self.scorer(given.outputs)
        for task in dict.fromkeys(task for task, _ in given.live):
            task.steps += 1
        walks = [
            Walk(*own, base, draft) for own, base, draft in zip(given.live, given.bases, given.drafts, strict=True)
        ]
        records, going = list[StepRecord](), walks
        while going:
            places = [walk.place for walk in going]
            whole = places == list(range(len(scores)))
            at = given.outputs if whole else select_positions(given.outputs, *places)
            if self.auditor is not None:
                self.auditor.check([walk.sequence for walk in going], at)
            records.append(self.chooser.take(going, at, scores if whole else scores[places]))
            going = [walk for walk in going if walk.goes_on]
        self._settle(given, walks)
        return records

    def _rearrange(self) -> None:
        """Carry out what was decided since the last forward: forks, and rows that are over."""
        kept = {sequence.row for task in self.tasks for sequence in task.held}
        forks, gone = self.chooser.keep(kept), self._held - kept
        if forks or gone:
            for session in self.sessions:
                session.rearrange(forks, gone)
            if self.speculation is not None:
                self.speculation.rearrange(forks, gone)
        self._held = (self._held - gone) | forks.keys()

    def _forward(self, live: Sequence[Live]) -> _Given:
        """Forward what each live sequence has not forwarded yet, and drafts behind it."""
        stepping = [own for own in live if own[1].row in self._held and own[1].tokens]
        fresh = [own for own in live if own[1].row not in self._held]
        ready = [own for own in live if own[1].row in self._held and not own[1].tokens]
        given = _Given([*stepping, *fresh, *ready])
        parts: list[dict[str, BranchOutputs]] = []
        if stepping:
            parts.append(self._step_rows([sequence for _, sequence in stepping], given))
        if fresh:
            rows = [sequence.row for _, sequence in fresh]
            parts.append(_merged(session.prefill(rows) for session in self.sessions))
            self._held.update(rows)
            if self.speculation is not None:
                self.speculation.prefilled([sequence for _, sequence in fresh])
        for task, _ in ready:
            # A candidate's first token follows the prompt, which was forwarded for all of them.
            assert isinstance(task, SequenceTask)
            assert task.outputs is not None
            parts.append(dict(task.outputs))
        given.drafts += [Draft()] * (len(given.live) - len(given.drafts))
        given.outputs = Outputs(
            {
                name: parts[0][name] if len(parts) == 1 else BranchOutputs.concatenate([part[name] for part in parts])
                for name in parts[0]
            }
        )
        return given

    def _step_rows(self, sequences: Sequence[SequenceState], given: _Given) -> dict[str, BranchOutputs]:
        if self.speculation is None:
            fan = Fan([own.row for own in sequences], [[own.tokens[-1]] for own in sequences])
        else:
            given.drafts = self.speculation.propose(sequences)
            fan = given.fan = self.speculation.fan_out(sequences, given.drafts)
        if leaves_a_core(self.sessions[0].model.device):
            for sequence in sequences:
                if sequence.constraint is not None:
                    sequence.constraint.prefetch()
        started = time.perf_counter()
        outputs = _merged(session.step(fan.rows, fan.tokens, fan.last) for session in self.sessions)
        given.seconds = time.perf_counter() - started
        if fan.index == list(range(len(fan.index))):
            return outputs
        return dict(select_positions(Outputs(outputs), *fan.index))

    def _settle(self, given: _Given, walks: Sequence[Walk]) -> None:
        """Take back what was drafted and not accepted."""
        if self.speculation is None:
            return
        if given.fan is None:
            for session in self.sessions:
                session.rollback({})  # a prefill is final
            return
        own = walks[: len(given.fan.bases)]
        self.speculation.settle(own, given.fan, given.outputs["main"], given.seconds)


@dataclass
class _Given:
    """What a forward gave.

    Attributes:
        live: [P] tasks and their sequences, in the order of the outputs.
        drafts: [P] what was forwarded behind each.
        outputs: at each sequence, then after each node of its draft.
        fan: what was fed for drafts of the first sequences, ``None`` without.
        seconds: that this took.
    """

    live: list[Live]
    drafts: list[Draft] = field(default_factory=list)
    outputs: Outputs = field(default_factory=lambda: Outputs({}))
    fan: Fan | None = None
    seconds: float = 0.0

    @property
    def bases(self) -> list[int]:
        """[P] where the outputs of each sequence begin."""
        return [0, *itertools.accumulate(1 + len(draft) for draft in self.drafts)][:-1]


def _merged(parts: Iterable[dict[str, BranchOutputs]]) -> dict[str, BranchOutputs]:
    return {name: outputs for part in parts for name, outputs in part.items()}
