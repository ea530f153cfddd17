"""Plain steps from CUDA graphs: many in a row, while the host reads the tokens of a step during the next one.

Launched one by one, the operations of a step take the host ten times as long as the GPU. So two graphs are captured: the
forward of a number of rows, which is kept with the cache for later calls, and score, rules and pick, which are a call's own.
What a graph cannot hold (drafts, searches, rules that ask the device, recurrent states) is decoded step by step.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from typing import Any

from decodekit.cache.allocator import OutOfBlocks
from decodekit.cache.runs import Run, bucket, most_steps
from decodekit.core.errors import DecodekitError
from decodekit.core.types import Outputs
from decodekit.kernels import triton_runs
from decodekit.runtime.capture import GraphStats, capture, hooked
from decodekit.runtime.captured import AHEAD, STEPS, Device, Pick, forward_of
from decodekit.runtime.choosing import StepRecord
from decodekit.runtime.lane import Lane
from decodekit.runtime.paged_session import PagedSession
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.session import Session
from decodekit.runtime.tasks import PlainTask, Task

_LOG = logging.getLogger(__name__)
_EAGER = "steps are launched one by one: %s"


class Graphs:
    """Takes the steps of a call's rows, as far as graphs can.

    Args:
        sessions: what runs the branches.
        lane: the requests.
        watched: what looks at every step on the host, if anything.
    """

    def __init__(self, sessions: Sequence[Session], lane: Lane, *, watched: str | None) -> None:
        self._sessions = [session for session in sessions if isinstance(session, PagedSession)]
        self._scorer, self._pipeline, self._chooser = lane.scorer, lane.pipeline, lane.chooser
        self._keep_logprobs = lane.chooser.keeps_logprobs
        self._picks: dict[Any, Pick] = {}
        self.stats = GraphStats(eager=watched or self._why_not(sessions, lane))
        if self.stats.eager is not None and triton_runs(sessions[0].model.device):
            _LOG.info(_EAGER, self.stats.eager)

    def _why_not(self, sessions: Sequence[Session], lane: Lane) -> str | None:
        tasks = lane.tasks
        if lane.speculation is not None:
            return "drafts"
        if lane.auditor is not None:
            return "an audit"
        if len(self._sessions) < len(sessions):
            return "a cache without blocks"
        for session in self._sessions:
            if (reason := session.why_no_run()) is not None:
                return reason
        if other := next((task for task in tasks if not isinstance(task, PlainTask)), None):
            return f"a {type(other).__name__} decides between steps"
        if any(task.root.constraint is not None for task in tasks):
            return "a constraint"
        if any(task.root.given for task in tasks):
            return "tokens that were given"
        return self._pipeline.why_not_captured()

    def takes(self, live: Sequence[tuple[Task, SequenceState]]) -> bool:
        """Whether the next steps of these rows can be taken here."""
        # Hooks may be added between any two steps.
        if self.stats.eager is None and any(hooked(session.model) for session in self._sessions):
            self.stats.eager = "forward hooks"
            _LOG.info(_EAGER, self.stats.eager)
        return self.stats.eager is None and all(sequence.tokens for _, sequence in live)

    def run(self, live: Sequence[tuple[Task, SequenceState]]) -> Generator[StepRecord, None, bool]:
        """Take steps of these rows until they have all ended, or so many that fewer rows would do.

        Returns:
            whether the rows go on here; otherwise their next step is one that graphs cannot take.
        """
        sequences = [sequence for _, sequence in live]
        before = [len(sequence.tokens) for sequence in sequences]
        runs = list[Run]()
        try:
            steps = self._steps(sequences)
            for session in self._sessions:
                runs.append(
                    session.begin_run([own.row for own in sequences], [own.tokens[-1] for own in sequences], steps)
                )
            device = self._device(runs, sequences)
            return (yield from self._read(live, device, steps))
        except OutOfBlocks as error:
            self.stats.short += 1
            if self.stats.short == 1:
                _LOG.warning("a step is launched alone, as the blocks of many are not to be had: %s", error)
            return False
        except (RuntimeError, DecodekitError) as error:
            if any(len(own.tokens) > count for own, count in zip(sequences, before, strict=True)):
                raise
            # Captures end so where a model or rule waits for the device; eager steps tell about everything else.
            self.stats.eager = f"it could not be captured: {str(error).splitlines()[0] if str(error) else error!r}"
            _LOG.warning(_EAGER, self.stats.eager)
            return False
        finally:
            # The last token of a row is not forwarded yet, those before it are.
            forwarded = {
                own.row: own.tokens[count - 1 : len(own.tokens) - 1]
                for own, count in zip(sequences, before, strict=True)
            }
            for session, run in zip(self._sessions, runs, strict=False):
                session.end_run(run, forwarded)
            self._chooser.extend({own.row: own.tokens[count:] for own, count in zip(sequences, before, strict=True)})

    def _steps(self, sequences: Sequence[SequenceState]) -> int:
        """How many steps the next run has: the longest row's, unless one of them may not go that far."""
        left = max(own.limits.max_new_tokens - len(own.tokens) for own in sequences)
        contexts = [
            own.limits.context - len(own.request.prompt_ids) - len(own.tokens)
            for own in sequences
            if own.limits.context is not None
        ]
        limits = [STEPS, left, *contexts]
        for session in self._sessions:
            if (most := most_steps(session.lengths([own.row for own in sequences]))) is not None:
                limits.append(most)
        return max(1, min(limits))

    def _device(self, runs: Sequence[Run], sequences: Sequence[SequenceState]) -> Device:
        """What the GPU does for these runs, captured, and its tensors filled."""
        forwards = []
        for session, run in zip(self._sessions, runs, strict=True):
            most = max(
                len(own.request.prompt_ids) + own.limits.max_new_tokens - len(own.tokens) + run.steps
                for own in sequences
            )
            forwards.append(forward_of(session, run, most, self.stats))
        key = (tuple(own.row for own in sequences), *map(id, forwards))
        rows = [own.row for own in sequences]

        def outputs() -> Outputs:
            parts = [
                session.split_run(forward.outputs, rows)
                for session, forward in zip(self._sessions, forwards, strict=True)
            ]
            return Outputs({name: branch for part in parts for name, branch in part.items()})

        # Forwards are used again for other numbers of rows: a pick is captured for those of this run.
        for forward, run in zip(forwards, runs, strict=True):
            forward.load(run)
        if (pick := self._picks.get(key)) is None:
            pick = Pick(
                self._scorer,
                self._pipeline,
                outputs,
                [forward.frame for forward in forwards],
                sequences,
                logprobs=self._keep_logprobs,
            )
            pick.load(sequences)
            if pick.captures:
                pick.graph = capture(pick, self.stats)
            self.stats.pick_captures += 1
            self._picks[key] = pick
            for forward, run in zip(forwards, runs, strict=True):
                forward.load(run)  # the capture fed them tokens
        pick.load(sequences)
        return Device(forwards, pick)

    def _read(
        self, live: Sequence[tuple[Task, SequenceState]], device: Device, steps: int
    ) -> Generator[StepRecord, None, bool]:
        rows = len(live)
        for number in range(steps):
            while device.launched < min(number + AHEAD, steps):
                device.launch()
            tokens, broken, logprobs = device.read(number)
            alive = [place for place, (_, sequence) in enumerate(live) if sequence.finish_reason is None]
            if any(broken[place] for place in alive):
                return False
            for task in dict.fromkeys(live[place][0] for place in alive):
                task.steps += 1
            self.stats.steps += 1
            chosen = [int(tokens[place]) for place in alive]
            record = self._chooser.accept(
                [live[place] for place in alive],
                chosen,
                [logprobs[place] for place in alive] if self._keep_logprobs else [],
            )
            yield record
            left = sum(sequence.finish_reason is None for _, sequence in live)
            if not left or (left < rows and bucket(left, device.where) < bucket(rows, device.where)):
                break
        return True
