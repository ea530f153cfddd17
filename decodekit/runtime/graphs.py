"""Plain steps from CUDA graphs: many in a row, while the host reads the tokens of a step during the next one.

Launched one by one, the operations of a step take the host ten times as long as the GPU. So two graphs are captured: the
forward of a number of rows, which is kept with the cache for later calls, and score, rules and pick, which are a call's own.
What a graph cannot hold (drafts, searches, rules that ask the device) is decoded step by step, see :mod:`.replays`.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from typing import Any

from decodekit.cache.allocator import OutOfBlocks
from decodekit.cache.fixed import bucket
from decodekit.cache.runs import Run, most_steps
from decodekit.core.constants import holding
from decodekit.core.constraint import mask_words
from decodekit.core.types import BranchOutputs, Outputs
from decodekit.kernels import triton_runs
from decodekit.runtime.capture import GraphStats, capture, hooked, look
from decodekit.runtime.captured import AHEAD, STEPS, Device, Pick
from decodekit.runtime.choosing import StepRecord
from decodekit.runtime.constraining import masks_of
from decodekit.runtime.forwards import forward_of
from decodekit.runtime.lane import Lane
from decodekit.runtime.paged_session import PagedSession
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.session import Session
from decodekit.runtime.tasks import Task

_LOG = logging.getLogger(__name__)
_EAGER = "steps are launched one by one: %s"


class Graphs:
    """Takes the steps of a lane's rows, as far as graphs can.

    Args:
        sessions: what runs the branches.
        lane: the requests.
        watched: what looks at every step on the host, if anything.
        lent: steps that a graph of more rows takes before one is captured for fewer.
    """

    def __init__(self, sessions: Sequence[Session], lane: Lane, *, watched: str | None = None, lent: int = 0) -> None:
        self._lent = lent
        self._sessions = [session for session in sessions if isinstance(session, PagedSession)]
        self._scorer, self._pipeline, self._chooser = lane.scorer, lane.pipeline, lane.chooser
        self._keep_logprobs = lane.chooser.keeps_logprobs
        self._picks: dict[Any, Pick] = {}
        # What the models of the current run were when it began.
        self._models: list[int] = []
        self.stats = GraphStats(eager=watched or self._why_not(sessions, lane))
        if self.stats.eager is not None and triton_runs(sessions[0].model.device):
            _LOG.info(_EAGER, self.stats.eager)

    def _why_not(self, sessions: Sequence[Session], lane: Lane) -> str | None:
        if lane.auditor is not None:
            return "an audit"
        if len(self._sessions) < len(sessions):
            return "a cache without blocks"
        for session in self._sessions:
            if (reason := session.why_no_run()) is not None:
                return reason
        if lane.plan.whole is not lane.plan.strategy:
            return f"strategy {lane.plan.whole.kind!r} decides between steps"
        return self._pipeline.why_not_captured()

    def takes(self, live: Sequence[tuple[Task, SequenceState]]) -> bool:
        """Whether the next steps of these rows can be taken here."""
        # Hooks may have been added since the last run.
        if self.stats.eager is None and any(hooked(session.model) for session in self._sessions):
            self.stats.eager = "forward hooks"
            _LOG.info(_EAGER, self.stats.eager)
        if self.stats.eager is not None or any(len(own.tokens) < max(1, len(own.given)) for _, own in live):
            return False
        return all(session.is_settled([own.row for _, own in live]) for session in self._sessions)

    def run(
        self, live: Sequence[tuple[Task, SequenceState]], most: int | None = None, at_once: int | None = None
    ) -> Generator[StepRecord, None, bool]:
        """Take steps of these rows until they have all ended, or so many that fewer rows would do.

        Args:
            live: the rows.
            most: steps; ``None``: any number.
            at_once: most steps whose blocks are taken together, at first and each time that the run is extended; ``STEPS``
                when left out.

        Returns:
            whether the rows go on here; otherwise their next step is one that graphs cannot take.
        """
        sequences = [sequence for _, sequence in live]
        before = [len(sequence.tokens) for sequence in sequences]
        at_once = STEPS if at_once is None else at_once
        runs = list[Run]()
        try:
            self._models = [look(session.model).number for session in self._sessions]
            total = self._left(sequences) if most is None else min(most, self._left(sequences))
            steps = self._next(sequences, 0, min(at_once, total))
            for session in self._sessions:
                runs.append(
                    session.begin_run([own.row for own in sequences], [own.tokens[-1] for own in sequences], steps)
                )
            device = self._device(runs, sequences)
            # A forward of more rows than are needed serves only until it is asked for again.
            return (yield from self._read(live, device, steps, steps if device.lent else total, at_once))
        except OutOfBlocks as error:
            self.stats.short += 1
            if self.stats.short == 1:
                _LOG.warning("a step is launched alone, as the blocks of many are not to be had: %s", error)
            return False
        except Exception as error:
            if any(len(own.tokens) > count for own, count in zip(sequences, before, strict=True)):
                raise
            # Captures end so where a model or rule waits for the device, or asks for what a graph does not know; a step that is
            # launched alone tells about everything else.
            self.stats.eager = f"it could not be captured: {str(error).splitlines()[0] if str(error) else error!r}"
            _LOG.warning(_EAGER, self.stats.eager)
            return False
        finally:
            # The last token of a row is not forwarded yet, those before it are.
            forwarded = {
                own.row: own.tokens[count - 1 : len(own.tokens) - 1]
                for own, count in zip(sequences, before, strict=True)
            }
            with ExitStack() as stack:
                taken = {own.row: own.tokens[count:] for own, count in zip(sequences, before, strict=True)}
                stack.callback(self._chooser.extend, taken)
                for session, run in zip(self._sessions, runs, strict=False):
                    stack.callback(session.end_run, run, forwarded)

    @staticmethod
    def _left(sequences: Sequence[SequenceState]) -> int:
        """How many steps a run has: the longest row's, unless one of them may not go that far."""
        left = max(own.limits.max_new_tokens - len(own.tokens) for own in sequences)
        contexts = [
            own.limits.context - len(own.request.prompt_ids) - len(own.tokens)
            for own in sequences
            if own.limits.context is not None
        ]
        return max(1, min([left, *contexts]))

    def _next(self, sequences: Sequence[SequenceState], planned: int, most: int) -> int:
        """How many of the next steps have one plan, after so many that were planned."""
        limits = [most]
        for session in self._sessions:
            lengths = [length + planned for length in session.lengths([own.row for own in sequences])]
            if (together := most_steps(lengths)) is not None:
                limits.append(together)
        return min(limits)

    def _extend(self, device: Device, live: Sequence[tuple[Task, SequenceState]], planned: int, most: int) -> int:
        """Plan more steps while the last of those before are still to be taken; how many: 0 where the run is to end."""
        sequences = [sequence for _, sequence in live]
        if any(sequence.finish_reason is not None for sequence in sequences):
            return 0
        if [look(session.model).number for session in self._sessions] != self._models:
            return 0
        # Blocks that slid out of a window are let go of when a run ends.
        windows = any(group.window is not None for session in self._sessions for group in session.cache.groups)
        if windows and planned >= STEPS:
            return 0
        steps = self._next(sequences, planned, most)
        try:
            return steps if device.extend(steps) else 0
        except OutOfBlocks:
            return 0

    def _device(self, runs: Sequence[Run], sequences: Sequence[SequenceState]) -> Device:
        """What the GPU does for these runs, captured, and its tensors filled."""
        most = max(len(own.request.prompt_ids) + own.limits.max_new_tokens for own in sequences)
        forwards = [
            forward_of(session, run, most + run.steps, self.stats, self._lent)
            for session, run in zip(self._sessions, runs, strict=True)
        ]
        names = [session.run_branches([own.row for own in sequences]) for session in self._sessions]
        # Rows that forwards are filled up with lie behind those of the last branch.
        alone = names == [("main",)]
        rows = forwards[0].frame.rows if alone else len(sequences)
        longest = most + STEPS
        # Without rules nobody looks at the tokens so far.
        width = 1 << (longest - 1).bit_length() if self._pipeline.steps else 0
        words = max((mask_words(own.constraint.width) for own in sequences if own.constraint is not None), default=0)

        def outputs() -> Outputs:
            parts: dict[str, BranchOutputs] = {}
            for forward, own in zip(forwards, names, strict=True):
                parts |= {name: forward.outputs.span(n * rows, (n + 1) * rows) for n, name in enumerate(own)}
            return Outputs(parts)

        for forward, run in zip(forwards, runs, strict=True):
            forward.load(run)
        key = (rows, width, words, *names, *forwards)
        if (pick := self._picks.get(key)) is None:
            kept = {own for session in self._sessions for held in session.cache.captured.values() for own in held}
            self._picks = {
                known: own for known, own in self._picks.items() if kept.issuperset(known[-len(self._sessions) :])
            }
            pick = Pick(
                self._scorer,
                self._pipeline,
                outputs,
                [forward.frame for forward in forwards],
                rows=rows,
                width=width,
                logprobs=self._keep_logprobs,
                words=words,
            )
            pick.load(sequences)
            if pick.captures:
                with holding(pick.constants):
                    pick.graph = capture(pick, self.stats)
            self.stats.pick_captures += 1
            self._picks[key] = pick
            for forward, run in zip(forwards, runs, strict=True):
                forward.load(run)  # the capture fed them tokens
        pick.load(sequences)
        return Device(forwards, pick)

    def _read(
        self, live: Sequence[tuple[Task, SequenceState]], device: Device, steps: int, total: int, at_once: int
    ) -> Generator[StepRecord, None, bool]:
        rows, constrained = len(live), any(own.constraint is not None for _, own in live)
        # States do not go back: nothing is launched that a row might not want.
        exact = any(session.keeps_states for session in self._sessions)
        ahead = 1 if exact else AHEAD
        for number in range(total):
            if number and number + ahead > steps and steps < total:
                # The device is busy with what was launched: it does not wait for the plan. Rows that are over are let go of
                # when a run ends.
                more = self._extend(device, live, steps, min(at_once, total - steps))
                steps, total = steps + more, total if more else steps
            if number == steps:
                break
            failures = dict[int, str]()
            if constrained:
                # What may come next is known once the last token is, and found out while that is forwarded.
                device.launch_forwards(number + 1)
                masks, failures = masks_of([own for _, own in live], self._chooser.confines)
                device.pick.constrain(masks)
                device.launch_pick()
                device.launch_forwards(min(number + ahead, steps))
            else:
                device.launch(min(number + ahead, steps))
            tokens, broken, logprobs = device.read(number)
            alive = [place for place, (_, sequence) in enumerate(live) if sequence.finish_reason is None]
            if any(broken[place] for place in alive if place not in failures):
                return False
            for task in dict.fromkeys(live[place][0] for place in alive):
                task.steps += 1
            self.stats.steps += 1
            chosen = [int(tokens[place]) for place in alive]
            record = self._chooser.accept(
                [live[place] for place in alive],
                chosen,
                [logprobs[place] for place in alive] if self._keep_logprobs else [],
                {at: failures[place] for at, place in enumerate(alive) if place in failures},
            )
            yield record
            left = sum(sequence.finish_reason is None for _, sequence in live)
            if not left or (left < rows and (exact or bucket(left, device.where) < bucket(rows, device.where))):
                break
        return True
