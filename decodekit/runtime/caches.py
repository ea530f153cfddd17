"""Which cache a call uses: blocks wherever the model and the options allow, transformers' own elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from decodekit.cache.ledger import ledger
from decodekit.cache.paged import PagedCache
from decodekit.cache.rectangle import room
from decodekit.cache.streaming import Stream
from decodekit.core import compat
from decodekit.core.errors import InputError, Refused
from decodekit.core.units import format_bytes, parse_bytes
from decodekit.kernels import triton_runs
from decodekit.recipe import PagedSpec, Recipe
from decodekit.runtime.plan import Plan
from decodekit.runtime.settings import Settings
from decodekit.runtime.shelf import borrow

_DEFAULT_BUDGET = 4 << 30

# What a forward of rows over a paged cache gives itself; anything else (images, embeddings) is for transformers' own loop.
_KNOWN_INPUTS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache", "past_key_values"}


def context_length(model: Any, recipe: Recipe, given: Any) -> int | None:
    """Most tokens of a row; ``None`` where the model has no such limit, or a window keeps positions below it.

    Args:
        model: the model.
        recipe: how to decode.
        given: the cache that the call brings, if any.
    """
    window = given.stream if isinstance(given, PagedCache) else getattr(recipe.cache, "window", None)
    return compat.context_length(model) if window is None else None


def paged_cache(
    model: Any,
    prepared: compat.Prepared,
    recipe: Recipe,
    settings: Settings,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    plan: Plan,
) -> PagedCache | None:
    """A paged cache for these branches of one model; ``None`` where transformers' own is to be used.

    Args:
        model: the model.
        prepared: what the call brings.
        recipe: what it asks for.
        settings: what holds for the call.
        prompts: a branch, its prompt of every row.
        plan: its strategies.

    Raises:
        Refused: the recipe asks for a paged cache, or needs one, and this call cannot have one.
        InputError: the budget does not hold the call.
    """
    spec = recipe.cache
    given = prepared.model_kwargs.get(compat.CACHE_KEY)
    if isinstance(given, PagedCache) and "main" in prompts:
        if given.stream is not None and plan.drafter is not None:
            raise Refused(
                f"drafter {plan.drafter.kind!r} verifies several tokens at once, and no mask tells their windows; give a cache "
                "without window"
            )
        return given
    needed = plan.needs_blocks
    asked = "cache" in recipe.model_fields_set
    if not isinstance(spec, PagedSpec):
        if needed is not None:
            raise Refused(
                f"{needed} forks its rows or takes tokens back, which a dynamic cache cannot; leave cache out"
            )
        return None
    on_gpu = triton_runs(model.device)
    alone = not asked and not plan.wants_blocks and sum(len(rows) for rows in prompts.values()) == 1
    if alone and not on_gpu:
        return None  # one row pads nothing and shares nothing: transformers' own cache does less for it
    reason = _why_not(prepared, settings, given)
    if reason is None:
        try:
            compat.cache_layers(model.config)
        except Refused as error:
            reason = str(error)
    if reason is not None:
        if needed is not None:
            raise Refused(f"{needed} needs the paged cache, which cannot be used here: {reason}")
        if asked:
            raise Refused(f"cache: {{kind: paged}} cannot be used here: {reason}; leave it out or say dynamic")
        return None
    blocks, keep_gathered = _blocks(model, spec, settings, prompts, plan)
    plain = spec.quantization is None and spec.window is None
    # Whoever gets the cache itself may keep it.
    if on_gpu and plain and spec.budget is None and not settings.config.return_dict_in_generate:
        return borrow(model, blocks, spec.block_size)
    return PagedCache(
        model.config,
        num_blocks=blocks,
        block_size=spec.block_size,
        device=model.device,
        quantization=spec.quantization,
        prefix_cache=False,
        keep_gathered=keep_gathered,
        sinks=0 if spec.window is None else spec.sinks,
        window=spec.window,
        preallocate=on_gpu and plain,
    )


def more_than_ids(prepared: compat.Prepared) -> list[str]:
    """What the forwards are given beside token ids: images, embeddings."""
    return sorted(
        name for name, value in prepared.model_kwargs.items() if name not in _KNOWN_INPUTS and value is not None
    )


def _why_not(prepared: compat.Prepared, settings: Settings, given: Any) -> str | None:
    config = settings.config
    if unknown := more_than_ids(prepared):
        return f"the forward takes more than ids: {', '.join(unknown)}"
    if not config.use_cache:
        return "use_cache is off"
    if given is not None and (getattr(given, "_is_user_defined", False) or config.cache_implementation is not None):
        return f"the call brings a {type(given).__name__}"
    for option in ("output_attentions", "output_hidden_states", "prefill_chunk_size", "compile_config"):
        if getattr(config, option, None):
            return f"{option} is served by transformers' own cache only"
    positions = prepared.model_kwargs.get("position_ids")
    if positions is not None and positions.ndim != 2:
        return "the model numbers positions in several dimensions"
    return None


def _blocks(
    model: Any, spec: PagedSpec, settings: Settings, prompts: Mapping[str, Sequence[Sequence[int]]], plan: Plan
) -> tuple[int, bool]:
    """Blocks that hold every row to its last token: a prompt once, and the rest of each row apart, or what a window keeps.

    And whether the budget also holds what steps gather of them.
    """
    size = spec.block_size
    different = {tuple(prompt) for rows in prompts.values() for prompt in rows}
    rows = sum(len(rows) for rows in prompts.values()) * plan.rows
    shared = sum(-(-len(prompt) // size) for prompt in different)
    # A row's own part: what it may still get, and the block that it shares with the others of its prompt until it grows.
    longest = max(settings.room(len(prompt)) for prompt in different)
    apart = -(-(longest + plan.drafted) // size) + 1
    # A draft that is a tree forks its row for every leaf, which copies the last block and may begin another.
    apart += 2 * plan.drafted
    needed = shared + rows * apart
    if spec.window is not None:
        needed = min(needed, rows * Stream(spec.sinks, spec.window).blocks(size, model.config))
    if spec.budget is None:
        return needed, True
    full, stored = (
        ledger(model.config, context=size, batch=1, dtype=model.dtype, block_size=size, quantization=quantization)
        for quantization in (None, spec.quantization)
    )
    block = max(1, stored.kv_bytes_per_token * size + stored.scale_bytes_per_block)
    # A block is quantized once it is full: each row has one that is not.
    filling = rows * full.kv_bytes_per_token * size if spec.quantization else 0
    available = max(0, spec.budget - filling) // block
    if available < needed:
        raise InputError(
            f"cache.budget {format_bytes(spec.budget)} holds {available * size} tokens in blocks of {size}; this call may "
            f"need {needed * size} ({rows} rows, up to {longest} new tokens each): raise it to "
            f"{format_bytes(needed * block + filling)}, or ask for fewer tokens"
        )
    widest = max(len(prompt) + settings.room(len(prompt)) for prompt in different)
    gathered = rows * room(widest) * full.kv_bytes_per_token
    return needed, needed * block + gathered <= spec.budget


def shared_cache(model: Any, spec: PagedSpec, blocks: int, *, prefix_cache: bool) -> PagedCache:
    """The cache of a model for requests that come and go."""
    on_gpu = triton_runs(model.device)
    return PagedCache(
        model.config,
        num_blocks=blocks,
        block_size=spec.block_size,
        device=model.device,
        quantization=spec.quantization,
        prefix_cache=prefix_cache,
        # Kernels read the blocks in place; elsewhere, gathering in every step takes longer than the model itself.
        keep_gathered=not on_gpu,
        sinks=0 if spec.window is None else spec.sinks,
        window=spec.window,
        # A graph knows K/V by their addresses.
        preallocate=on_gpu and spec.quantization is None and spec.window is None,
    )


def _free(device: torch.device) -> int:
    """Bytes that can be had on a GPU, with what torch keeps of memory that was given back."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def shared_blocks(models: Sequence[Any], spec: PagedSpec, budget: int | str | None, slots: int) -> int:
    """Blocks of each cache group that a budget holds beside the states of all slots, for all models together.

    Args:
        models: the main one first.
        spec: block size and quantization.
        budget: bytes; ``None`` for 4 GiB, or 80 % of what is free on a GPU.
        slots: most rows at once.

    Raises:
        InputError: it holds no block.
    """
    size, block, states = spec.block_size, 0, 0
    for model in models:
        counted = ledger(
            model.config, context=size, batch=1, dtype=model.dtype, block_size=size, quantization=spec.quantization
        )
        block += counted.kv_bytes_per_token * size + counted.scale_bytes_per_block
        states += counted.state_bytes_per_request + counted.conv_bytes_per_request
    if budget is None:
        device = models[0].device
        budget = int(0.8 * _free(device)) if device.type == "cuda" else _DEFAULT_BUDGET
    given = parse_bytes(budget)
    available = given - states * slots
    if (block and available < block) or available < 0:
        raise InputError(
            f"budget {format_bytes(given)} holds no block of {size} tokens ({format_bytes(block)}) beside the states of "
            f"{slots} slots ({format_bytes(states * slots)}); raise it, or ask for fewer slots"
        )
    context = compat.context_length(models[0])
    most = available // block if block else 1
    # More than all slots at their full length would only be kept for nobody.
    return min(most, slots * -(-context // size)) if context is not None and block else most
