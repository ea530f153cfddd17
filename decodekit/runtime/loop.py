"""The decoding loop: requests in, one token a live row and step, until every row has ended.

A step is: rearrange rows, forward every branch, score, rules and pick, commit. Rows begin, fork and end on their own; a row
that fails ends alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation import StoppingCriteriaList

from decodekit.core import compat
from decodekit.core.drafts import Draft
from decodekit.core.errors import InputError, PluginError, RowError
from decodekit.core.protocols import Rule, TokenStrategy
from decodekit.core.random import SEARCH_LANE, uniform
from decodekit.core.search import Group, Hypothesis
from decodekit.core.types import BranchOutputs, Outputs, Request, Rows
from decodekit.runtime.guard import guarded
from decodekit.runtime.history import History
from decodekit.runtime.pipeline import Picked, Pipeline, select
from decodekit.runtime.plan import Plan
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.session import DynamicSession, Session
from decodekit.runtime.speculation import Fan, Speculation, Walk
from decodekit.runtime.tasks import PlainTask, SearchTask, SequenceTask, Task

Live = tuple[Task, SequenceState]


@dataclass
class StepRecord:
    """What one step decided, for whoever watches (streams, traces, returned scores).

    Attributes:
        tasks: [P] whose sequences these are.
        sequences: [P] those that were live.
        tokens: [P] what was picked at each.
        taken: [P] whether the sequence took it: not one that failed, nor where a strategy chooses for itself.
        pieces: [P] text that became certain.
        places: [P] the token's place in the output.
        outputs: the branches' outputs and the strategy's annotations at these positions.
        picked: the tokens and logits of every stage.
    """

    tasks: Sequence[Task]
    sequences: Sequence[SequenceState]
    tokens: list[int]
    taken: list[bool]
    pieces: list[str]
    places: list[int]
    outputs: Outputs
    picked: Picked


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

    Attributes:
        shows_rows: rows grow together by a token a step, and are kept padded as ``generate`` shows them.
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
    ) -> None:
        self.sessions = tuple(sessions)
        self.tasks = tasks
        self.input_ids = input_ids
        self.started = time.perf_counter()
        self.prefilled: float | None = None
        self._strategy, self._pipeline = plan.strategy, pipeline
        self._pad, self._criteria = pad, criteria
        self._keep_logprobs, self._keep_stages = keep_logprobs, keep_stages
        self._keep_raw = plan.sequence is not None
        self._confidence_top_k = plan.sequence.confidence_top_k if plan.sequence is not None else 0
        config = compat.text_config(self.sessions[0].model)
        # What a search or drafter reads beside it is none of the strategy's business.
        others = plan.search is not None or plan.drafter is not None
        self._layers = plan.strategy.hidden_layers(config) if others else None
        self._device = input_ids.device
        self._history = History(self._device)
        self._next_row = len(tasks)
        # Rows that the sessions hold, and new rows with the row that each is to fork from before the next forward.
        self._held: set[int] = set()
        self._forks: dict[int, int] = {}
        self._stateful = [
            index
            for index, (_, step) in enumerate(pipeline.steps)
            if isinstance(step, Rule) and type(step).init_state is not Rule.init_state
        ]
        self.shows_rows = speculation is None and all(isinstance(task, PlainTask) for task in tasks)
        self.speculation = speculation(self) if speculation is not None else None
        for task in tasks:
            root = task.root
            try:
                root.states = [self._initial(step, root.request) for _, step in pipeline.steps]
            except (InputError, RowError) as error:
                root.fail(str(error))
            if root.finish_reason is None:
                self._history.add(root.row, root.request.prompt_ids)

    @property
    def live(self) -> list[Live]:
        """Sequences that wait for a token, with their tasks."""
        return [(task, sequence) for task in self.tasks for sequence in task.live]

    def run(self) -> Iterator[StepRecord]:
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
        scores = self._score(given.outputs)
        for task in dict.fromkeys(task for task, _ in given.live):
            task.steps += 1
        walks = [
            Walk(*own, base, draft) for own, base, draft in zip(given.live, given.bases, given.drafts, strict=True)
        ]
        records, going = list[StepRecord](), walks
        while going:
            places = [walk.place for walk in going]
            whole = places == list(range(len(scores)))
            at = given.outputs if whole else _select(given.outputs, *places)
            records.append(self._take(going, at, scores if whole else scores[places]))
            going = [walk for walk in going if walk.goes_on]
        self._settle(given, walks)
        return records

    def _take(self, walks: Sequence[Walk], outputs: Outputs, scores: Tensor) -> StepRecord:
        """Choose the next token of each sequence from the outputs at where it stands."""
        sequences = [walk.sequence for walk in walks]
        picked = self._pipeline(
            self._history.rows(sequences, self._pipeline.eos),
            scores,
            [[sequence.states[step] for sequence in sequences] for step in range(len(self._pipeline.steps))],
            record=self._keep_stages,
        )
        view = self._view(walks, outputs, picked)
        pieces, committed = [""] * len(walks), [False] * len(walks)
        taken: dict[int, int] = {}
        for task, own in _by_task(walks):
            if isinstance(task, SearchTask):
                taken |= self._search(task, own, view)
                continue
            for position in own:
                walk, sequence = walks[position], sequences[position]
                walk.goes_on = False
                if isinstance(task, SequenceTask) and sequence is task.root:
                    task.begin(_select(outputs, position))
                    continue
                try:
                    if position in picked.failures:
                        raise RowError(picked.failures[position])
                    pieces[position] = self._commit(sequence, view.tokens[position], position, view)
                except RowError as error:
                    sequence.fail(str(error))
                else:
                    taken[sequence.row], committed[position] = view.tokens[position], True
                    walk.accept()
                if isinstance(task, SequenceTask):
                    task.grew(sequence)
            if isinstance(task, SequenceTask):
                self._place(task)
        if taken:
            self._history.append(list(taken), torch.tensor(list(taken.values()), device=self._device))
        self._follow(walks, picked)
        places = [len(sequence.tokens) - 1 for sequence in sequences]
        owners = [walk.task for walk in walks]
        return StepRecord(owners, sequences, view.tokens, committed, pieces, places, outputs, picked)

    def _rearrange(self) -> None:
        """Carry out what was decided since the last forward: forks, and rows that are over."""
        kept = {sequence.row for task in self.tasks for sequence in task.held}
        forks = {row: parent for row, parent in self._forks.items() if row in kept}
        gone = self._held - kept
        if forks or gone:
            for session in self.sessions:
                session.rearrange(forks, gone)
            if self.speculation is not None:
                self.speculation.rearrange(forks, gone)
        self._history.keep(kept)
        self._held = (self._held - gone) | forks.keys()
        self._forks = {}

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
        started = time.perf_counter()
        outputs = _merged(session.step(fan.rows, fan.tokens, fan.last) for session in self.sessions)
        given.seconds = time.perf_counter() - started
        if fan.index == list(range(len(fan.index))):
            return outputs
        return dict(_select(Outputs(outputs), *fan.index))

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

    def _score(self, outputs: Outputs) -> Tensor:
        if self._layers is None:
            return score(self._strategy, outputs)
        own = Outputs({**outputs, "main": outputs["main"].only(self._layers)})
        own.annotations = outputs.annotations
        return score(self._strategy, own)

    def _view(self, walks: Sequence[Walk], outputs: Outputs, picked: Picked) -> _View:
        view = _View(picked, picked.tokens.tolist(), time.perf_counter(), outputs)
        chosen = picked.tokens.unsqueeze(-1)
        if self.speculation is not None:
            for position, walk in enumerate(walks):
                if len(walk.draft):
                    logits, own = picked.final[position], view.tokens[position]
                    view.tokens[position] = self.speculation.choose(walk, logits, own, sample=self._pipeline.sample)
            chosen = torch.tensor(view.tokens, device=chosen.device).unsqueeze(-1)
        if self._keep_logprobs:
            view.final = picked.final.log_softmax(-1)
            view.logprobs = view.final.gather(-1, chosen).squeeze(-1).tolist()
        if self._keep_raw:
            raw = outputs["main"].logits.log_softmax(-1)
            view.raw = raw.gather(-1, chosen).squeeze(-1).tolist()
            if self._confidence_top_k:
                view.confidences = raw.topk(min(self._confidence_top_k, raw.shape[-1])).values.mean(-1).neg().tolist()
        return view

    def _commit(self, sequence: SequenceState, token: int, position: int, view: _View) -> str:
        """A sequence takes the token that was picked at its position; the text that became certain."""
        self._commit_states(sequence, token, view.picked.final[position])
        if view.logprobs:
            sequence.logprobs.append(view.logprobs[position])
        if view.raw:
            sequence.raw_logprobs.append(view.raw[position])
        if view.confidences:
            sequence.confidences.append(view.confidences[position])
        return sequence.commit(token, view.now)

    def _search(self, task: SearchTask, positions: Sequence[int], view: _View) -> dict[int, int]:
        """Let a search strategy go on; the token that each row takes."""
        hypotheses, outputs = task.hypotheses, _select(view.outputs, *positions)
        logits = view.picked.final[positions]
        failed = [place for place, position in enumerate(positions) if position in view.picked.failures]
        if failed:
            logits = logits.index_fill(0, torch.tensor(failed, device=logits.device), -torch.inf)
        if len(failed) == len(positions):
            task.fail(view.picked.failures[positions[0]])
            return {}
        request, step = task.root.request, len(hypotheses[0].tokens)
        group = Group(
            request=request,
            hypotheses=[Hypothesis(own.tokens, own.logprobs) for own in hypotheses],
            logits=logits,
            outputs=outputs,
            max_new_tokens=task.root.limits.max_new_tokens,
            eos=self._pipeline.eos,
            ends=lambda parent, token: hypotheses[parent].ends(token, view.now),
            draw=lambda lane: uniform(request.stream, step, SEARCH_LANE + lane),
            sample=self._pipeline.sample,
            prompt_hidden=self.sessions[0].prompt_hidden.pop(task.root.row, {}),
            state=task.state,
        )
        try:
            advance = task.step(group)
        except RowError as error:
            task.fail(str(error))
            return {}

        def take(sequence: SequenceState, parent: int, token: int) -> None:
            self._commit_states(sequence, token, logits[parent])
            sequence.logprobs.append(float(view.final[positions[parent], token]))
            sequence.commit(token, view.now)

        for ended in advance.ended:
            over = hypotheses[ended.parent].fork(row=-1)
            if ended.token is not None:
                take(over, ended.parent, ended.token)
            over.finish(ended.reason)
            task.end(over, ended.score)
        children, forks = list[SequenceState](), dict[int, int]()
        for place, parent in enumerate(advance.parents):
            child = hypotheses[parent]
            if parent in advance.parents[:place]:
                child = child.fork(row=self._new_row(task))
                forks[child.row] = hypotheses[parent].row
            children.append(child)
        self._history.fork(forks)
        self._forks |= forks
        for child, parent, token in zip(children, advance.parents, advance.tokens, strict=True):
            take(child, parent, token)
        task.hypotheses = children
        return {child.row: token for child, token in zip(children, advance.tokens, strict=True)}

    def _place(self, task: SequenceTask) -> None:
        """Give candidates that were started a place: they fork from their prompt before the next forward."""
        forks = {}
        for candidate in task.starting:
            candidate.row = self._new_row(task)
            candidate.states = [self._initial(step, candidate.request) for _, step in self._pipeline.steps]
            forks[candidate.row] = task.root.row
        task.starting = []
        self._history.fork(forks)
        self._forks |= forks

    def _new_row(self, task: Task) -> int:
        row = self.new_row()
        task.rows.add(row)
        return row

    def new_row(self) -> int:
        """A number that no row of the sessions has had."""
        self._next_row += 1
        return self._next_row - 1

    @torch.no_grad()
    def score(self, ids: Sequence[int]) -> list[float]:
        """The log-probability (nats) of each of these tokens after the one row's prompt, from one forward.

        Raises:
            RowError: no distribution is left at some position.
        """
        [task] = self.tasks
        sequence = task.root
        known = torch.tensor([list(ids)], device=self._device)
        branches: dict[str, BranchOutputs] = {}
        for session in self.sessions:
            if not isinstance(session, DynamicSession):
                raise TypeError("scoring reads a transformers cache, which keeps all positions")
            branches |= session.read(ids)
        scores = score(self._strategy, Outputs(branches))
        prompt = sequence.request.prompt_ids
        rows = Rows(
            tokens=torch.tensor([[*prompt, *ids[:-1]]], device=self._device).expand(len(ids), -1),
            lengths=torch.arange(len(ids), device=self._device) + len(prompt),
            prompt_lengths=torch.full((len(ids),), len(prompt), device=self._device),
            requests=[sequence.request.id] * len(ids),
            streams=[sequence.request.stream] * len(ids),
            eos=self._pipeline.eos,
        )
        # A stateful rule sees a position only after the one before it was committed.
        groups = [[position] for position in range(len(ids))] if self._stateful else [list(range(len(ids)))]
        logprobs: list[float] = []
        for group in groups:
            states = [[state] * len(group) for state in sequence.states]
            picked = self._pipeline(select(rows, group), scores[group], states)
            for why in picked.failures.values():
                raise RowError(why)
            taken = picked.final.log_softmax(-1).gather(-1, known[0, group].unsqueeze(-1))
            logprobs += taken.squeeze(-1).tolist()
            self._commit_states(sequence, ids[group[-1]], picked.final[-1])
        return logprobs

    def _initial(self, step: Any, request: Request) -> Any:
        if not isinstance(step, Rule):
            return None
        with guarded(step, "init_state"):
            return step.init_state(request)

    def _commit_states(self, sequence: SequenceState, token: int, logits: Tensor) -> None:
        for step in self._stateful:
            rule: Any = self._pipeline.steps[step][1]
            with guarded(rule, "commit"):
                sequence.states[step] = rule.commit(sequence.states[step], token, logits)

    def _follow(self, walks: Sequence[Walk], picked: Picked) -> None:
        """Show the chosen tokens to those who see the rows padded: the caller's processors and criteria."""
        rows = [walk.sequence.row for walk in walks]
        if self.shows_rows:
            following = torch.full((len(self.tasks), 1), self._pad, dtype=torch.long, device=self._device)
            following[rows, 0] = picked.tokens
            self.input_ids = torch.cat([self.input_ids, following], dim=-1)
        going = [walk for walk in walks if walk.sequence.tokens and walk.sequence.finish_reason is None]
        if not self._criteria or not going:
            return
        if self.shows_rows:
            whole = spread(picked.final, rows, len(self.tasks), self._pad)
            over = self._criteria(self.input_ids, (whole,))[[walk.sequence.row for walk in going]]
        else:
            final = picked.final[[walks.index(walk) for walk in going]]
            over = self._criteria(self._history.padded([walk.sequence.row for walk in going], self._pad), (final,))
        for walk, done in zip(going, over.tolist(), strict=True):
            if done:
                walk.sequence.finish("stop")
                walk.goes_on = False
                if isinstance(walk.task, SequenceTask):
                    walk.task.grew(walk.sequence)
                    self._place(walk.task)


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


