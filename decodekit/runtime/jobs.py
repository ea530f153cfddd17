"""A request inside the engine: its rows, what it holds, and how far it is."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from decodekit.core.errors import reason
from decodekit.core.types import Output
from decodekit.runtime.call import task_of
from decodekit.runtime.lane import Lane
from decodekit.runtime.paged_session import Aside
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.session import Ids
from decodekit.runtime.tasks import Result, Task
from decodekit.runtime.work import Work

Prompts = Mapping[int, Mapping[str, Ids]]
"""The number of a session: the prompts of the branches that it runs."""


@dataclass(eq=False)
class Job:
    """A request inside the engine.

    Attributes:
        id: the request's.
        order: how many were submitted before it.
        work: what is asked for.
        templates: its rows before anything was decoded.
        prompts: of each of these.
        submitted: ``time.perf_counter`` seconds.
        lane: where it is decoded, while it is.
        tasks: its rows on their way.
        since: the step in which it was queued.
        waited: steps that it had spent in the queue before.
        aside: a row's K/V and states by session, while it is put aside.
        admitted: when it was first taken in.
        preempted: how often it was put aside.
        blocks: most blocks that it was seen to hold.
        sent: characters of its text that were given out.
        outputs: what became of it, once it is over.
        deadline: ``time.perf_counter`` seconds after which no further token is started.
    """

    id: str
    order: int
    work: Work
    templates: list[SequenceState]
    prompts: list[Prompts]
    submitted: float
    lane: Lane | None = None
    tasks: list[Task] = field(default_factory=list)
    since: int = 0
    waited: int = 0
    aside: dict[int, list[Aside]] = field(default_factory=dict)
    admitted: float | None = None
    preempted: int = 0
    blocks: int = 0
    sent: int = 0
    outputs: list[Output] | None = None
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        limits = [own.limits.deadline for own in self.templates if own.limits.deadline is not None]
        self.deadline = min(limits, default=math.inf)
        self.restart()

    def restart(self) -> None:
        """Forget all that was decoded."""
        self.aside = {}
        self.tasks = [task_of(template.fork(template.row), self.work.plan) for template in self.templates]

    @property
    def rows(self) -> int:
        """Most rows that it has at once."""
        return len(self.templates) * self.work.plan.rows

    @property
    def fixed(self) -> bool:
        """Whether it is never put aside: rows that share blocks, or hidden states of a prompt, do not come back so."""
        return self.rows > 1 or self.work.plan.reads_prompt

    @property
    def live(self) -> list[SequenceState]:
        """Its sequences that wait for a token."""
        return [sequence for task in self.tasks for sequence in task.live]

    @property
    def held(self) -> list[int]:
        """Rows whose cache it still needs."""
        return [sequence.row for task in self.tasks for sequence in task.held]

    @property
    def prompt_tokens(self) -> int:
        """Of its longest row."""
        return max(len(template.request.prompt_ids) for template in self.templates)

    @property
    def max_new_tokens(self) -> int:
        """Most tokens that a row may get."""
        room = []
        for template in self.templates:
            limits, prompt = template.limits, len(template.request.prompt_ids)
            room.append(min(limits.max_new_tokens, (limits.context or prompt + limits.max_new_tokens) - prompt))
        return max(room)

    @property
    def produced(self) -> int:
        """Tokens that its longest row has got."""
        return max((len(sequence.tokens) for sequence in self.live), default=0)

    @property
    def remaining(self) -> int:
        """Tokens that its longest row may still get."""
        return self.max_new_tokens - self.produced

    def histories(self) -> list[tuple[int, Prompts]]:
        """Each row that is to be fed: what its branches begin with, all but its last token."""
        fed = list[tuple[int, Prompts]]()
        for task, prompts in zip(self.tasks, self.prompts, strict=True):
            more = task.root.tokens[:-1]
            longer = {
                session: {name: (*ids, *more) for name, ids in branches.items()}
                for session, branches in prompts.items()
            }
            fed.append((task.root.row, longer))
        return fed

    def piece(self) -> str | None:
        """Text that became certain since it was asked for last; ``""`` where it is over and nothing is left."""
        if self.outputs is not None:
            text = self.outputs[0].text
        elif len(self.tasks) == 1 and self.tasks[0].streams and (tracker := self.tasks[0].root.tracker) is not None:
            text = tracker.certain
        else:
            return None
        new, self.sent = text[self.sent :], max(self.sent, len(text))
        return new or (None if self.outputs is None else "")

    def finish(self, stats: Sequence[Mapping[str, Any]]) -> None:
        """It is over: make its outputs.

        Args:
            stats: of each task, what the sessions counted.
        """
        outputs = list[Output]()
        for task, counted in zip(self.tasks, stats, strict=True):
            try:
                outputs += [self._output(task, result, counted) for result in task.results(self.work.outputs)]
            except Exception as error:  # of a strategy or constraint: nobody else's requests end for it
                why = f"request {self.id}: its output cannot be made: {reason(error)}"
                failed = Output("", [*task.root.tokens], "error", stats={**counted}, error=why)
                outputs += [failed] * self.work.outputs
        self.outputs = outputs

    def _output(self, task: Task, result: Result, counted: Mapping[str, Any]) -> Output:
        sequence = result.sequence
        return Output(
            text=sequence.text,
            token_ids=sequence.tokens,
            finish_reason=sequence.finish_reason or "cancelled",
            logprobs=sequence.logprobs,
            candidates=result.candidates,
            stats={**self._stats(task, sequence), **counted, **result.report},
            error=None if sequence.error is None else f"request {self.id}: {sequence.error}",
        )

    def _stats(self, task: Task, sequence: SequenceState) -> dict[str, Any]:
        now = time.perf_counter()
        stats: dict[str, Any] = {
            "prompt_tokens": len(sequence.request.prompt_ids),
            "target_forwards": task.steps,
            "draft_tokens": 0,
            "accepted_tokens": 0,
            "queue_s": (self.admitted or now) - self.submitted,
            "preemptions": self.preempted,
            "kv_blocks": self.blocks,
        }
        if sequence.constraint is not None:
            stats["constraint"] = sequence.constraint.report(sequence.text)
        if times := sequence.times:
            stats |= {
                "ttft_s": times[0] - self.submitted,
                "decode_s": times[-1] - times[0],
                "tokens_per_s": len(times) / max(times[-1] - self.submitted, 1e-9),
            }
        if len(times) > 1:
            gaps = np.diff(np.asarray(times))
            stats |= {"itl_p50_s": float(np.percentile(gaps, 50)), "itl_p95_s": float(np.percentile(gaps, 95))}
        return stats
