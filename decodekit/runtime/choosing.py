"""From outputs to tokens: score, constrain, rules and pick, commit; for single rows, searches and candidates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.generation import StoppingCriteriaList

from decodekit.core.drafts import Draft
from decodekit.core.errors import InputError, RowError, reason
from decodekit.core.random import SEARCH_LANE, uniform
from decodekit.core.search import Group, Hypothesis
from decodekit.core.types import Outputs
from decodekit.runtime.constraining import constrain
from decodekit.runtime.history import History
from decodekit.runtime.pipeline import Picked, Pipeline
from decodekit.runtime.plan import Plan
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.speculation import Speculation, Walk
from decodekit.runtime.tasks import SearchTask, SequenceTask, Task


@dataclass
class StepRecord:
    """What one step decided, for whoever watches (streams, traces, returned scores).

    Attributes:
        tasks: [P] whose sequences these are.
        sequences: [P] those that were live.
        tokens: [P] what was picked at each.
        taken: [P] whether the sequence took it: not one that failed, nor where a strategy chooses for itself.
        pieces: [P] text that became certain, of tasks whose tokens are final as they come.
        places: [P] the token's place in the output.
        walks: [P] the drafts behind each, final once all records of the forward are made.
        nodes: [P] the node of its draft that the token is, ``None`` where it is none.
        outputs: the branches' outputs and the strategy's annotations at these positions.
        picked: the tokens and logits of every stage.
    """

    tasks: Sequence[Task]
    sequences: Sequence[SequenceState]
    tokens: list[int]
    taken: list[bool]
    pieces: list[str]
    places: list[int]
    walks: Sequence[Walk]
    nodes: list[int | None]
    outputs: Outputs
    picked: Picked


class Chooser:
    """Chooses the next tokens of a call's sequences, and says which rows fork for it.

    Args:
        plan: the strategies.
        pipeline: rules and pick.
        input_ids: [R, T] the prompts as ``generate`` pads them.
        pad: id that follows in rows that have ended.
        new_row: gives a number that no row of the sessions has had.
        prompt_hidden: a row to its hidden layers over the prompt, where a search reads them.
        criteria: the caller's own stopping criteria.
        keep_logprobs: note each token's log-probability.
        keep_stages: record the logits after each rule.
        confines: what ends a row alone when a rule or constraint raises it while a token is taken.

    Attributes:
        shows_rows: rows grow together by a token a step, and are kept padded as ``generate`` shows them.
        keeps_logprobs: whether each token's log-probability is noted.
        confines: the same.
        forks: new rows, with the row that each is to fork from before the next forward.
        speculation: chooses behind drafted tokens, if anything is drafted.
    """

    def __init__(
        self,
        plan: Plan,
        pipeline: Pipeline,
        *,
        input_ids: Tensor,
        pad: int,
        new_row: Callable[[], int],
        prompt_hidden: Callable[[int], Mapping[int, Tensor]],
        criteria: StoppingCriteriaList | None,
        keep_logprobs: bool,
        keep_stages: bool,
        confines: type[Exception] = RowError,
    ) -> None:
        self.input_ids, self.shows_rows = input_ids, False
        self.forks: dict[int, int] = {}
        self.speculation: Speculation | None = None
        self.new_row, self._pipeline, self.confines = new_row, pipeline, confines
        self._pad, self._criteria, self._prompt_hidden = pad, criteria, prompt_hidden
        self.keeps_logprobs, self._keep_stages = keep_logprobs, keep_stages
        self._keep_raw = plan.sequence is not None
        self._confidence_top_k = plan.sequence.confidence_top_k if plan.sequence is not None else 0
        self._device = input_ids.device
        self._history = History(self._device)

    def show_rows(self) -> None:
        """Rows grow together by a token a step: keep them padded, as ``generate`` shows them."""
        self.shows_rows = True

    def add(self, task: Task) -> None:
        """A prompt more; it fails where a rule was not given what it needs."""
        root = task.root
        try:
            root.states = self._pipeline.initial_states(root.request)
        except (InputError, self.confines) as error:
            task.fail(reason(error))
        if root.finish_reason is None:
            self._history.add(root.row, root.request.prompt_ids)

    def again(self, sequence: SequenceState) -> None:
        """A sequence that was put aside goes on."""
        self._history.add(sequence.row, sequence.request.prompt_ids, sequence.tokens)

    def keep(self, rows: set[int]) -> dict[int, int]:
        """Forget all rows but these; the forks among them that are to be made now: a new row, its parent."""
        forks = {row: parent for row, parent in self.forks.items() if row in rows}
        self._history.keep(rows)
        self.forks = {}
        return forks

    def pick(self, walks: Sequence[Walk], outputs: Outputs, scores: Tensor) -> View:
        """What each sequence may go on with, from the outputs at where it stands; none of them takes anything yet."""
        sequences = [walk.sequence for walk in walks]
        scores, dead = constrain(scores, outputs["main"].logits, [sequence.constraint for sequence in sequences])
        picked = self._pipeline(
            self._history.rows(sequences, self._pipeline.eos),
            scores,
            [[sequence.states[step] for sequence in sequences] for step in range(len(self._pipeline.steps))],
            record=self._keep_stages,
        )
        picked.failures.update(dead)
        return self._view(walks, outputs, picked)

    def commit(self, walks: Sequence[Walk], view: View) -> StepRecord:
        """Let each sequence take what was picked for it; one that cannot, or that cannot go on, ends alone."""
        count, sequences, tasks = len(walks), [walk.sequence for walk in walks], [walk.task for walk in walks]
        pieces, nodes, outputs, picked = [""] * count, [walk.agreed for walk in walks], view.outputs, view.picked
        record = StepRecord(tasks, sequences, view.tokens, [False] * count, pieces, [], walks, nodes, outputs, picked)
        taken: dict[int, int] = {}
        for task, own in _by_task(walks):
            for position in own:
                walks[position].goes_on = False
            try:
                if isinstance(task, SearchTask):
                    taken |= self._search(task, own, view)
                else:
                    taken |= self._advance(task, own, record, view)
            except self.confines as error:
                task.fail(reason(error))
        if taken:
            self._history.append(list(taken), torch.tensor(list(taken.values()), device=self._device))
        self._follow(walks, picked)
        record.places = [len(sequence.tokens) - 1 for sequence in sequences]
        return record

    def accept(
        self,
        live: Sequence[tuple[Task, SequenceState]],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        failures: Mapping[int, str],
    ) -> StepRecord:
        """Rows of their own take tokens that were picked elsewhere, by rules that keep no state.

        Args:
            live: [P] the rows.
            tokens: [P] of each.
            logprobs: [P] of these; empty where nobody keeps them.
            failures: a position, why it takes none.
        """
        now = time.perf_counter()
        pieces, taken = [""] * len(live), [False] * len(live)
        for place, (task, sequence) in enumerate(live):
            try:
                if place in failures:
                    raise RowError(failures[place])
                if sequence.constraint is not None:
                    sequence.constraint.advance(tokens[place])
                if logprobs:
                    sequence.logprobs.append(logprobs[place])
                piece = sequence.commit(tokens[place], now)
            except self.confines as error:
                sequence.fail(reason(error))
                continue
            taken[place], pieces[place] = True, piece if task.streams else ""
        tasks, sequences = [task for task, _ in live], [sequence for _, sequence in live]
        places = [len(sequence.tokens) - 1 for sequence in sequences]
        picked = Picked(torch.tensor(tokens), torch.empty(0))
        walks = [Walk(task, sequence, place, Draft()) for place, (task, sequence) in enumerate(live)]
        nodes: list[int | None] = [None] * len(live)
        return StepRecord(tasks, sequences, list(tokens), taken, pieces, places, walks, nodes, Outputs({}), picked)

    def extend(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Rows have taken these tokens by :meth:`accept`: rules see them from now on."""
        self._history.extend(tokens)

    def _view(self, walks: Sequence[Walk], outputs: Outputs, picked: Picked) -> View:
        view = View(picked, picked.tokens.tolist(), time.perf_counter(), outputs)
        chosen, other = picked.tokens.unsqueeze(-1), False
        for position, walk in enumerate(walks):
            given, place = walk.sequence.given, len(walk.sequence.tokens)
            if place < len(given):
                view.tokens[position], other = given[place], True
                picked.failures.pop(position, None)
                walk.agreed = walk.draft.child(walk.node, given[place])
            elif self.speculation is not None and len(walk.draft):
                logits, own = picked.final[position], view.tokens[position]
                view.tokens[position] = self.speculation.choose(walk, logits, own, sample=self._pipeline.sample)
                other = True
        if other:
            chosen = torch.tensor(view.tokens, device=chosen.device).unsqueeze(-1)
        if self.keeps_logprobs:
            view.final = picked.final.log_softmax(-1)
            view.logprobs = view.final.gather(-1, chosen).squeeze(-1).tolist()
        if self._keep_raw:
            raw = outputs["main"].logits.log_softmax(-1)
            view.raw = raw.gather(-1, chosen).squeeze(-1).tolist()
            if self._confidence_top_k:
                view.confidences = raw.topk(min(self._confidence_top_k, raw.shape[-1])).values.mean(-1).neg().tolist()
        return view

    def _commit(self, sequence: SequenceState, token: int, position: int, view: View) -> str:
        """A sequence takes the token that was picked at its position; the text that became certain."""
        self._pipeline.commit(sequence.states, token, view.picked.final[position])
        if view.logprobs:
            sequence.logprobs.append(view.logprobs[position])
        if view.raw:
            sequence.raw_logprobs.append(view.raw[position])
        if view.confidences:
            sequence.confidences.append(view.confidences[position])
        if sequence.constraint is not None:
            sequence.constraint.advance(token)
        return sequence.commit(token, view.now)

    def _advance(self, task: Task, positions: Sequence[int], record: StepRecord, view: View) -> dict[int, int]:
        """Let the sequences of a task go on, each by itself; the token that each row takes."""
        taken: dict[int, int] = {}
        for position in positions:
            walk, sequence = record.walks[position], record.sequences[position]
            if sequence.finish_reason is not None:
                continue  # cancelled by what a candidate before it did in this very step
            if isinstance(task, SequenceTask) and sequence is task.root:
                task.begin(select_positions(view.outputs, position))
                continue
            try:
                if position in view.picked.failures:
                    raise RowError(view.picked.failures[position])
                piece = self._commit(sequence, view.tokens[position], position, view)
            except self.confines as error:
                sequence.fail(reason(error))
            else:
                taken[sequence.row], record.taken[position] = view.tokens[position], True
                record.pieces[position] = piece if task.streams else ""
                walk.accept()
            if isinstance(task, SequenceTask):
                task.grew(sequence)
        if isinstance(task, SequenceTask):
            self._place(task)
        return taken

    def _search(self, task: SearchTask, positions: Sequence[int], view: View) -> dict[int, int]:
        """Let a search strategy go on; the token that each row takes."""
        hypotheses, outputs = task.hypotheses, select_positions(view.outputs, *positions)
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
            prompt_hidden=self._prompt_hidden(task.root.row),
            state=task.advance.state,
        )
        advance = task.step(group)

        def take(sequence: SequenceState, parent: int, token: int) -> None:
            self._pipeline.commit(sequence.states, token, logits[parent])
            if sequence.constraint is not None:
                sequence.constraint.advance(token)
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
        self.forks |= forks
        for child, parent, token in zip(children, advance.parents, advance.tokens, strict=True):
            take(child, parent, token)
        task.hypotheses = children
        return {child.row: token for child, token in zip(children, advance.tokens, strict=True)}

    def _place(self, task: SequenceTask) -> None:
        """Give candidates that were started a place: they fork from their prompt before the next forward."""
        forks = {}
        for candidate in task.starting:
            candidate.row = self._new_row(task)
            candidate.states = self._pipeline.initial_states(candidate.request)
            forks[candidate.row] = task.root.row
        task.starting = []
        self._history.fork(forks)
        self.forks |= forks

    def _new_row(self, task: Task) -> int:
        row = self.new_row()
        task.rows.add(row)
        return row

    def _follow(self, walks: Sequence[Walk], picked: Picked) -> None:
        """Show the chosen tokens to those who see the rows padded: the caller's processors and criteria."""
        rows = [walk.sequence.row for walk in walks]
        if self.shows_rows:
            following = torch.full((len(self.input_ids), 1), self._pad, dtype=torch.long, device=self._device)
            following[rows, 0] = picked.tokens
            self.input_ids = torch.cat([self.input_ids, following], dim=-1)
        going = [walk for walk in walks if walk.sequence.tokens and walk.sequence.finish_reason is None]
        if not self._criteria or not going:
            return
        if self.shows_rows:
            whole = spread(picked.final, rows, len(self.input_ids), self._pad)
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
class View:
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


def select_positions(outputs: Outputs, *positions: int) -> Outputs:
    """The outputs of all branches at these positions."""
    index = torch.tensor(positions, device=outputs["main"].logits.device)
    return Outputs({name: branch.select(index) for name, branch in outputs.items()})


def _by_task(walks: Sequence[Walk]) -> list[tuple[Task, list[int]]]:
    """Each task with its positions, in order."""
    positions: dict[int, tuple[Task, list[int]]] = {}
    for position, walk in enumerate(walks):
        positions.setdefault(id(walk.task), (walk.task, []))[1].append(position)
    return list(positions.values())


def spread(values: Tensor, live: Sequence[int], rows: int, pad: int) -> Tensor:
    """[P, V] of the live rows as [R, V]; ended rows are certain of the pad, so that sums over scores ignore them."""
    if len(live) == rows:
        return values
    whole = torch.full((rows, values.shape[-1]), -torch.inf, dtype=values.dtype, device=values.device)
    whole[:, pad] = 0.0
    whole[list(live)] = values
    return whole
