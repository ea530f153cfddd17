"""The branches of a call's rows, and the sessions that run them: one a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from decodekit.core import compat
from decodekit.core.errors import InputError, PluginError, Refused
from decodekit.core.protocols import Drafter, SearchStrategy, TokenStrategy
from decodekit.core.types import Branch
from decodekit.recipe import Recipe
from decodekit.runtime.caches import context_length, paged_cache
from decodekit.runtime.guard import guarded
from decodekit.runtime.paged_session import PagedSession
from decodekit.runtime.plan import Plan
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.session import DynamicSession, Session
from decodekit.runtime.settings import Settings


def too_long(length: int, context: int | None) -> str | None:
    """Why a prompt of this many tokens cannot be decoded; ``None`` when it can."""
    if context is None or length < context:
        return None
    return f"the prompt has {length} tokens, the model's context holds {context} with the output; shorten it"


def unknown_id(ids: Sequence[int], model: Any) -> str | None:
    """Why a prompt of these ids cannot be decoded: the first that the model has no embedding for."""
    known = model.get_input_embeddings().weight.shape[0]
    wrong = next((token for token in ids if not 0 <= token < known), None)
    if wrong is None:
        return None
    return f"the prompt holds the id {wrong}; the model has ids 0 to {known - 1}: is the tokenizer the model's own?"


def branches_of(
    strategy: TokenStrategy, sequence: SequenceState, context_of: Callable[[Branch], int | None]
) -> dict[str, Branch]:
    """The branches of a row by name; none, and the row has failed, where it cannot have them.

    The prompt of the main branch becomes the row's, and the context that is left shortest its limit.
    """
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
    prompt, rooms = own[0].prompt_ids, []
    for branch in own:
        length, context = len(branch.prompt_ids), context_of(branch)
        why = "its prompt is empty" if not length else too_long(length, context)
        if why is not None:
            sequence.fail(f"branch {branch.name!r} of {strategy.kind!r}: {why}")
            return {}
        if context is not None:
            rooms.append(len(prompt) + context - length)
    sequence.request = dataclasses.replace(sequence.request, prompt_ids=prompt)
    sequence.limits = dataclasses.replace(sequence.limits, context=min(rooms, default=None))
    sequence.prompts = {branch.name: branch.prompt_ids for branch in own}
    return {branch.name: branch for branch in own}


def sessions_of(
    model: Any,
    plan: Plan,
    prepared: compat.Prepared,
    recipe: Recipe,
    settings: Settings,
    sequences: Sequence[SequenceState],
    models: Mapping[str, Any],
    *,
    scoring: bool,
) -> list[Session]:
    """A session a model; the main branch goes on from what ``generate`` prepared."""
    strategy, layers = plan.strategy, hidden_layers(plan, model)
    # A row that cannot be decoded still takes its place in a rectangular batch.
    blank = [sequence.request.prompt_ids or (settings.pad,) for sequence in sequences]

    def context_of(branch: Branch) -> int | None:
        given = prepared.model_kwargs.get(compat.CACHE_KEY) if branch.model == "main" else None
        return context_length(models.get(branch.model, model), recipe, given)

    branches = [branches_of(strategy, sequence, context_of) for sequence in sequences]
    runs = {name: branch.model for own in branches for name, branch in own.items()} or {"main": "main"}
    prompts = {
        name: [own[name].prompt_ids if name in own else instead for own, instead in zip(branches, blank, strict=True)]
        for name in runs
    }
    sessions: list[Session] = []
    for model_name in sorted(set(runs.values()), key="main".__ne__):
        runner = model if model_name == "main" else other_model(model, model_name, strategy, models)
        own_prompts = {name: prompts[name] for name, other in runs.items() if other == model_name}
        kept = layers if "main" in own_prompts else ()
        cache = None if scoring else paged_cache(runner, prepared, recipe, settings, own_prompts, plan)
        if cache is not None:
            session = PagedSession(runner, cache, layers=kept)
            for row in range(len(sequences)):
                own = {name: rows[row] for name, rows in own_prompts.items()}
                session.expect(row, own, keep_prompt=bool(kept) and plan.reads_prompt)
            sessions.append(session)
            continue
        inputs = {
            name: _main_inputs(prepared, settings)
            if name == "main" and rows == blank
            else _branch_inputs(runner, rows, settings)
            for name, rows in own_prompts.items()
        }
        sessions.append(DynamicSession(runner, inputs, layers=kept, pad=settings.pad))
    return sessions


def other_model(model: Any, name: str, strategy: TokenStrategy, models: Mapping[str, Any]) -> Any:
    """The model of this name, which is fed the tokens that are chosen for the main one."""
    if (other := models.get(name)) is None:
        raise InputError(
            f"strategy {strategy.kind!r} needs a model called {name!r}; give decoder.bind(models={{{name!r}: model}})"
        )
    compat.check_model(other)
    sizes = [compat.text_config(own).vocab_size for own in (model, other)]
    if sizes[0] != sizes[1]:
        raise Refused(
            f"strategy {strategy.kind!r}: model {name!r} has {sizes[1]} tokens and the main model {sizes[0]}; give one of the "
            "same vocabulary"
        )
    return other


def hidden_layers(plan: Plan, model: Any) -> tuple[int, ...]:
    """The hidden layers that the strategies of a plan read, each once."""
    readers = [own for own in (plan.strategy, plan.search, plan.drafter) if own is not None]
    return tuple(dict.fromkeys(layer for own in readers for layer in _hidden_layers(own, compat.text_config(model))))


def _hidden_layers(strategy: TokenStrategy | SearchStrategy | Drafter, config: Any) -> tuple[int, ...]:
    with guarded(strategy, "hidden_layers"):
        layers = strategy.hidden_layers(config)
        wrong = [layer for layer in layers if not 0 <= layer <= config.num_hidden_layers]
        if wrong:
            raise PluginError(
                f"{strategy.kind!r} asks for hidden layers {wrong}; this model has 0 to {config.num_hidden_layers}"
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
