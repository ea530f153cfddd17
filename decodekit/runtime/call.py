"""One call: from what ``generate`` prepared and a recipe to a loop that is ready to run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from decodekit.core import compat
from decodekit.core.errors import DecodekitError, RowError
from decodekit.recipe import Recipe
from decodekit.runtime.auditing import Auditor
from decodekit.runtime.branches import hidden_layers, sessions_of
from decodekit.runtime.caches import context_length, more_than_ids
from decodekit.runtime.choosing import Chooser
from decodekit.runtime.constraining import Constraints, Forcing
from decodekit.runtime.drafting import BLOCK_SIZE, Host
from decodekit.runtime.graphs import Graphs
from decodekit.runtime.guard import guarded
from decodekit.runtime.lane import Lane
from decodekit.runtime.loop import Loop
from decodekit.runtime.paged_session import PagedSession
from decodekit.runtime.pipeline import Pipeline, Step
from decodekit.runtime.plan import Plan
from decodekit.runtime.processors import CallersStep, option_steps
from decodekit.runtime.scoring import Scoring
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.session import Session
from decodekit.runtime.settings import Settings, merge_rules
from decodekit.runtime.speculation import Speculation
from decodekit.runtime.tasks import PlainTask, Result, SearchTask, SequenceTask, Task
from decodekit.runtime.work import Given, Work, understand


@dataclass
class Call:
    """A call that is ready to run.

    Attributes:
        prepared: the inputs, expanded to all rows.
        tasks: one a row of the inputs.
        outputs: of each task.
        seed: the seed of every row that has none of its own.
    """

    prepared: compat.Prepared
    settings: Settings
    tasks: Sequence[Task]
    outputs: int
    loop: Loop
    seed: int

    @property
    def lane(self) -> Lane:
        """The only one."""
        return self.loop.lanes[0]

    def results(self) -> list[Result]:
        """The outputs of all tasks, in order."""
        return [result for task in self.tasks for result in task.results(self.outputs)]


def assemble(model: Any, prepared: compat.Prepared, recipe: Recipe, given: Given) -> Call:
    """Everything that can be refused is refused here, before the prompt is prefilled.

    Raises:
        Refused: the model, an option or a combination cannot be honoured.
        InputError: something that the recipe needs was not given.
    """
    started = time.perf_counter()
    context = context_length(model, recipe, prepared.model_kwargs.get(compat.CACHE_KEY))
    work = understand(model, prepared, recipe, given, context=context, started=started)
    plan, settings, sequences, scoring = work.plan, work.settings, work.sequences, work.given.scoring
    if plan.constrained:
        constraints = Constraints(recipe.constraint, work.given.tokenizer, logits_width(model), settings.eos)
        constrain(constraints, sequences)
    sessions = sessions_of(model, plan, work.prepared, recipe, settings, sequences, work.given.models, scoring=scoring)
    lane = make_lane(model, work, sessions, itertools.count(len(sequences)).__next__, steps=steps_of(model, work))
    tasks = [task_of(sequence, plan) for sequence in sequences]
    for task in tasks:
        lane.chooser.add(task)
    lane.tasks += tasks
    graphs = None if scoring else Graphs(sessions, lane, watched=_watched(work))
    # Graphs take a token a step, in a fraction of the time that the host takes to launch a forward of several.
    if graphs is not None and (plan.drafter is not None or graphs.stats.eager is not None):
        # Whole blocks, and room for a draft of every row and its forks.
        longest = [len(own.request.prompt_ids) + max(0, own.limits.max_new_tokens) for own in sequences]
        tokens = sum(plan.rows * (own + 3 * plan.drafted + 4 * BLOCK_SIZE) for own in longest)
        speculate(lane, model, work.given, sessions, tokens)
    for session in sessions:
        if isinstance(session, PagedSession):
            session.rollbacks = lane.speculation is not None
    if lane.speculation is None and all(isinstance(task, PlainTask) for task in tasks):
        lane.chooser.show_rows()
        for _, step in lane.pipeline.steps:
            if isinstance(step, CallersStep) and not scoring:
                step.chooser = lane.chooser
    if graphs is not None and lane.speculation is not None and not lane.speculation.lets_run:
        graphs.stats.eager = graphs.stats.eager or "drafts"
    loop = Loop(sessions, [lane])
    loop.started = started
    loop.graphs = graphs
    return Call(work.prepared, settings, tasks, work.outputs, loop, work.seed)


def _watched(work: Work) -> str | None:
    """What looks at every step on the host, if anything."""
    config = work.settings.config
    names = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    asked = next((name for name in names if getattr(config, name)), None) if config.return_dict_in_generate else None
    if asked is not None:
        return asked
    if work.given.keep_stages:
        return "a trace"
    return "stopping criteria of the caller's own" if work.settings.criteria.own else None


def make_lane(
    model: Any,
    work: Work,
    sessions: Sequence[Session],
    new_row: Callable[[], int],
    *,
    steps: Sequence[tuple[str, Step]],
    confines: type[Exception] = RowError,
) -> Lane:
    """Where requests like this are scored and chosen for.

    Args:
        model: the model.
        work: what is asked for.
        sessions: what runs the branches, one a model.
        new_row: gives a number that no row of the sessions has had.
        steps: the chain of rules.
        confines: what ends a row alone when a rule or constraint raises it while a token is taken.
    """
    plan, settings, given = work.plan, work.settings, work.given
    pipeline = Pipeline(steps, sample=bool(settings.config.do_sample), fallback=work.recipe.fallback, eos=settings.eos)
    chooser = Chooser(
        plan,
        pipeline,
        input_ids=work.prepared.input_ids,
        pad=settings.pad,
        new_row=new_row,
        prompt_hidden=lambda row: sessions[0].prompt_hidden.pop(row, {}),
        criteria=settings.criteria.own,
        keep_logprobs=given.keep_logprobs or plan.search is not None,
        keep_stages=given.keep_stages,
        confines=confines,
    )
    lane = Lane(plan, pipeline, Scoring(plan, sessions), chooser, hidden_layers(plan, model))
    if work.recipe.audit and not given.scoring:
        lane.auditor = Auditor(work.recipe.audit, sessions, more_than_ids(work.prepared))
    return lane


def constrain(constraints: Constraints, sequences: Sequence[SequenceState]) -> None:
    """Give every row its constraint; a row whose own cannot be fails alone."""
    for sequence in sequences:
        if sequence.error is not None:
            continue
        inputs = sequence.request.inputs
        try:
            sequence.constraint = constraints.row(inputs, sequence.limits.max_new_tokens)
        except DecodekitError as error:
            if "constraint" not in inputs:
                raise
            sequence.fail(str(error))


def logits_width(model: Any) -> int:
    """How many logits the model's head gives."""
    width: int = model.get_output_embeddings().weight.shape[0]
    return width


