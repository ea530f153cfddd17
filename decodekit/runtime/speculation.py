"""Speculative decoding inside the loop: drafts are proposed, forwarded with the row's last token, and what agrees is kept.

A chain is fed to its row, a tree to forks of it, one a leaf. Where no distribution was drawn from, a drafted token is accepted
if it is the one that plain decoding would have chosen there with the same draw, so that output and draws equal plain
decoding's; otherwise by rejection sampling, whose output is distributed the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decodekit.core.drafts import Draft, DraftHost, DraftRow, Verified
from decodekit.core.errors import DecodekitError
from decodekit.core.protocols import Drafter
from decodekit.core.random import TOKEN_LANE, VERIFY_LANE, uniform
from decodekit.core.types import BranchOutputs
from decodekit.kernels.verify import verify
from decodekit.runtime.guard import guarded
from decodekit.runtime.schedule import Schedule
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.session import Session


@dataclass
class Counts:
    """What speculation did for the rows of a task.

    Attributes:
        passes: forwards with or without a draft.
        rounds: forwards with one.
        drafted: tokens proposed.
        accepted: tokens accepted, by their place in the draft.
        tried: how often a draft had a token at that place.
    """

    passes: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    tried: Counter[int] = field(default_factory=Counter)


@dataclass
class Fan:
    """What is fed for the drafts of some rows.

    Attributes:
        rows: [F] rows of the sessions, at least one a sequence.
        tokens: [F] what each is fed.
        index: where the outputs at each sequence, then after each of its nodes, lie among those of all rows.
        bases: [P] where each sequence's own begin in ``index``.
        paths: a sequence's number, its rows, each with the nodes it is fed.
    """

    rows: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    paths: dict[int, list[tuple[int, list[int]]]] = field(default_factory=dict)

    @property
    def last(self) -> list[int]:
        """[F] how many of each row's positions to keep: all that it is fed."""
        return [len(tokens) for tokens in self.tokens]


