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
from transformers.generation import LogitsProcessor

from decodekit.core import compat
from decodekit.core.errors import InputError, Refused
from decodekit.core.protocols import Rule, TokenStrategy
from decodekit.core.random import Stream, fresh_seed, prompt_digest
from decodekit.core.types import Branch, Request, Rows
from decodekit.recipe import Recipe
from decodekit.runtime.caches import paged_cache
from decodekit.runtime.loop import Limits, Loop, SequenceState
from decodekit.runtime.pipeline import Pipeline, Step
from decodekit.runtime.session import DynamicSession, PagedSession, Session
from decodekit.runtime.settings import Settings, merge_rules, resolve
from decodekit.runtime.text import TextTracker, encoder


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
    """

    tokenizer: Any = None
    models: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: Sequence[Mapping[str, Any]] = ()
    raw: bool = False
    want_text: bool = False
    keep_logprobs: bool = False
    keep_stages: bool = False
    scoring: bool = False


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


class ProcessorStep:
    """One of transformers' logits processors as a step of the chain.

    Args:
        processor: sees the whole padded batch, as in ``generate``: it may keep something for each row.

    Attributes:
        loop: where the padded ids are; ``None`` when positions are scored that are not the rows' last.
    """

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor = processor
        self.loop: Loop | None = None

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        """[P, V] to [P, V]."""
        if self.loop is None:
            parts = zip(rows.tokens, rows.lengths.tolist(), logits, strict=True)
            return torch.cat([self._processor(own[:n].unsqueeze(0), row.unsqueeze(0).clone()) for own, n, row in parts])
        ids = self.loop.input_ids
        if len(rows) == ids.shape[0]:
            return self._processor(ids, logits.clone())
        whole = logits.new_zeros(ids.shape[0], logits.shape[-1])
        index = torch.tensor(rows.requests, device=ids.device)
        whole[index] = logits
        return self._processor(ids, whole)[index]


def assemble(model: Any, prepared: compat.Prepared, recipe: Recipe, given: Given) -> Call:
    """Everything that can be refused is refused here, before the prompt is prefilled.

    Raises:
        Refused: the model, an option or a combination cannot be honoured.
        InputError: something that the recipe needs was not given.
    """
    started = time.perf_counter()
    compat.check_model(model)
    strategy = _strategy(recipe).resolve(given.tokenizer)
    settings = resolve(model, prepared, recipe)
    prompts = _prompt_count(prepared, settings)
    if given.inputs and len(given.inputs) != prompts:
        raise InputError(f"dk_inputs has {len(given.inputs)} entries for {prompts} prompts; give one dict a prompt")
    if settings.copies > 1:
        compat.expand(model, prepared, settings.copies)
    seed = recipe.generation.seed if recipe.generation.seed is not None else fresh_seed()
    requests = _requests(prepared, given, prompts, seed)
    limits = Limits(
        settings.max_new_tokens,
        frozenset(settings.eos),
        started + settings.config.max_time if settings.config.max_time is not None else None,
        compat.context_length(model),
    )
    if settings.stop_strings and given.tokenizer is None:
        raise InputError(
            f"stop_strings {list(settings.stop_strings)} need a tokenizer; give dk_tokenizer=tokenizer or "
            "decoder.bind(tokenizer=...)"
        )
    reads = given.tokenizer is not None and (given.want_text or bool(settings.stop_strings))
    sequences = [
        SequenceState(request, row, limits, TextTracker(given.tokenizer, settings.stop_strings) if reads else None)
        for row, request in enumerate(requests)
    ]
    _end_unusable(sequences, prepared, limits)
    sessions = _sessions(model, strategy, prepared, recipe, settings, sequences, given)
    steps = _steps(model, prepared, recipe, settings, given)
    pipeline = Pipeline(steps, sample=bool(settings.config.do_sample), fallback=recipe.fallback, eos=settings.eos)
    loop = Loop(
        sessions,
        strategy,
        pipeline,
        sequences,
        input_ids=prepared.input_ids,
        pad=settings.pad,
        criteria=compat.callers_criteria(prepared),
        keep_logprobs=given.keep_logprobs,
        keep_stages=given.keep_stages,
    )
    loop.started = started
    if not given.scoring:
        for _, step in steps:
            if isinstance(step, ProcessorStep):
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


def _prompt_count(prepared: compat.Prepared, settings: Settings) -> int:
    """Prompts of the call; ``generate`` has already repeated each of them."""
    call = prepared.config
    return prepared.input_ids.shape[0] // max(call.num_beams or 1, call.num_return_sequences or 1)


def _requests(prepared: compat.Prepared, given: Given, prompts: int, seed: int) -> list[Request]:
    width = prepared.input_ids.shape[1]
    copies = prepared.input_ids.shape[0] // prompts
    seen: Counter[tuple[int, tuple[int, ...]]] = Counter()
    encode = encoder(given.tokenizer, raw=given.raw)
    requests = []
    for row, (ids, length) in enumerate(zip(prepared.input_ids.tolist(), prepared.lengths, strict=True)):
        prompt = tuple(ids[width - length :])
        inputs = given.inputs[row // copies] if given.inputs else {}
        own_seed = _seed(inputs, seed, row // copies)
        stream = Stream(own_seed, seen[own_seed, prompt], prompt_digest(prompt))
        seen[own_seed, prompt] += 1
        requests.append(Request(row, prompt, stream, inputs, encode))
    return requests


def _seed(inputs: Mapping[str, Any], default: int, prompt: int) -> int:
    seed = inputs.get("seed", default)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise InputError(f"the seed of prompt {prompt} must be a whole number from 0 to 2**64 - 1, got {seed!r}")
    return seed


def _end_unusable(sequences: Sequence[SequenceState], prepared: compat.Prepared, limits: Limits) -> None:
    """End rows that cannot be decoded, so that their neighbours can."""
    positions = prepared.model_kwargs.get("position_ids")
    for sequence in sequences:
        length = len(sequence.request.prompt_ids)
        if length == 0:
            sequence.fail(f"prompt {sequence.row} is empty: its attention mask covers no token")
        elif limits.context is not None and length >= limits.context:
            sequence.fail(
                f"prompt {sequence.row} has {length} tokens, the model's context holds {limits.context} with the output; "
                "shorten it"
            )
            if positions is not None and positions.ndim == 2 and positions.shape[0] == len(sequences):
                # Models with learned positions would fail for the whole batch on a position they do not have.
                positions[sequence.row].clamp_(max=limits.context - 1)


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
    layers = strategy.hidden_layers(compat.text_config(model))
    branches: list[dict[str, Branch]] = []
    for sequence in sequences:
        own: tuple[Branch, ...] = ()
        if sequence.error is None:
            try:
                own = strategy.branches(sequence.request)
            except InputError as error:
                sequence.fail(str(error))
        branches.append({branch.name: branch for branch in own})
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
    model: Any, prepared: compat.Prepared, recipe: Recipe, settings: Settings, given: Given
) -> list[tuple[str, Step]]:
    """The chain: the caller's processors, those of options, rules (or warpers), and what must come last."""
    made = compat.processors(model, prepared, settings.config, warp=recipe.rules is None)
    rules: tuple[Rule, ...] = ()
    if recipe.rules is not None:
        rules = tuple(rule.resolve(given.tokenizer) for rule in merge_rules(recipe.rules, settings))
        if not settings.config.do_sample:
            rules = tuple(rule for rule in rules if not rule.sampling_only)

    def borrow(processors: Sequence[LogitsProcessor]) -> list[tuple[str, Step]]:
        return [(type(processor).__name__, ProcessorStep(processor)) for processor in processors]

    return [*borrow(made.callers), *borrow(made.built), *((rule.kind, rule) for rule in rules), *borrow(made.last)]