@dataclass
class _View:
    """What a step found at its positions, and when.

    Attributes:
        logprobs: [P] of the picked tokens under the final logits, ``raw`` under the model's own; where they are kept.
        final: [P, V] log-probabilities; where they are kept.
    """

    picked: Picked
    tokens: list[int]
    now: float
    outputs: Outputs
    logprobs: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    final: Tensor = field(default_factory=lambda: torch.empty(0))


def _merged(parts: Iterable[dict[str, BranchOutputs]]) -> dict[str, BranchOutputs]:
    return {name: outputs for part in parts for name, outputs in part.items()}


def _select(outputs: Outputs, *positions: int) -> Outputs:
    index = torch.tensor(positions, device=outputs["main"].logits.device)
    return Outputs({name: branch.select(index) for name, branch in outputs.items()})


def _by_task(walks: Sequence[Walk]) -> list[tuple[Task, list[int]]]:
    """Each task with its positions, in order."""
    positions: dict[int, tuple[Task, list[int]]] = {}
    for position, walk in enumerate(walks):
        positions.setdefault(id(walk.task), (walk.task, []))[1].append(position)
    return list(positions.values())


def score(strategy: TokenStrategy, outputs: Outputs) -> Tensor:
    """The strategy's scores, checked.

    Raises:
        PluginError: it failed or gave another shape than [P, V].
    """
    expected = outputs["main"].logits.shape
    with guarded(strategy, "score"):
        scores = strategy.score(outputs)
    if not isinstance(scores, Tensor) or scores.shape != expected or not scores.is_floating_point():
        given = f"{tuple(scores.shape)} {scores.dtype}" if isinstance(scores, Tensor) else type(scores).__name__
        raise PluginError(f"strategy {strategy.kind!r} returned {given}; expected floating-point {tuple(expected)}")
    return scores


def spread(values: Tensor, live: Sequence[int], rows: int, pad: int) -> Tensor:
    """[P, V] of the live rows as [R, V]; ended rows are certain of the pad, so that sums over scores ignore them."""
    if len(live) == rows:
        return values
    whole = torch.full((rows, values.shape[-1]), -torch.inf, dtype=values.dtype, device=values.device)
    whole[:, pad] = 0.0
    whole[list(live)] = values
    return whole