class Speculation:
    """The drafter of a call, and what it is given and told.

    Args:
        drafter: proposes.
        host: what it is given.
        sessions: of the target's branches.
        new_row: gives a number for a fork.
    """

    def __init__(
        self, drafter: Drafter, host: DraftHost, sessions: Sequence[Session], new_row: Callable[[], int]
    ) -> None:
        self._drafter, self._sessions, self._new_row = drafter, sessions, new_row
        self._vocab = host.vocab
        with guarded(drafter, "start"):
            self._state = drafter.start(host)
        self._schedule = Schedule(drafter)
        self._broken: str | None = None
        self.counts: dict[int, Counts] = {}
        self.seconds = {"draft_s": 0.0, "verify_s": 0.0}
        self._proposing = 0.0

    @property
    def broken(self) -> str | None:
        """Why nothing is drafted any more; decoding goes on without."""
        return self._broken

    def propose(self, sequences: Sequence[SequenceState]) -> list[Draft]:
        """[P] drafts; a drafter that fails is left out from then on."""
        room = [sequence.limits.max_new_tokens - len(sequence.tokens) - 1 for sequence in sequences]
        budgets = self._schedule.budgets([sequence.row for sequence in sequences], room)
        started = time.perf_counter()
        drafts = [Draft()] * len(sequences)
        if self._broken is None and any(budgets):
            try:
                with guarded(self._drafter, "propose"):
                    rows = [describe(sequence) for sequence in sequences]
                    drafts = list(self._state.propose(rows, budgets))
                    for draft, budget in zip(drafts, budgets, strict=True):
                        draft.check(budget, self._vocab, self._drafter.kind)
            except DecodekitError as error:
                self._give_up(error)
                drafts = [Draft()] * len(sequences)
        self._proposing = time.perf_counter() - started
        self.seconds["draft_s"] += self._proposing
        return drafts

    def fan_out(self, sequences: Sequence[SequenceState], drafts: Sequence[Draft]) -> Fan:
        """What to feed; a row whose draft is a tree is forked for every leaf."""
        fan, forks, position = Fan(), dict[int, int](), 0
        for number, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            places = {-1: position}
            fan.paths[number] = []
            for leaf in draft.leaves() or [-1]:
                row = sequence.row if not fan.paths[number] else self._new_row()
                if row != sequence.row:
                    forks[row] = sequence.row
                path = draft.path(leaf)
                fan.rows.append(row)
                fan.tokens.append([sequence.tokens[-1], *(draft.tokens[node] for node in path)])
                fan.paths[number].append((row, path))
                for depth, node in enumerate(path):
                    places.setdefault(node, position + 1 + depth)
                position += 1 + len(path)
            fan.bases.append(len(fan.index))
            fan.index += [places[node] for node in range(-1, len(draft))]
        if forks:
            for session in self._sessions:
                session.rearrange(forks, ())
        return fan

    def settle(
        self,
        sequences: Sequence[SequenceState],
        drafts: Sequence[Draft],
        accepted: Sequence[Sequence[int]],
        fan: Fan,
        outputs: BranchOutputs,
        seconds: float,
    ) -> None:
        """Take back what was not accepted, and tell the drafter.

        Args:
            sequences: [P] as they are now.
            drafts: [P] what was proposed.
            accepted: [P] the accepted nodes.
            fan: what was fed.
            outputs: of the main branch, in the order of ``fan.index``.
            seconds: that the forward took.
        """
        drop, moved, gone = dict[int, int](), dict[int, int](), set[int]()
        for number, (sequence, nodes) in enumerate(zip(sequences, accepted, strict=True)):
            # The row that went the accepted way, or any where nothing was accepted.
            kept, path = next(own for own in fan.paths[number] if list(own[1][: len(nodes)]) == list(nodes))
            drop[kept] = len(path) - len(nodes)
            others = {row for row, _ in fan.paths[number]} - {kept}
            gone |= others
            if kept != sequence.row:
                moved[sequence.row] = kept
                gone.add(kept)
        for session in self._sessions:
            session.rollback(drop)
            session.rearrange(moved, gone)
        self.seconds["verify_s"] += seconds
        self._count(sequences, drafts, accepted)
        depths = {own.row: _depth(draft) for own, draft in zip(sequences, drafts, strict=True)}
        hits = {own.row: len(nodes) for own, nodes in zip(sequences, accepted, strict=True)}
        self._schedule.observe(depths, hits, seconds, self._proposing)
        self._observe(sequences, drafts, accepted, fan, outputs)

    def choose(
        self, sequence: SequenceState, draft: Draft, node: int, logits: Tensor, picked: int, *, sample: bool
    ) -> tuple[int, int | None]:
        """The token after a node, and the child that it is; ``None`` where it is none of them.

        Args:
            sequence: the row.
            draft: its draft.
            node: what it has come to; -1 is the row itself.
            logits: [V] final ones after that node.
            picked: what plain decoding chooses there.
            sample: whether tokens are drawn.
        """
        children = draft.children(node)
        if draft.q is None or not children or not sample:
            return picked, next((child for child in children if draft.tokens[child] == picked), None)
        stream, position = sequence.request.stream, len(sequence.tokens)
        place, token = verify(
            logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)),
            [draft.tokens[child] for child in children],
            draft.q[children],
            [uniform(stream, position, VERIFY_LANE + child) for child in range(len(children))],
            uniform(stream, position, TOKEN_LANE),
        )
        return token, None if place is None else children[place]

    def fork(self, children: Mapping[int, int]) -> None:
        """Rows of the target have forked."""
        self._tell(lambda: self._state.fork(children))

    def release(self, rows: Sequence[int]) -> None:
        """Rows of the target are over."""
        self._tell(lambda: self._state.release(rows))

    def close(self) -> None:
        """The call is over."""
        self._state.close()

    def stats(self, rows: Sequence[int]) -> dict[str, Any]:
        """What was drafted for these rows, for ``Output.stats``."""
        own = [self.counts[row] for row in rows if row in self.counts]
        accepted, tried = Counter[int](), Counter[int]()
        for count in own:
            accepted.update(count.accepted)
            tried.update(count.tried)
        rounds, drafted = sum(count.rounds for count in own), sum(count.drafted for count in own)
        return {
            "draft_tokens": drafted,
            "accepted_tokens": accepted.total(),
            "draft_rounds": rounds,
            "acceptance_by_position": [accepted[place] / tried[place] for place in sorted(tried)],
            **self.seconds,
            **({"drafter_error": self._broken} if self._broken is not None else {}),
        }

    def _count(
        self, sequences: Sequence[SequenceState], drafts: Sequence[Draft], accepted: Sequence[Sequence[int]]
    ) -> None:
        for sequence, draft, nodes in zip(sequences, drafts, accepted, strict=True):
            counts = self.counts.setdefault(sequence.row, Counts())
            counts.passes += 1
            counts.rounds += bool(len(draft))
            counts.drafted += len(draft)
            counts.accepted.update(range(len(nodes)))
            # A place was tried if all before it had been accepted.
            counts.tried.update(range(min(_depth(draft), len(nodes) + 1)))

    def _observe(
        self,
        sequences: Sequence[SequenceState],
        drafts: Sequence[Draft],
        accepted: Sequence[Sequence[int]],
        fan: Fan,
        outputs: BranchOutputs,
    ) -> None:
        verified = []
        for number, (sequence, draft, nodes) in enumerate(zip(sequences, drafts, accepted, strict=True)):
            base = fan.bases[number]
            index = torch.arange(base, base + 1 + len(draft), device=outputs.logits.device)
            verified.append(Verified(describe(sequence), nodes, draft, outputs.select(index)))
        self._tell(lambda: self._state.observe(verified))

    def _tell(self, call: Callable[[], None]) -> None:
        if self._broken is not None:
            return
        try:
            with guarded(self._drafter, "observe"):
                call()
        except DecodekitError as error:
            self._give_up(error)

    def _give_up(self, error: DecodekitError) -> None:
        self._broken = str(error)


def describe(sequence: SequenceState) -> DraftRow:
    """A sequence as drafters see it."""
    return DraftRow(sequence.row, sequence.request.prompt_ids, sequence.tokens, sequence.request.stream)


def _depth(draft: Draft) -> int:
    return max((len(draft.path(leaf)) for leaf in draft.leaves()), default=0)
