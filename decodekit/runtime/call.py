"""One call: from what ``generate`` prepared and a recipe to a loop that is ready to run."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decodekit.core import compat
from decodekit.core.errors import InputError, PluginError, Refused, nearest
from decodekit.core.protocols import TokenStrategy
from decodekit.core.random import Stream, fresh_seed, prompt_digest
from decodekit.core.types import Branch, Request
from decodekit.recipe import Recipe
from decodekit.runtime.caches import paged_cache
from decodekit.runtime.guard import guarded
from decodekit.runtime.loop import Limits, Loop, SequenceState
from decodekit.runtime.pipeline import Pipeline, Step
from decodekit.runtime.processors import CallersStep, option_steps
from decodekit.runtime.session import DynamicSession, PagedSession, Session
from decodekit.runtime.settings import Settings, merge_rules, resolve
from decodekit.runtime.text import TextTracker, encoder

INPUTS = ("text", "context", "negative_prompt", "seed")
"""What a prompt may bring besides its ids; strategies may need more."""


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


@dataclass
class Call:
    """A call that is ready to run.

    Attributes:
        prepared: the inputs, expanded to all rows.
        seed: the seed of every row that has none of its own.
    """

    prepared: compat.Prepared
    settings: Settings
    sequences: list[SequenceState]
    loop: Loop
    seed: int


def assemble(model: Any, prepared: compat.Prepared, recipe: Recipe, given: Given) -> Call:
    """Everything that can be refused is refused here, before the prompt is prefilled.

    Raises:
        Refused: the model, an option or a combination cannot be honoured.
        InputError: something that the recipe needs was not given.
    """
    started = time.perf_counter()
    compat.check_model(model)
    strategy = _strategy(recipe)
    with guarded(strategy, "resolve"):
        strategy = strategy.resolve(given.tokenizer)
    settings = resolve(model, prepared, recipe, given.named)
    prompts = _prompt_count(prepared)
    _check_inputs(given, strategy, prompts)
    if settings.copies > 1:
        compat.expand(model, prepared, settings.copies)
    seed = recipe.generation.seed if recipe.generation.seed is not None else fresh_seed()
    if settings.stop_strings and given.tokenizer is None:
        raise InputError(
            f"stop_strings {list(settings.stop_strings)} need a tokenizer; give dk_tokenizer=tokenizer or "
            "decoder.bind(tokenizer=...)"
        )
    sequences = _sequences(model, prepared, settings, given, prompts, seed, started)
    sessions = _sessions(model, strategy, prepared, recipe, settings, sequences, given)
    steps = _steps(model, prepared, recipe, settings, given, sequences)
    pipeline = Pipeline(steps, sample=bool(settings.config.do_sample), fallback=recipe.fallback, eos=settings.eos)
    loop = Loop(
        sessions,
        strategy,
        pipeline,
        sequences,
        input_ids=prepared.input_ids,
        pad=settings.pad,
        criteria=settings.criteria.own,
        keep_logprobs=given.keep_logprobs,
        keep_stages=given.keep_stages,
    )
    loop.started = started
    if not given.scoring:
        for _, step in steps:
            if isinstance(step, CallersStep):
                step.loop = loop
    return Call(prepared, settings, sequences, loop, seed)


def _strategy(recipe: Recipe) -> TokenStrategy:
    strategy = recipe.strategy
    if not isinstance(strategy, TokenStrategy):
        raise Refused(
            f"strategy {strategy.kind!r} is a {type(strategy).__mro__[1].__name__}; this decodekit runs token-level strategies"
        )
    for part in ("constraint", "drafter"):
        if (plugin := getattr(recipe, part)) is not None:
            raise Refused(f"{part} {plugin.kind!r} cannot be honoured yet; leave {part} out of the recipe")
    return strategy


def _prompt_count(prepared: compat.Prepared) -> int:
    """Prompts of the call; ``generate`` has already repeated each of them."""
    call = prepared.config
    return prepared.input_ids.shape[0] // max(call.num_beams or 1, call.num_return_sequences or 1)


def _check_inputs(given: Given, strategy: TokenStrategy, prompts: int) -> None:
    if not given.inputs:
        return
    if len(given.inputs) != prompts or not all(isinstance(inputs, Mapping) for inputs in given.inputs):
        found = f"{len(given.inputs)} entries ({', '.join(sorted({type(inputs).__name__ for inputs in given.inputs}))})"
        raise InputError(f"dk_inputs is a list of one dict a prompt: expected {prompts}, got {found}")
    known = {*INPUTS, *(str(need) for need in strategy.needs)}
    for index, inputs in enumerate(given.inputs):
        if "constraint" in inputs:
            raise Refused(f"dk_inputs[{index}]: a constraint cannot be honoured yet; leave it out")
        for name in inputs:
            if name not in known:
                raise InputError(f"dk_inputs[{index}]: unknown input {name!r}: {nearest(str(name), known)}")


def _sequences(
    model: Any,
    prepared: compat.Prepared,
    settings: Settings,
    given: Given,
    prompts: int,
    seed: int,
    started: float,
) -> list[SequenceState]:
    """The rows of the call; those that cannot be decoded have already failed, so that their neighbours can be."""
    config, context = settings.config, compat.context_length(model)
    eos, deadline = frozenset(settings.eos), started + config.max_time if config.max_time is not None else None
    reads = given.tokenizer is not None and (given.want_text or bool(settings.stop_strings))
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


def too_long(length: int, context: int | None) -> str | None:
    """Why a prompt of this many tokens cannot be decoded; ``None`` when it can."""
    if context is None or length < context:
        return None
    return f"the prompt has {length} tokens, the model's context holds {context} with the output; shorten it"


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
        requests.append(Request(row, prompt, stream, index, inputs, encode))
    return requests


def _seed(inputs: Mapping[str, Any], default: int, prompt: int) -> int:
    seed = inputs.get("seed", default)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise InputError(f"the seed of prompt {prompt} must be a whole number from 0 to 2**64 - 1, got {seed!r}")
    return seed


def _branches(model: Any, strategy: TokenStrategy, sequence: SequenceState) -> dict[str, Branch]:
    """The branches of a row by name; none, and the row has failed, where it cannot have them."""
    if sequence.error is not None:
        return {}
    try:
        with guarded(strategy, "branches"):
            own = strategy.branches(sequence.request)
            if own[0].name != "main" or len({branch.name for branch in own}) != len(own):
                raise PluginError(
                    f"strategy {strategy.kind!r} has branches {[branch.name for branch in own]}; each needs a name of its "
                    "own, and the first is called main"
                )
    except InputError as error:
        sequence.fail(str(error))
        return {}
    for branch in own:
        length = len(branch.prompt_ids)
        why = "its prompt is empty" if not length else too_long(length, compat.context_length(model))
        if why is not None:
            sequence.fail(f"branch {branch.name!r} of {strategy.kind!r}: {why}")
            return {}
    return {branch.name: branch for branch in own}


def _sessions(
    model: Any,
    strategy: TokenStrategy,
    prepared: compat.Prepared,
    recipe: Recipe,
    settings: Settings,
    sequences: Sequence[SequenceState],
    given: Given,
) -> list[Session]:
    """A session a model; the main branch goes on from what ``generate`` prepared."""
    layers = _hidden_layers(strategy, compat.text_config(model))
    branches = [_branches(model, strategy, sequence) for sequence in sequences]
    models = {name: branch.model for own in branches for name, branch in own.items()} or {"main": "main"}
    # A row that cannot be decoded still takes its place in a rectangular batch.
    blank = [sequence.request.prompt_ids or (settings.pad,) for sequence in sequences]
    prompts = {
        name: [own[name].prompt_ids if name in own else instead for own, instead in zip(branches, blank, strict=True)]
        for name in models
    }
    sessions: list[Session] = []
    for model_name in sorted(set(models.values()), key="main".__ne__):
        runner = model if model_name == "main" else given.models.get(model_name)
        if runner is None:
            raise InputError(
                f"strategy {strategy.kind!r} needs a model called {model_name!r}; give "
                f"decoder.bind(models={{{model_name!r}: model}})"
            )
        own_prompts = {name: prompts[name] for name, other in models.items() if other == model_name}
        kept = layers if "main" in own_prompts else ()
        cache = None if given.scoring else paged_cache(runner, prepared, recipe, settings, own_prompts)
        if cache is not None:
            sessions.append(PagedSession(runner, cache, own_prompts, layers=kept))
            continue
        inputs = {
            name: _main_inputs(prepared, settings)
            if name == "main" and rows == blank
            else _branch_inputs(runner, rows, settings)
            for name, rows in own_prompts.items()
        }
        sessions.append(DynamicSession(runner, inputs, layers=kept, pad=settings.pad))
    return sessions


def _hidden_layers(strategy: TokenStrategy, config: Any) -> tuple[int, ...]:
    with guarded(strategy, "hidden_layers"):
        layers = strategy.hidden_layers(config)
        wrong = [layer for layer in layers if not 0 <= layer <= config.num_hidden_layers]
        if wrong:
            raise PluginError(
                f"strategy {strategy.kind!r} asks for hidden layers {wrong}; this model has 0 to {config.num_hidden_layers}"
            )
    return layers


def _main_inputs(prepared: compat.Prepared, settings: Settings) -> compat.Prepared:
    """What ``generate`` prepared, with the options that won."""
    main = dataclasses.replace(prepared, config=settings.config, model_kwargs={**prepared.model_kwargs})
    main.model_kwargs["use_cache"] = settings.config.use_cache
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(settings.config, name):
            main.model_kwargs[name] = True
    return main


def _branch_inputs(model: Any, prompts: Sequence[Sequence[int]], settings: Settings) -> compat.Prepared:
    ids, mask = left_pad(prompts, settings.pad, model.device)
    return compat.prepare(
        model,
        ids,
        mask,
        max_new_tokens=settings.max_new_tokens,
        pad_token_id=settings.pad,
        use_cache=settings.config.use_cache,
    )


def left_pad(prompts: Sequence[Sequence[int]], pad: int, device: Any) -> tuple[Tensor, Tensor]:
    """[R, T] ids and attention mask."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _steps(
    model: Any,
    prepared: compat.Prepared,
    recipe: Recipe,
    settings: Settings,
    given: Given,
    sequences: Sequence[SequenceState],
) -> list[tuple[str, Step]]:
    """The chain: the caller's processors, those of options, rules, warpers, and what must come last."""
    callers = compat.callers_processors(model, prepared)
    made = option_steps(
        model, prepared, settings, sequences, {type(own) for own in callers}, rules=recipe.rules is not None
    )
    rules = []
    for rule in merge_rules(recipe.rules or (), settings) if recipe.rules is not None else ():
        with guarded(rule, "resolve"):
            rules.append(rule.resolve(given.tokenizer))
    steps: list[tuple[str, Step]] = [(type(own).__name__, CallersStep(own)) for own in callers]
    processors, warpers, last = made
    return [*steps, *processors, *((rule.kind, rule) for rule in rules), *warpers, *last]
