"""What a call asks for, read from what ``generate`` prepared and a recipe, before anything is run."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decodekit.core import compat
from decodekit.core.errors import InputError, Refused, nearest
from decodekit.core.protocols import SearchStrategy, TokenStrategy
from decodekit.core.random import Stream, fresh_seed, prompt_digest
from decodekit.core.types import Need, Request
from decodekit.recipe import Recipe
from decodekit.runtime.branches import too_long, unknown_id
from decodekit.runtime.guard import guarded
from decodekit.runtime.plan import Plan
from decodekit.runtime.sequence import Limits, SequenceState
from decodekit.runtime.settings import Settings, resolve
from decodekit.runtime.text import TextTracker, encoder

INPUTS = ("text", "context", "negative_prompt", "constraint", "seed")
"""What a prompt may bring besides its ids; strategies may need more."""

BEAM_OPTIONS = ("num_beams", "length_penalty", "early_stopping")
"""Options of generate that are a search strategy's own."""


@dataclass(frozen=True)
class Replay:
    """The output that every row is to begin with, whatever would have been chosen.

    Attributes:
        tokens: its ids.
        sample: the rows' sample index, so that they draw as they did.
        told: what the trace says about it.
    """

    tokens: Sequence[int]
    sample: int = 0
    told: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass
class Given:
    """What a Decoder was given beside the prompts.

    Attributes:
        tokenizer: the model's tokenizer, or ``None``.
        models: other models by name, for branches.
        inputs: one mapping a prompt (text, context, seed, ...), or none at all.
        raw: texts skip the chat template.
        want_text: decode the output.
        keep_logprobs: note log-probabilities.
        keep_stages: record logits after each rule.
        scoring: given tokens are to be scored, all positions at once.
        named: options of the recipe that the call itself named.
        prompts: which of the caller's prompts each of the call's is; all of them if empty.
        replay: what every row begins with, if anything.
    """

    tokenizer: Any = None
    models: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: Sequence[Mapping[str, Any]] = ()
    raw: bool = False
    want_text: bool = False
    keep_logprobs: bool = False
    keep_stages: bool = False
    scoring: bool = False
    named: frozenset[str] = frozenset()
    prompts: Sequence[int] = ()
    replay: Replay | None = None


@dataclass
class Work:
    """What a call asks for.

    Attributes:
        prepared: the inputs, expanded to all rows.
        recipe: how to decode.
        settings: what holds for the call.
        given: what came beside the prompts.
        plan: the strategies.
        sequences: the rows; those that cannot be decoded have already failed.
        outputs: of each row.
        seed: of every row that has none of its own.
    """

    prepared: compat.Prepared
    recipe: Recipe
    settings: Settings
    given: Given
    plan: Plan
    sequences: list[SequenceState]
    outputs: int
    seed: int


