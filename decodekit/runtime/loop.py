"""The decoding loop: requests in, one token a live row and step, until every row has ended.

A step is: rearrange rows, forward every branch of every lane together, then for each lane score, rules and pick, commit. Rows
begin, fork and end on their own; a row that fails ends alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing

import torch

from decodekit.runtime.captured import AHEAD
from decodekit.runtime.choosing import StepRecord
from decodekit.runtime.constraining import leaves_a_core
from decodekit.runtime.graphs import Graphs
from decodekit.runtime.lane import Lane, Live, Parts, Room, Turn, merged
from decodekit.runtime.session import Session
from decodekit.runtime.speculation import Settled


class Loop:
    """Decodes the requests of all lanes.

    Args:
        sessions: what runs the branches, one a model; the first has the ``main`` branch.
        lanes: the requests, those of one recipe together.

    Attributes:
        graphs: take the steps that need nothing from the host, if there are any.
        forwards: so far, each of all live rows; those of graphs are not counted.
    """

    def __init__(self, sessions: Sequence[Session], lanes: Sequence[Lane]) -> None:
        self.graphs: Graphs | None = None
        self.sessions, self.lanes = list(sessions), list(lanes)
        self.started = time.perf_counter()
        self.prefilled: float | None = None
        self.forwards = 0
        # Rows that the sessions know of, and those of them whose prompts are through.
        self.known: set[int] = set()
        self.held: set[int] = set()
        # When the next step was decided on, where that was before it.
        self._since: float | None = None

    @property
    def live(self) -> list[Live]:
        """Sequences that wait for a token, with their tasks."""
        return [own for lane in self.lanes for own in lane.live]

    @property
    def speculates(self) -> bool:
        """Whether tokens are forwarded that may have to be taken back."""
        return any(lane.speculation is not None and lane.tasks for lane in self.lanes)

    def run(self) -> Generator[StepRecord, None, None]:
        """Decode until every task is over, a record a token that each live sequence gets."""
        with ExitStack() as stack:
            stack.callback(self.close)
            while live := self.live:
                if self.graphs is not None and self.prefilled is not None and self.graphs.takes(live):
                    self.rearrange()
                    if (yield from self._run(self.graphs, live)) or not self.live:
                        continue
                records = self.step()
                if self.prefilled is None:
                    self.prefilled = time.perf_counter()
                    for session in self.sessions:
                        stack.enter_context(session.optimized())
                yield from records

    def _run(self, graphs: Graphs, live: Sequence[Live]) -> Generator[StepRecord, None, bool]:
        """Steps of these rows from graphs, until a draft is found that pays; whether they go on so."""
        [lane] = self.lanes
        if (speculation := lane.speculation) is None:
            return (yield from graphs.run(live))
        sequences = [sequence for _, sequence in live]
        self._since = self._since or time.perf_counter()
        if speculation.finds(sequences):
            return False
        self._since = None
        run, taken, held, started = graphs.run(live), 0, 0.0, time.perf_counter()
        with closing(run):
            while True:
                try:
                    record = next(run)
                except StopIteration as over:
                    return bool(over.value)
                taken += 1
                given = time.perf_counter()
                # The first ones wait for what is begun with a run. Whoever keeps a record for long lets the device wait.
                tells = taken > AHEAD and held < given - started
                speculation.ran(sequences, held + given - started if tells else None)
                yield record
                if any(sequence.finish_reason is not None for sequence in sequences):
                    return True
                self._since = started = time.perf_counter()
                held = started - given
                if speculation.finds(sequences):
                    return True
                self._since = None

    def close(self) -> None:
        """Give back what the rows hold."""
        for lane in self.lanes:
            if lane.speculation is not None:
                lane.speculation.close()
        for session in self.sessions:
            session.close()

    @torch.no_grad()
    def step(self, budget: int | None = None, room: Room | None = None) -> list[StepRecord]:
        """One forward, and all tokens that it gives.

        Args:
            budget: most tokens of prompts to forward; ``None`` for all.
            room: a lane and a sequence of it to most tokens of its draft, besides its own limit.
        """
        started, self._since = self._since or time.perf_counter(), None
        self.rearrange()
        turns = [Turn(lane, self.held) for lane in self.lanes]
        for turn in turns:
            turn.draft(room)
        forks = {row: parent for turn in turns for row, parent in turn.fan.forks.items()}
        for session in self.sessions:
            session.rearrange(forks, ())
        if leaves_a_core(self.sessions[0].model.device):
            for _, sequence in (own for turn in turns for own in turn.stepping):
                if sequence.constraint is not None:
                    sequence.constraint.prefetch()
        self._forward(turns, budget)
        self.forwards += 1
        records = [record for turn in turns for record in self.choose(turn)]
        steady = all(session.steady for session in self.sessions)
        self._settle(turns, time.perf_counter() - started if steady else None)
        return records

    def choose(self, turn: Turn) -> list[StepRecord]:
        """The tokens of a lane's requests."""
        return turn.choose()

    def rearrange(self) -> None:
        """Carry out what was decided since the last forward: forks, and rows that are over."""
        changes = [lane.rearranged() for lane in self.lanes]
        forks = {row: parent for change in changes for row, parent in change.forks.items()}
        kept = {row for change in changes for row in change.kept}
        gone = self.known - kept
        if forks or gone:
            for session in self.sessions:
                session.rearrange(forks, gone)
        # Drafters are told of rows that the sessions have put aside already, too.
        for lane, change in zip(self.lanes, changes, strict=True):
            if lane.speculation is not None and (change.forks or change.gone):
                lane.speculation.rearrange(change.forks, change.gone)
        self.known = (self.known - gone) | forks.keys()
        self.held = (self.held - gone) | forks.keys()

    def _forward(self, turns: Sequence[Turn], budget: int | None) -> None:
        """Forward what was chosen and drafted, then prompts; hand each lane its outputs."""
        rows = [row for turn in turns for row in turn.fan.rows]
        tokens = [ids for turn in turns for ids in turn.fan.tokens]
        # Rows are numbered as they come: who came first is fed first.
        fresh = [sequence.row for turn in turns for _, sequence in turn.fresh]
        fed, last, seconds = sorted(fresh), [*map(len, tokens)], 0.0
        if self.speculates:
            # What a draft of so many tokens costs is measured, so that prompts are forwarded apart.
            started = time.perf_counter()
            parts = [session.step(rows, tokens, last) if rows else {} for session in self.sessions]
            if (device := self.sessions[0].model.device).type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - started
            through = [session.feed(fed, budget) if fed else set() for session in self.sessions]
        else:
            pairs = [session.advance(rows, tokens, last, fed, budget) for session in self.sessions]
            parts, through = [own for own, _ in pairs], [own for _, own in pairs]
        self._hand_out(turns, [*map(_Cut, parts)], set.intersection(*through), seconds)

    def _hand_out(self, turns: Sequence[Turn], stepped: Sequence[_Cut], through: set[int], seconds: float) -> None:
        """Hand each lane the outputs of its steps, and of its prompts that are through."""
        fresh = [sequence.row for turn in turns for _, sequence in turn.fresh]
        self.known |= set(fresh)
        self.held |= through
        done = [row for row in fresh if row in through]
        first = [_Cut(session.first(done) if done else {}) for session in self.sessions]
        for turn in turns:
            own = [sequence.row for _, sequence in turn.fresh if sequence.row in through]
            turn.take(
                self._cut(turn.lane, stepped, turn.fan.rows, sum(map(len, turn.fan.tokens))),
                self._cut(turn.lane, first, own, len(own)),
                through,
                seconds,
            )

    def _cut(self, lane: Lane, cuts: Sequence[_Cut], rows: Sequence[int], count: int) -> Parts:
        """A lane's share of the outputs: of these rows, ``count`` positions in all."""
        if not rows:
            return {}
        parts = merged(
            cut.next(session.branches(rows[0]), count) for session, cut in zip(self.sessions, cuts, strict=True)
        )
        if "main" in parts and parts["main"].layers != lane.layers:
            parts["main"] = parts["main"].only(lane.layers)
        return parts

    def _settle(self, turns: Sequence[Turn], seconds: float | None) -> None:
        """Take back what was drafted and not accepted in a step of so many seconds, if others will take as many."""
        if not self.speculates:
            return
        settled = Settled()
        for turn in turns:
            settled.add(turn.settle(seconds))
        for session in self.sessions:
            session.rollback(settled.drop)
            session.rearrange(settled.moved, settled.gone)
            for fork, row in settled.forks.items():
                session.forwarded[row] += session.forwarded.pop(fork, 0)


class _Cut:
    """The outputs of a session, of which each lane takes its part in turn."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._taken = Counter[str]()

    def next(self, names: Sequence[str], count: int) -> Parts:
        """The next ``count`` positions of these branches."""
        taken = {}
        for name in names:
            start = self._taken[name]
            taken[name] = self._parts[name].span(start, start + count)
            self._taken[name] += count
        return taken
