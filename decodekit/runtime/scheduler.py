"""Who is decoded in the next step: admission by blocks and rows, who goes first, and who is put aside when blocks run out.

A request is taken in when its prompt and a part of its promised tokens fit beside what those that run still need. One that
forks its rows, or whose prompt's hidden states are read, is never put aside: all of its promised tokens are kept free for it.
The others grow as long as there are blocks; when there are none, the last in line is put aside. Who has waited long enough
goes before all others, and nobody overtakes it: nothing starves.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from decodekit.core.errors import InputError
from decodekit.runtime.jobs import Job
from decodekit.runtime.paged_session import PagedSession

Policy = Literal["fcfs", "shortest_remaining", "deadline"]

AHEAD = 64
"""Most tokens that are forwarded ahead where a constraint leaves no choice."""


@dataclass(frozen=True)
class Rules:
    """What the scheduler goes by.

    Attributes:
        slots: most rows at once.
        tokens: most tokens to forward in a step: a token of each row first, then prompts.
        policy: who goes first: first come, fewest tokens to go, or earliest time limit.
        promise: part of the tokens a request may get that are kept free for it when it is taken in, 0 to 1. With 1 none is
            ever put aside for want of blocks, and fewer run at once.
        patience: steps in the queue after which a request goes before all others.
    """

    slots: int
    tokens: int
    policy: Policy
    promise: float
    patience: int

    def __post_init__(self) -> None:
        if self.slots < 1 or self.tokens < 1 or self.patience < 1:
            raise InputError(
                f"slots is {self.slots}, tokens_per_step {self.tokens} and patience {self.patience}; each is at least 1"
            )
        if not 0 <= self.promise <= 1:
            raise InputError(f"promise is {self.promise}; give the part of the promised tokens to keep free, 0 to 1")
        if self.policy not in ("fcfs", "shortest_remaining", "deadline"):
            raise InputError(f"policy is {self.policy!r}; give fcfs, shortest_remaining or deadline")


class Scheduler:
    """The queue, and those that run.

    Args:
        rules: what it goes by.
        sessions: what runs the branches, one a model.

    Attributes:
        waiting: the queue, in the order of submission.
        running: those that have been taken in.
        clock: steps so far.
    """

    def __init__(self, rules: Rules, sessions: Sequence[PagedSession]) -> None:
        self.rules, self._sessions = rules, sessions
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.clock = 0
        self._counted_at, self._counted = -1, dict[tuple[Job, int], list[tuple[int, int]]]()

    def queue(self, job: Job) -> None:
        """It waits, in the order in which requests were submitted."""
        job.since = self.clock
        bisect.insort(self.waiting, job, key=lambda own: own.order)

    def leave(self, job: Job) -> None:
        """It neither waits nor runs any more."""
        if job in self.running:
            self.running.remove(job)
            self._counted = {}
        elif job in self.waiting:
            job.waited += self.clock - job.since
            self.waiting.remove(job)

    def old(self, job: Job) -> bool:
        """Whether it has waited so long that it goes before others."""
        waiting = self.clock - job.since if job not in self.running else 0
        return job.waited + waiting >= self.rules.patience

    def check(self, job: Job) -> None:
        """Refuse what can never run.

        Raises:
            InputError: it needs more blocks or rows than there are.
        """
        if job.rows > self.rules.slots:
            raise InputError(
                f"request {job.id} takes up to {job.rows} rows at once; the engine has {self.rules.slots} slots"
            )
        for number, session in enumerate(self._sessions):
            for group, most in zip(session.cache.groups, self._most(job, number, 1.0), strict=True):
                if most > group.pool.num_blocks:
                    held = group.pool.num_blocks * group.pool.block_size
                    raise InputError(
                        f"request {job.id} never fits: its prompt of {job.prompt_tokens} and up to {job.max_new_tokens} new "
                        f"tokens ({job.rows} rows) take {most} blocks, the budget holds {group.pool.num_blocks} ({held} "
                        "tokens); raise budget, or ask for fewer tokens"
                    )

    def key(self, job: Job) -> tuple[float, ...]:
        """Who comes first has the lowest."""
        if self.rules.policy == "fcfs" or self.old(job):
            return (0, job.order)
        return (1, job.remaining if self.rules.policy == "shortest_remaining" else job.deadline, job.order)

    def next(self) -> list[Job]:
        """Those of the queue to try now, in order."""
        return [*self.waiting] if self.rules.policy == "fcfs" else sorted(self.waiting, key=self.key)

    def holds_back(self, job: Job) -> bool:
        """Whether nobody may overtake one that does not fit yet."""
        return self.rules.policy == "fcfs" or self.old(job)

    def fits(self, job: Job, but: Sequence[Job] = ()) -> bool:
        """Whether there is room for it beside what the others still need; without those of ``but``."""
        if sum(other.rows for other in self.running if other not in but) + job.rows > self.rules.slots:
            return False
        for number, session in enumerate(self._sessions):
            takes = self._takes(job, number)
            blocks = [(self._blocks(other, number), other in but) for other in self.running]
            for place, group in enumerate(session.cache.groups):
                needed = takes[place] - group.pool.free_blocks - group.pool.cached_blocks
                needed += sum(-own[place][0] if gone else own[place][1] for own, gone in blocks)
                if needed > 0:
                    return False
        return True

    def _blocks(self, job: Job, number: int) -> list[tuple[int, int]]:
        """Blocks of each group that one that runs holds, and may still need; counted once a step, before it is forwarded."""
        if self._counted_at != self.clock:
            self._counted_at, self._counted = self.clock, {}
        if (known := self._counted.get((job, number))) is None:
            held = self._sessions[number].blocks(job.held)
            most = self._most(job, number, self._promise(job))
            known = [(count, max(0, own - count)) for count, own in zip(held, most, strict=True)]
            self._counted[job, number] = known
        return known

    def displaced(self, job: Job) -> list[Job]:
        """Those that would have to be put aside for it, the last in line first; none where that does not help."""
        if self.rules.policy == "fcfs":
            return []
        later = [other for other in self.running if not other.fixed and self.key(other) > self.key(job)]
        later.sort(key=self.key, reverse=True)
        for count in range(1, len(later) + 1):
            if self.fits(job, later[:count]):
                return later[:count]
        return []

    def victim(self) -> Job | None:
        """The last in line of those that can be put aside; ``None`` where one runs alone."""
        able = [job for job in self.running if not job.fixed]
        return max(able, key=self.key) if able and len(self.running) > 1 else None

    def _promise(self, job: Job) -> float:
        return 1.0 if job.fixed else self.rules.promise

    def _takes(self, job: Job, number: int) -> list[int]:
        """Blocks of each group that it would take now, with its promised tokens."""
        cache, most = self._sessions[number].cache, self._most(job, number, 1.0)
        if job.rows > 1:
            return most
        takes = [0] * len(cache.groups)
        for asides in job.aside.values():
            # A model that came while it was aside holds nothing of it.
            for part in asides[number].parts.values() if number < len(asides) else ():
                # Another block, so that it is not put aside again at once.
                takes = [taken + 1 + len(own) for taken, own in zip(takes, part.contents, strict=True)]
        if not job.aside:
            left = max(1, self._new(job, self._promise(job)) - (job.produced - 1))
            for _, prompts in job.histories():
                for ids in prompts.get(number, {}).values():
                    takes = [taken + own for taken, own in zip(takes, cache.to_admit(ids, left), strict=True)]
        # Prefilled in chunks, a window holds fewer blocks than a whole prompt.
        return [min(own) for own in zip(takes, most, strict=True)]

    def _new(self, job: Job, promise: float) -> int:
        return max(min(job.produced + 1, job.max_new_tokens), math.ceil(promise * job.max_new_tokens))

    def _most(self, job: Job, number: int, promise: float) -> list[int]:
        """Most blocks of each group that it holds while its rows have so much of what they were promised."""
        cache, new, copies = self._sessions[number].cache, self._new(job, promise), job.work.plan.rows - 1
        most = []
        for group in cache.groups:
            size, total = group.pool.block_size, 0
            for prompts in job.prompts:
                for ids in prompts.get(number, {}).values():
                    own = -(-(len(ids) + new) // size)
                    if group.window is not None and cache.continues:
                        chunk = min(self.rules.tokens, len(ids) + new)
                        own = min(own, -(-(group.window + group.sinks + chunk) // size) + 1)
                    # Forks share the prompt, but for the block that they copy when they part.
                    total += own + copies * (-(-new // size) + 1)
            most.append(total)
        return most