def understand(
    model: Any, prepared: compat.Prepared, recipe: Recipe, given: Given, *, context: int | None, started: float
) -> Work:
    """What is asked for, checked.

    Args:
        model: the model.
        prepared: what ``generate`` prepared.
        recipe: how to decode.
        given: what came beside the prompts.
        context: most tokens of a row, if there is a limit.
        started: ``time.perf_counter`` seconds from which ``max_time`` counts.

    Raises:
        Refused: the model, an option or a combination cannot be honoured.
        InputError: something that the recipe needs was not given.
    """
    compat.check_model(model)
    settings = resolve(model, prepared, recipe, given.named)
    plan, prepared, given = _take_guidance(_plan(recipe, settings, given), prepared, given)
    prompts = _prompt_count(prepared)
    _check_inputs(given, plan, prompts)
    outputs = 1
    if plan.outputs:
        outputs = _outputs(plan, settings)
        compat.keep_every(prepared, prepared.input_ids.shape[0] // prompts)
    elif settings.copies > 1:
        compat.expand(model, prepared, settings.copies)
    seed = recipe.generation.seed if recipe.generation.seed is not None else fresh_seed()
    _check_tokenizer(settings, plan, given)
    # What stands for an image may be no id of the model's.
    text_only = compat.text_config(model) is model.config
    if text_only and (why := unknown_id(prepared.input_ids.unique().tolist(), model)) is not None:
        raise InputError(why)
    sequences = _sequences(prepared, settings, given, prompts, seed, started, plan, context)
    if given.replay is not None:
        for sequence in sequences:
            stream = sequence.request.stream._replace(sample=given.replay.sample)
            sequence.request = dataclasses.replace(sequence.request, stream=stream)
            sequence.given = given.replay.tokens
    return Work(prepared, recipe, settings, given, plan, sequences, outputs, seed)


def _plan(recipe: Recipe, settings: Settings, given: Given) -> Plan:
    """The strategies of the recipe, ready for this call's options and tokenizer.

    Raises:
        Refused: the call asks for what the strategy cannot do.
    """
    whole: Any = recipe.strategy
    inner = whole if isinstance(whole, TokenStrategy) else whole.inner
    with guarded(inner, "resolve"):
        inner = inner.resolve(given.tokenizer)
    if given.scoring:
        return Plan(inner)  # what is scored is the distribution that tokens are chosen from
    constrained = recipe.constraint is not None or any(
        isinstance(inputs, Mapping) and "constraint" in inputs for inputs in given.inputs
    )
    drafter = recipe.drafter
    if drafter is not None:
        with guarded(drafter, "resolve"):
            drafter = drafter.resolve(given.tokenizer)
    if isinstance(whole, TokenStrategy):
        return Plan(inner, drafter=drafter, constrained=constrained)
    if isinstance(whole, SearchStrategy):
        whole = _with_call_options(whole, settings)
    elif whole.count > 1 and not settings.config.do_sample:
        raise Refused(
            f"{whole.count} outputs of {inner.kind!r} are the same text each time without sampling; give do_sample=True"
        )
    with guarded(whole, "resolve"):
        whole = whole.resolve(given.tokenizer)
    if not isinstance(whole, SearchStrategy):
        return Plan(inner, sequence=whole, drafter=drafter, constrained=constrained)
    if drafter is not None:
        raise Refused(
            f"drafter {drafter.kind!r} drafts for one hypothesis, and {whole.kind!r} keeps several; leave it out"
        )
    return Plan(inner, search=whole, constrained=constrained)


def _with_call_options(strategy: SearchStrategy, settings: Settings) -> SearchStrategy:
    """The strategy with options of generate in place of its own, where it has them.

    Raises:
        Refused: it cannot draw.
    """
    if settings.config.do_sample and not strategy.samples:
        raise Refused(f"strategy {strategy.kind!r} does not sample; leave do_sample out")
    own, named = type(strategy).model_fields, {*settings.named}
    if (settings.config.num_beams or 1) > 1:
        named.add("num_beams")
    given = {name: getattr(settings.config, name) for name in sorted(named & own.keys() & set(BEAM_OPTIONS))}
    return type(strategy).model_validate({**dict(strategy), **given}) if given else strategy


def _outputs(plan: Plan, settings: Settings) -> int:
    """Outputs of each prompt."""
    asked, most = settings.config.num_return_sequences or 1, plan.outputs
    if asked > most:
        raise Refused(
            f"num_return_sequences={asked} was given, but strategy {plan.whole.kind!r} chooses between {most}"
        )
    if plan.search is not None and settings.criteria.own:
        names = ", ".join(type(own).__name__ for own in settings.criteria.own)
        raise Refused(
            f"stopping_criteria {names} cannot be honoured by {plan.whole.kind!r}; use stop_strings or max_time"
        )
    return asked


def _check_tokenizer(settings: Settings, plan: Plan, given: Given) -> None:
    if given.tokenizer is not None:
        return
    how = "give dk_tokenizer=tokenizer or decoder.bind(tokenizer=...)"
    if settings.stop_strings:
        raise InputError(f"stop_strings {list(settings.stop_strings)} need a tokenizer; {how}")
    if plan.sequence is not None and plan.sequence.needs & {Need.TEXT, Need.TOKENIZER}:
        raise InputError(f"strategy {plan.whole.kind!r} reads texts, which need a tokenizer; {how}")


def _take_guidance(plan: Plan, prepared: compat.Prepared, given: Given) -> tuple[Plan, compat.Prepared, Given]:
    """Let the guidance that ``generate`` was asked for set the strategy, instead of guiding a second time."""
    guidance, others = compat.guidance(prepared)
    if guidance is None or "guidance_scale" not in type(plan.strategy).model_fields:
        return plan, prepared, given
    guided = plan.strategy.model_copy(update={"guidance_scale": guidance.scale})
    plan = dataclasses.replace(plan, strategy=guided)
    prepared = dataclasses.replace(prepared, logits_processor=others)
    if guidance.negative_prompts is not None:
        prompts, found = _prompt_count(prepared), len(guidance.negative_prompts)
        if found not in (1, prompts):
            raise InputError(f"negative_prompt_ids has {found} rows; expected 1 or one a prompt, {prompts}")
        negatives = guidance.negative_prompts * (prompts if found == 1 else 1)
        inputs = given.inputs or [{}] * prompts
        merged = [{**own, "negative_prompt": ids} for own, ids in zip(inputs, negatives, strict=True)]
        given = dataclasses.replace(given, inputs=merged)
    return plan, prepared, given


def _prompt_count(prepared: compat.Prepared) -> int:
    """Prompts of the call; ``generate`` has already repeated each of them."""
    call = prepared.config
    return prepared.input_ids.shape[0] // max(call.num_beams or 1, call.num_return_sequences or 1)


def _check_inputs(given: Given, plan: Plan, prompts: int) -> None:
    if not given.inputs:
        return
    if len(given.inputs) != prompts or not all(isinstance(inputs, Mapping) for inputs in given.inputs):
        found = f"{len(given.inputs)} entries ({', '.join(sorted({type(inputs).__name__ for inputs in given.inputs}))})"
        raise InputError(f"dk_inputs is a list of one dict a prompt: expected {prompts}, got {found}")
    known = {*INPUTS, *(str(need) for strategy in (plan.strategy, plan.whole) for need in strategy.needs)}
    for index, inputs in enumerate(given.inputs):
        for name in inputs:
            if name not in known:
                raise InputError(f"dk_inputs[{index}]: unknown input {name!r}: {nearest(str(name), known)}")


def _sequences(
    prepared: compat.Prepared,
    settings: Settings,
    given: Given,
    prompts: int,
    seed: int,
    started: float,
    plan: Plan,
    context: int | None,
) -> list[SequenceState]:
    """The rows of the call; those that cannot be decoded have already failed, so that their neighbours can be."""
    config = settings.config
    eos, deadline = frozenset(settings.eos), started + config.max_time if config.max_time is not None else None
    wanted = given.want_text or bool(settings.stop_strings) or plan.sequence is not None
    reads = given.tokenizer is not None and wanted
    sequences = []
    for request in _requests(prepared, given, prompts, seed):
        length = len(request.prompt_ids)
        limits = Limits(settings.room(length), eos, deadline, context)
        tracker = TextTracker(given.tokenizer, settings.stop_strings) if reads else None
        sequence = SequenceState(request, request.id, limits, tracker)
        if length == 0:
            sequence.fail("the prompt is empty: its attention mask covers no token")
        elif (why := too_long(length, context)) is not None:
            sequence.fail(why)
            _clamp_positions(prepared, request.id, context)
        elif limits.max_new_tokens < 1:
            sequence.fail(f"the prompt has {length} tokens, max_length {settings.max_length} leaves no room; raise it")
        sequences.append(sequence)
    return sequences


def _clamp_positions(prepared: compat.Prepared, row: int, context: int | None) -> None:
    """Models with learned positions would fail for the whole batch on a position they do not have."""
    positions = prepared.model_kwargs.get("position_ids")
    if positions is not None and positions.ndim == 2 and positions.shape[0] == prepared.input_ids.shape[0]:
        positions[row].clamp_(max=(context or 1) - 1)


def _requests(prepared: compat.Prepared, given: Given, prompts: int, seed: int) -> list[Request]:
    width = prepared.input_ids.shape[1]
    copies = prepared.input_ids.shape[0] // prompts
    seen: Counter[tuple[int, tuple[int, ...]]] = Counter()
    encode = encoder(given.tokenizer, raw=given.raw)
    requests = []
    for row, (ids, length) in enumerate(zip(prepared.input_ids.tolist(), prepared.lengths, strict=True)):
        prompt = tuple(ids[width - length :])
        place = row // copies
        inputs = given.inputs[place] if given.inputs else {}
        index = given.prompts[place] if given.prompts else place
        own_seed = _seed(inputs, seed, index)
        stream = Stream(own_seed, seen[own_seed, prompt], prompt_digest(prompt))
        seen[own_seed, prompt] += 1
        requests.append(Request(row, prompt, stream, index, inputs, encode, given.tokenizer))
    return requests


def _seed(inputs: Mapping[str, Any], default: int, prompt: int) -> int:
    seed = inputs.get("seed", default)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise InputError(f"the seed of prompt {prompt} must be a whole number from 0 to 2**64 - 1, got {seed!r}")
    return seed
