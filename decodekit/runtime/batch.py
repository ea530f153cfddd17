"""All requests that are decoded now: their lanes and sessions, and the steps of the loop that they share."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from typing_extensions import override

from decodekit.core import compat
from decodekit.core.errors import InputError, Refused
from decodekit.recipe import PagedSpec
from decodekit.runtime.branches import branches_of, other_model
from decodekit.runtime.caches import shared_blocks, shared_cache
from decodekit.runtime.choosing import StepRecord
from decodekit.runtime.intake import Intake, renumbered
from decodekit.runtime.jobs import Job, Prompts
from decodekit.runtime.lane import Lane, Turn
from decodekit.runtime.lanes import Lanes
from decodekit.runtime.loop import Loop
from decodekit.runtime.paged_session import PagedSession
from decodekit.runtime.scheduler import AHEAD, Rules, Scheduler
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.work import Work

_LOG = logging.getLogger(__name__)

_STRETCH = 32
"""Most steps that are begun at once: blocks for all their tokens are taken, which others might use meanwhile. Whoever waits is
tried again when they are over."""


class _SharedLoop(Loop):
    """The loop, where what fails for all requests of a lane is tried for each alone."""

    @override
    def choose(self, turn: Turn) -> list[StepRecord]:
        return turn.choose(confined=True)


class Batch:
    """The requests of an engine.

    Args:
        intake: reads what is submitted.
        rules: what the scheduler goes by.
        budget: most bytes of K/V and states.
        prefix_cache: let prompts reuse the blocks of earlier ones.
        offload: put requests aside on the host instead of computing them again.

    Attributes:
        sessions: what runs the branches, one a model.
        scheduler: who is decoded.
        ended: requests that are over by their id, the last at the end; whoever takes them removes them.
    """

    def __init__(
        self,
        intake: Intake,
        rules: Rules,
        *,
        budget: int | str | None,
        prefix_cache: bool,
        offload: bool,
    ) -> None:
        spec = intake.recipe.cache
        if not isinstance(spec, PagedSpec):
            raise Refused("an engine keeps K/V in blocks; leave cache out of its recipe, or say cache: paged")
        self._intake, self._spec, self._offload = intake, spec, offload
        self._prefix_cache, self._rules = prefix_cache, rules
        models = [own[0] if isinstance(own, tuple) else own for own in (intake.model, *intake.models.values())]
        self._blocks = shared_blocks(models, spec, budget if budget is not None else spec.budget, rules.slots)
        self._models = ["main"]
        self.sessions = [self._session(intake.model)]
        self.loop = _SharedLoop(self.sessions, [])
        self.scheduler = Scheduler(rules, self.sessions)
        self._rows = itertools.count()
        self._lanes = Lanes(intake, self.sessions, self._rows.__next__, self._blocks * spec.block_size)
        self._counts = {"steps": 0, "tokens": 0, "preemptions": 0, "step_s": 0.0}
        self._spare = 0
        # Many steps of those that run, of which each step of the batch takes one; whatever changes who runs ends them.
        self._stretch: Generator[StepRecord, None, bool] | None = None
        self.ended: dict[str, Job] = {}
        # Those with a time limit.
        self._timed: list[Job] = []

    @property
    def tokens(self) -> int:
        """Tokens chosen so far."""
        return int(self._counts["tokens"])

    @property
    def busy(self) -> bool:
        """Whether any request is not over."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def lacks(self, work: Work) -> list[str]:
        """Models that branches of this request run on and that have no session yet."""
        return [name for name in work.plan.strategy.models() if name not in self._models]

    def add_models(self, names: Sequence[str], work: Work) -> None:
        """Let these models run branches, too.

        Raises:
            InputError: there is no such model.
            Refused: it has another vocabulary.
        """
        self._end_stretch()
        for name in names:
            if name not in self._models:
                session = self._session(self._model_of(name, work))
                self._models.append(name)
                self.sessions.append(session)
                self.loop.sessions.append(session)
        self._lanes.renew_graphs()

    def rows(self, work: Work) -> tuple[list[SequenceState], list[Prompts]]:
        """The rows of a request, under numbers of their own, and the prompts of their branches by session.

        Raises:
            InputError: it cannot have its branches.
        """
        templates, prompts = list[SequenceState](), list[Prompts]()
        for sequence in work.sequences:
            template = renumbered(sequence, next(self._rows))
            own = branches_of(
                work.plan.strategy, template, lambda branch: compat.context_length(self._model_of(branch.model, work))
            )
            if template.error is not None:
                raise InputError(template.error)
            by_session: dict[int, dict[str, tuple[int, ...]]] = {}
            for name, branch in own.items():
                by_session.setdefault(self._models.index(branch.model), {})[name] = branch.prompt_ids
            templates.append(template)
            prompts.append(by_session)
        work.sequences = templates
        return templates, prompts

    def add(self, job: Job) -> None:
        """Queue a request."""
        self._end_stretch()
        self._enter(job)
        self.scheduler.queue(job)
        if job.deadline < math.inf:
            self._timed.append(job)

    def cancel(self, job: Job) -> None:
        """End a request where it stands; its blocks are free at once."""
        self._end_stretch()
        for task in job.tasks:
            task.finish()
        self._end(job)
        self.loop.rearrange()

    def step(self) -> None:
        """Take in who fits, put aside whom there are no blocks for, and decode a step."""
        started = time.perf_counter()
        self.scheduler.clock += 1
        try:
            self._expire(started)
            if (records := self._go_on()) is None:
                crowded = self._make_room()
                if not crowded:
                    self._admit()
                    self._make_room()
                records = self._begin_stretch() if self.scheduler.running else []
            if records is None:
                records = self._forward()
            if self.scheduler.running:
                self._counts["steps"] += 1
                self._counts["tokens"] += sum(sum(record.taken) for record in records)
            self._collect()
        except Exception as error:
            _LOG.exception("a step of the engine failed")
            self._recover(f"a step failed: {type(error).__name__}: {error}")
        except BaseException:
            self._recover(None)
            raise
        self._counts["step_s"] += time.perf_counter() - started

    def stats(self) -> dict[str, Any]:
        """Counts so far, who waits and runs, the figures of each model's cache, and what graphs did.

        ``graphs`` for the runs of each lane, ``replays`` for the steps of each model that were not part of one.
        """
        caches = {name: session.cache.stats() for name, session in zip(self._models, self.sessions, strict=True)}
        queue = {"waiting": len(self.scheduler.waiting), "running": len(self.scheduler.running)}
        graphs = [asdict(self._lanes.graphs(lane).stats) for lane in self._lanes.all]
        replays = {name: asdict(own.replayed) for name, own in zip(self._models, self.sessions, strict=True)}
        return {
            **self._counts,
            **queue,
            "num_blocks": self._blocks,
            "caches": caches,
            "graphs": graphs,
            "replays": replays,
        }

    def close(self) -> None:
        """Give back what the lanes and sessions hold."""
        self._end_stretch()
        for session in self.sessions:
            session.clear()
            session.cache.forget_captured()
        self._lanes.clear()
        self.loop.lanes, self.loop.known, self.loop.held = [], set(), set()

    def _prepare(self) -> None:
        """Let the sessions keep what the next forward is to give."""
        layers = tuple(dict.fromkeys(layer for lane in self.loop.lanes if lane.tasks for layer in lane.layers))
        if layers != self.sessions[0].layers:
            self.sessions[0].keep_layers(layers)
        for session in self.sessions:
            session.record(self.loop.speculates)

    def _forward(self) -> list[StepRecord]:
        self._prepare()
        with ExitStack() as stack:
            for session in self.sessions:
                stack.enter_context(session.optimized())
            return self.loop.step(self._budget(), self._room)

    def _begin_stretch(self) -> list[StepRecord] | None:
        """Begin many steps of all that run, where graphs take them, with the first; ``None``: a step is launched alone."""
        lanes = [lane for lane in self.loop.lanes if lane.tasks]
        live = self.loop.live
        if len(lanes) != 1 or not live or any(own.row not in self.loop.held for _, own in live):
            return None
        [lane] = lanes
        # A row may begin a block with its first token, and copy the one that it shares.
        places = sum(len(session.branches(own.row)) for session in self.sessions for _, own in live)
        at_once = min(_STRETCH, (self._spare // places - 1) * self._spec.block_size)
        if at_once < 1:
            return None
        self._prepare()
        graphs = self._lanes.graphs(lane)
        if not graphs.takes(live):
            return None
        self._stretch = graphs.run(live, at_once if self.scheduler.waiting else None, at_once)
        # Only what is captured needs the model at its fastest, and that is done before the first of them.
        with ExitStack() as stack:
            for session in self.sessions:
                stack.enter_context(session.optimized())
            return self._go_on()

    def _go_on(self) -> list[StepRecord] | None:
        """The next step of those that were begun; ``None`` where none is left."""
        if self._stretch is None:
            return None
        if (record := next(self._stretch, None)) is None:
            self._stretch = None
            return None
        if any(sequence.finish_reason is not None for sequence in record.sequences):
            self._end_stretch()  # rows that are over are let go of before the next step
        return [record]

    def _end_stretch(self) -> None:
        """Give up the steps that were begun and not taken."""
        stretch, self._stretch = self._stretch, None
        if stretch is not None:
            stretch.close()

    def _budget(self) -> int:
        """Tokens of prompts in this step: what the decoding rows leave, and a block at least, so that nobody waits for ever."""
        decoding = sum(sequence.row in self.loop.held for job in self.scheduler.running for sequence in job.live)
        return max(self._rules.tokens - decoding, self._spec.block_size)

    def _room(self, lane: Lane, sequence: SequenceState) -> int:
        """Tokens that may be drafted for a sequence: none where blocks are short."""
        most = lane.plan.drafted
        tokens = most or AHEAD
        cost = (-(-tokens // self._spec.block_size) + 1 + 2 * most) * len(self.sessions[0].branches(sequence.row))
        if cost > self._spare:
            return 0
        self._spare -= cost
        return tokens

    def _expire(self, now: float) -> None:
        for job in self._timed:
            if now >= job.deadline and job.outputs is None:
                self._end_stretch()
                for task in job.tasks:
                    task.finish("time")
                self._end(job)
        self._timed = [job for job in self._timed if job.outputs is None]

    def _make_room(self) -> bool:
        """Put requests aside until those that run have blocks for a step; whether any was."""
        crowded = False
        while True:
            self.loop.rearrange()
            stepping = [own.row for job in self.scheduler.running for own in job.live if own.row in self.loop.held]
            feeding = sorted(
                own.row for job in self.scheduler.running for own in job.live if own.row not in self.loop.held
            )
            budget = self._budget()
            missing = max(session.missing(stepping, feeding, budget) for session in self.sessions)
            self._spare = -missing
            if missing <= 0 or (victim := self.scheduler.victim()) is None:
                return crowded
            self._put_aside(victim)
            crowded = True

    def _admit(self) -> None:
        for job in self.scheduler.next():
            if self.scheduler.fits(job):
                self._take_in(job)
                continue
            for other in self.scheduler.displaced(job):
                self._put_aside(other)
            self.loop.rearrange()
            if self.scheduler.fits(job):
                self._take_in(job)
            elif self.scheduler.holds_back(job):
                break

    def _take_in(self, job: Job) -> None:
        assert job.lane is not None
        self.scheduler.leave(job)
        self.scheduler.running.append(job)
        job.admitted = job.admitted or time.perf_counter()
        job.lane.tasks += job.tasks
        for task in job.tasks:
            if task.root.tokens:
                job.lane.chooser.again(task.root)
            else:
                job.lane.chooser.add(task)
        if job.aside and self._resume(job):
            return
        histories = job.histories()
        for number, session in enumerate(self.sessions):
            for row, prompts in histories:
                if number in prompts:
                    session.expect(row, prompts[number], keep_prompt=number == 0 and job.work.plan.reads_prompt)
            session.open([row for row, _ in histories])
        self.loop.known.update(row for row, _ in histories)

    def _resume(self, job: Job) -> bool:
        """Bring back what was put aside; where there is no room for all of it, it is given up, to be computed again."""
        asides, job.aside = job.aside, {}
        for row, own in asides.items():
            # A model that came while it was aside holds nothing of it.
            if not all(session.resume(row, aside) for session, aside in zip(self.sessions, own, strict=False)):
                for session in self.sessions:
                    session.rearrange({}, asides)
                return False
        self.loop.known |= asides.keys()
        self.loop.held |= asides.keys()
        return True

    def _put_aside(self, job: Job) -> None:
        assert job.lane is not None
        job.blocks = max(job.blocks, self._held(job))
        job.preempted += 1
        self._counts["preemptions"] += 1
        self.scheduler.leave(job)
        self.scheduler.queue(job)
        job.lane.tasks = [task for task in job.lane.tasks if task not in job.tasks]
        if self._offload and all(own.row in self.loop.held and own.tokens for own in job.live):
            for row in job.held:
                job.aside[row] = [session.suspend(row) for session in self.sessions]
                self.loop.known.discard(row)
                self.loop.held.discard(row)

    def _collect(self) -> None:
        for job in [*self.scheduler.running]:
            if not job.live:
                self._end(job)
        self.loop.rearrange()

    def _end(self, job: Job) -> None:
        """A request is over: count, make its outputs, leave its lane."""
        assert job.lane is not None
        job.blocks = max(job.blocks, self._held(job))
        lane, counted = job.lane, []
        for task in job.tasks:
            own: dict[str, Any] = {}
            if lane.speculation is not None:
                own |= lane.speculation.stats(sorted(task.rows))
                lane.speculation.forget(task.rows)
            own["forwarded_tokens"] = sum(
                session.forwarded.pop(row, 0) for session in self.sessions for row in task.rows
            )
            if lane.auditor is not None:
                own["audit"] = lane.auditor.certificate(task.root.request.id)
                lane.auditor.forget(task.root.request.id)
            paths = sorted({path for session in self.sessions for path in session.cache.paths})
            counted.append(own | {"path": ", ".join(paths) or "torch"})
        job.finish(counted)
        self.ended[job.id] = job
        job.aside = {}
        lane.tasks = [task for task in lane.tasks if task not in job.tasks]
        self._lanes.leave(lane, [template.row for template in job.templates])
        self.scheduler.leave(job)

    def _held(self, job: Job) -> int:
        rows = sorted({row for task in job.tasks for row in task.rows})
        return sum(sum(session.blocks(rows)) for session in self.sessions)

    def _recover(self, why: str | None) -> None:
        """Begin anew after a step that did not end: those that ran have failed, or (without ``why``) start again."""
        try:
            self._end_stretch()
        except Exception:
            _LOG.exception("steps that were begun could not be ended")
        # Where nobody runs, who comes first could not be taken in: tried again and again, it would hold up all others.
        first = [] if why is None else self.scheduler.waiting[:1]
        for job in [*self.scheduler.running] or first:
            if why is not None:
                for task in job.tasks:
                    task.fail(why)
                self._end(job)
                continue
            self.scheduler.leave(job)
            job.restart()
            self.scheduler.queue(job)
        self.close()
        for job in self.scheduler.waiting:
            self._enter(job)

    def _enter(self, job: Job) -> None:
        job.lane = self._lanes.enter(job.work)
        self.loop.lanes = self._lanes.all

    def _model_of(self, name: str, work: Work) -> Any:
        if name == "main":
            return self._intake.model
        return other_model(self._intake.model, name, work.plan.strategy, self._intake.models)

    def _session(self, model: Any) -> PagedSession:
        cache = shared_cache(model, self._spec, self._blocks, prefix_cache=self._prefix_cache)
        return PagedSession(model, cache)