def speculate(
    lane: Lane, model: Any, given: Given, sessions: Sequence[Session], tokens: int, *, grows: bool = False
) -> None:
    """Let the plan's drafter, or else what constraints force, propose tokens.

    Args:
        lane: whose rows are drafted for.
        model: the target.
        given: what the call came with.
        sessions: what runs the branches.
        tokens: most tokens that all rows hold together.
        grows: rows come and go, and seldom hold as many.
    """
    drafter = lane.plan.drafter
    if drafter is None:
        if not lane.plan.rolls_back or not all(isinstance(session, PagedSession) for session in sessions):
            return
        drafter = Forcing()
    host = Host(model, given.tokenizer, given.models, lane.pipeline, tokens, model.device, grows=grows)
    lane.speculation = lane.chooser.speculation = Speculation(
        drafter, host, sessions[0].prompt_hidden.pop, lane.chooser.new_row
    )


def task_of(sequence: SequenceState, plan: Plan) -> Task:
    """The way of a row to its outputs."""
    if plan.search is not None:
        return SearchTask(sequence, plan.search)
    return PlainTask(sequence) if plan.sequence is None else SequenceTask(sequence, plan.sequence)


def steps_of(model: Any, work: Work) -> list[tuple[str, Step]]:
    """The chain: the caller's processors, those of options, rules, warpers, and what must come last."""
    recipe, settings = work.recipe, work.settings
    callers = compat.callers_processors(model, work.prepared)
    made = option_steps(
        model,
        work.prepared,
        settings,
        work.sequences,
        {type(own) for own in callers},
        rules=recipe.rules is not None,
    )
    rules = []
    for rule in merge_rules(recipe.rules or (), settings) if recipe.rules is not None else ():
        with guarded(rule, "resolve"):
            rules.append(rule.resolve(work.given.tokenizer))
    steps: list[tuple[str, Step]] = [(type(own).__name__, CallersStep(own)) for own in callers]
    processors, warpers, last = made
    return [*steps, *processors, *((rule.kind, rule) for rule in rules), *warpers, *last]
