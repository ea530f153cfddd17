"""Speculative decoding inside the loop: drafts are proposed, forwarded with the row's last token, and what agrees is kept.

A chain is fed to its row, a tree to forks of it, one a leaf. Where no distribution was drawn from, a drafted token is accepted
if it is the one that plain decoding would have chosen there with the same draw, so that output and draws equal plain
decoding's; otherwise by rejection sampling, whose output is distributed the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from decodekit.core.drafts import Draft, DraftRow, DraftState, Verified
from decodekit.core.errors import DecodekitError
from decodekit.core.protocols import Drafter
from decodekit.core.random import TOKEN_LANE, VERIFY_LANE, inverse_cdf, uniform
from decodekit.core.types import BranchOutputs
from decodekit.kernels.verify import verify
from decodekit.runtime.drafting import Host
from decodekit.runtime.guard import guarded
from decodekit.runtime.schedule import Schedule
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.tasks import Task


@dataclass
class Counts:
    """What speculation did for the rows of a task.

    Attributes:
        passes: forwards behind its tokens.
        rounds: forwards with a draft.
        drafted: tokens proposed.
        accepted: tokens accepted, by their place in the draft.
        tried: how often a draft had a token at that place.
        forced: tokens that a constraint left no choice about, forwarded together with others.
    """

    passes: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    tried: Counter[int] = field(default_factory=Counter)
    forced: int = 0


@dataclass(eq=False)
class Walk:
    """How far a sequence has come along its draft.

    Attributes:
        base: where its outputs begin.
        node: the last accepted node; -1 for none.
        agreed: the node that the token chosen behind it is, if it is one.
        accepted: the accepted nodes, in order.
        goes_on: another token can be chosen from what was forwarded.
    """

    task: Task
    sequence: SequenceState
    base: int
    draft: Draft
    node: int = -1
    agreed: int | None = None
    accepted: list[int] = field(default_factory=list)
    goes_on: bool = False

    @property
    def place(self) -> int:
        """Where the outputs are from which its next token is chosen."""
        return self.base + 1 + self.node

    def accept(self) -> None:
        """Its token was taken: go on with the node that it is."""
        if self.agreed is not None:
            self.node, self.agreed = self.agreed, None
            self.accepted.append(self.node)
            self.goes_on = self.sequence.finish_reason is None


@dataclass
class Fan:
    """What is fed for the drafts of some rows.

    Attributes:
        rows: [F] rows of the sessions, at least one a sequence.
        tokens: [F] what each is fed.
        index: where the outputs at each sequence, then after each of its nodes, lie among those of all rows.
        bases: [P] where each sequence's own begin in ``index``.
        paths: [P] each sequence's rows, with the nodes that each is fed.
        forks: rows to begin as forks of others before it is fed: a new row, its parent.
    """

    rows: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    paths: list[list[tuple[int, list[int]]]] = field(default_factory=list)
    forks: dict[int, int] = field(default_factory=dict)


@dataclass
class Settled:
    """What has to be taken back after a forward with drafts.

    Attributes:
        drop: a row, how many of its last tokens were not accepted.
        moved: a row, the fork of it that went the accepted way.
        gone: forks that are over.
        forks: a fork, the row that it was of.
    """

    drop: dict[int, int] = field(default_factory=dict)
    moved: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    forks: dict[int, int] = field(default_factory=dict)

    def add(self, other: Settled) -> None:
        """Take back what another says, too."""
        self.drop |= other.drop
        self.moved |= other.moved
        self.gone |= other.gone
        self.forks |= other.forks


class Speculation:
    """The drafter of a call, and what it is given and told.

    Args:
        drafter: proposes.
        host: what it is given.
        prompt_hidden: a row to its hidden layers over the prompt, where the drafter reads them.
        new_row: gives a number for a fork.

    Attributes:
        counts: a row, what was drafted for it.
        seconds: of drafting and verifying.
        lets_run: while nothing that is found pays, steps can be taken by others, which :meth:`ran` is told of.
    """

    def __init__(
        self,
        drafter: Drafter,
        host: Host,
        prompt_hidden: Callable[[int], Mapping[int, Tensor]],
        new_row: Callable[[], int],
    ) -> None:
        self._drafter, self._prompt_hidden, self._new_row = drafter, prompt_hidden, new_row
        self._host, self._vocab = host, host.vocab
        with guarded(drafter, "start"):
            self._state = drafter.start(host)
        self._schedule = Schedule(drafter, host.model)
        self._observes = type(self._state).observe is not DraftState.observe
        self._broken: str | None = None
        # What was proposed last, for rows with so many tokens.
        self._found: tuple[list[tuple[int, int]], list[Draft]] | None = None
        self.lets_run = not self._observes and not drafter.reads_prompt and self._schedule.weighs
        self.counts: dict[int, Counts] = {}
        self.seconds = {"draft_s": 0.0, "verify_s": 0.0}
        # Seconds of passes, by the tokens of their longest row.
        self._timed: dict[int, list[float]] = {}
        self._proposing = 0.0

    def prefilled(self, sequences: Sequence[SequenceState]) -> None:
        """Tell the drafter what the prompts gave, if it reads that."""
        if self._drafter.reads_prompt:
            hidden = [self._prompt_hidden(sequence.row) for sequence in sequences]
            rows = [describe(sequence) for sequence in sequences]
            self._tell("prefilled", lambda: self._state.prefilled(rows, hidden))

    def propose(self, sequences: Sequence[SequenceState], room: Sequence[int] | None = None) -> list[Draft]:
        """[P] drafts; a drafter that fails is left out from then on.

        Args:
            sequences: those to draft for.
            room: [P] most tokens of each draft; as many as a sequence may still get when left out.
        """
        known = [(sequence.row, len(sequence.tokens)) for sequence in sequences]
        anywhere = room is None
        if self._found is not None and self._found[0] == known and anywhere:
            return self._found[1]
        left = [sequence.limits.max_new_tokens - len(sequence.tokens) - 1 for sequence in sequences]
        room = left if room is None else [min(own) for own in zip(left, room, strict=True)]
        rows = [sequence.row for sequence in sequences]
        budgets = self._schedule.budgets(rows, room)
        started = time.perf_counter()
        drafts = [Draft()] * len(sequences)
        if self._broken is None and any(budgets):
            try:
                with guarded(self._drafter, "propose"):
                    drafts = list(self._state.propose([describe(sequence) for sequence in sequences], budgets))
                    for draft, budget in zip(drafts, budgets, strict=True):
                        draft.check(budget, self._vocab, self._drafter.kind)
            except DecodekitError as error:
                self._broken = str(error)
                drafts = [Draft()] * len(sequences)
        drafts = [_lawful(*own) for own in zip(sequences, drafts, room, strict=True)]
        if any(map(len, drafts)):
            drafts = self._schedule.cut(rows, drafts)
        self._proposing = time.perf_counter() - started
        self.seconds["draft_s"] += self._proposing
        self._found = (known, drafts) if anywhere else None
        return drafts

    def finds(self, sequences: Sequence[SequenceState]) -> bool:
        """Whether a draft pays for any of these now."""
        return any(map(len, self.propose(sequences)))

    def ran(self, sequences: Sequence[SequenceState], seconds: float | None) -> None:
        """A step of these was taken without drafts; ``None`` seconds: it does not tell what such a step takes."""
        for sequence in sequences:
            self.counts.setdefault(sequence.row, Counts()).passes += 1
        if seconds is not None:
            self._timed.setdefault(1, []).append(seconds)
        self._schedule.ran(len(sequences), seconds, self._proposing)

    def fan_out(self, sequences: Sequence[SequenceState], drafts: Sequence[Draft]) -> Fan:
        """What to feed; a row whose draft is a tree is to be forked for every leaf."""
        fan, position = Fan(), 0
        for sequence, draft in zip(sequences, drafts, strict=True):
            places, paths = {-1: position}, list[tuple[int, list[int]]]()
            for leaf in draft.leaves() or [-1]:
                row = self._new_row() if paths else sequence.row
                if paths:
                    fan.forks[row] = sequence.row
                path = draft.path(leaf)
                fan.rows.append(row)
                fan.tokens.append([sequence.tokens[-1], *(draft.tokens[node] for node in path)])
                paths.append((row, path))
                for depth, node in enumerate(path):
                    places.setdefault(node, position + 1 + depth)
                position += 1 + len(path)
            fan.paths.append(paths)
            fan.bases.append(len(fan.index))
            fan.index += [places[node] for node in range(-1, len(draft))]
        return fan

    def settle(
        self, walks: Sequence[Walk], fan: Fan, outputs: BranchOutputs, seconds: float, whole: float | None
    ) -> Settled:
        """Count and tell the drafter what was accepted; what is to be taken back.

        Args:
            walks: [P] how far each sequence came.
            fan: what was fed.
            outputs: of the main branch, in the order of ``fan.index``.
            seconds: that the forward took.
            whole: that the step took, with drafting and choosing; ``None`` where it does not tell what others will take.
        """
        settled = Settled(forks=fan.forks)
        for walk, paths in zip(walks, fan.paths, strict=True):
            # The row that went the accepted way; any of them where nothing was accepted.
            kept, path = next(own for own in paths if own[1][: len(walk.accepted)] == walk.accepted)
            settled.drop[kept] = len(path) - len(walk.accepted)
            if kept != walk.sequence.row:
                settled.moved[walk.sequence.row] = kept
            if len(paths) > 1:
                settled.gone |= {row for row, _ in paths} - ({kept} if kept == walk.sequence.row else set())
        self.seconds["verify_s"] += seconds
        self._timed.setdefault(max(map(len, fan.tokens)), []).append(seconds)
        self._count(walks)
        drafts = {walk.sequence.row: walk.draft for walk in walks}
        hits = {walk.sequence.row: len(walk.accepted) for walk in walks}
        told = None if whole is None else whole if self._schedule.runs else seconds
        self._schedule.observe(drafts, hits, told, self._proposing)
        if self._observes:
            self._tell("observe", lambda: self._state.observe(_verified(walks, fan, outputs)))
        return settled

    def choose(self, walk: Walk, logits: Tensor, picked: int, *, sample: bool) -> int:
        """The token after the node that a sequence stands at; notes which of the node's children it is.

        Args:
            walk: the sequence and its draft.
            logits: [V] final ones there.
            picked: what plain decoding chooses there.
            sample: whether tokens are drawn.
        """
        draft, children = walk.draft, walk.draft.children(walk.node)
        if draft.q is None or not children or not sample:
            walk.agreed = draft.child(walk.node, picked)
            return picked
        stream, position = walk.sequence.request.stream, len(walk.sequence.tokens)
        place, left = verify(
            logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)),
            [draft.tokens[child] for child in children],
            draft.q[children],
            [uniform(stream, position, VERIFY_LANE + child) for child in range(len(children))],
        )
        if place is not None:
            walk.agreed = children[place]
            return draft.tokens[children[place]]
        walk.agreed = None
        own = torch.tensor([uniform(stream, position, TOKEN_LANE)], device=left.device)
        return int(inverse_cdf(left.unsqueeze(0), own))

    def rearrange(self, forks: Mapping[int, int], gone: Collection[int]) -> None:
        """Rows of the target have forked, or are over."""
        self._tell("fork", lambda: self._state.fork(forks))
        self._tell("release", lambda: self._state.release(sorted(gone)))

    def forget(self, rows: Iterable[int]) -> None:
        """These rows are over for good, and so is what was counted for them."""
        for row in rows:
            self.counts.pop(row, None)
            self._schedule.forget(row)

    def close(self) -> None:
        """The call is over."""
        try:
            self._state.close()
        finally:
            self._host.close()

    def stats(self, rows: Sequence[int]) -> dict[str, Any]:
        """What was drafted for these rows, for ``Output.stats``."""
        own = [self.counts[row] for row in rows if row in self.counts]
        accepted, tried = Counter[int](), Counter[int]()
        for count in own:
            accepted.update(count.accepted)
            tried.update(count.tried)
        passes, rounds = sum(count.passes for count in own), sum(count.rounds for count in own)
        drafted, forced = sum(count.drafted for count in own), sum(count.forced for count in own)
        plain = self._timed.get(1)
        return {
            "draft_tokens": drafted,
            "accepted_tokens": accepted.total(),
            "forced_tokens": forced,
            "draft_rounds": rounds,
            "drafts_per_round": drafted / max(rounds, 1),
            "tokens_per_pass": 1 + (accepted.total() + forced) / max(passes, 1),
            "fallback_rate": 1 - rounds / max(passes, 1),
            "acceptance_by_position": [accepted[place] / tried[place] for place in sorted(tried)],
            # T(1+g) / T(1) by g, where passes without drafts were among them.
            "pass_cost": {width - 1: mean(took) / mean(plain) for width, took in sorted(self._timed.items()) if plain},
            **self.seconds,
            **self._state.seconds(),
            **({"drafter_error": self._broken} if self._broken is not None else {}),
        }

    def _count(self, walks: Sequence[Walk]) -> None:
        for walk in walks:
            counts = self.counts.setdefault(walk.sequence.row, Counts())
            counts.passes += 1
            if walk.draft.forced:
                counts.forced += len(walk.accepted)
                continue
            counts.rounds += bool(len(walk.draft))
            counts.drafted += len(walk.draft)
            counts.accepted.update(range(len(walk.accepted)))
            # A place was tried if all before it had been accepted.
            counts.tried.update(range(min(walk.draft.depth, len(walk.accepted) + 1)))

    def _tell(self, hook: str, call: Callable[[], None]) -> None:
        if self._broken is not None:
            return
        try:
            with guarded(self._drafter, hook):
                call()
        except DecodekitError as error:
            self._broken = str(error)


def describe(sequence: SequenceState) -> DraftRow:
    """A sequence as drafters see it."""
    request = sequence.request
    return DraftRow(sequence.row, request.prompt_ids, sequence.tokens, request.id, request.stream)


def _lawful(sequence: SequenceState, draft: Draft, room: int) -> Draft:
    """What the row's constraint forces, or else what it allows of the draft."""
    if sequence.constraint is None or draft.q is not None:
        return (
            draft  # what was drawn is rejected by its probability of 0: left out, it would bias what is drawn instead
        )
    if forced := sequence.constraint.forced(room):
        return Draft(forced, forced=True)
    return draft.kept(sequence.constraint.legal(draft.tokens, draft.parent_of)) if len(draft) else draft


def _verified(walks: Sequence[Walk], fan: Fan, outputs: BranchOutputs) -> list[Verified]:
    verified = []
    for walk, base, paths in zip(walks, fan.bases, fan.paths, strict=True):
        own = outputs
        if len(walks) > 1:
            own = outputs.select(torch.arange(base, base + 1 + len(walk.draft), device=outputs.logits.device))
        before = fan.tokens[fan.rows.index(paths[0][0])][0]
        verified.append(Verified(describe(walk.sequence), before, walk.accepted, walk.draft, own))
    return verified
