"""Who wins: the options of one call, merged from the call, the recipe and the model.

A ``generate`` option that differs from the model's default beats the recipe, the recipe beats the default. A value equal to
the default cannot be seen.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from decodekit.core import compat, registry
from decodekit.core.errors import InputError, Refused
from decodekit.core.protocols import Rule, SearchStrategy
from decodekit.recipe import Generation, Recipe

# A warper option that the call names replaces the recipe's rule of this kind.
_RULE_OF = {
    "temperature": ("temperature", "t"),
    "top_k": ("top_k", "k"),
    "top_p": ("top_p", "p"),
    "min_p": ("min_p", "p"),
}


@dataclass(frozen=True)
class Settings:
    """What holds for one call.

    Attributes:
        config: every winning generation option.
        named: options that the call named.
        max_new_tokens: most tokens a row may get.
        eos: ids that end a row.
        pad: id that fills ended rows.
        stop_strings: texts that end a row.
        copies: rows that are still to be made of each given one (a recipe's ``num_return_sequences``).
    """

    config: GenerationConfig
    named: frozenset[str]
    max_new_tokens: int
    eos: tuple[int, ...]
    pad: int
    stop_strings: tuple[str, ...]
    copies: int


def resolve(model: Any, prepared: compat.Prepared, recipe: Recipe) -> Settings:
    """Merge the options of the call, the recipe and the model.

    Raises:
        Refused: an option asks for something that this recipe's strategy cannot do.
        InputError: no room is left for a new token.
    """
    call, default = prepared.config, compat.defaults(model)
    wanted = recipe.generation.model_dump(exclude_none=True, exclude={"seed"})
    winning = copy.copy(call)
    width = prepared.input_ids.shape[1]
    named = {name for name in vars(call) if not name.startswith("_") and _differs(call, default, name)}
    named -= {"max_length", "min_length"}
    if _names_length(model, call, default, width):
        named |= {"max_new_tokens", "max_length"}
    elif {"max_new_tokens", "max_length"} & wanted.keys():
        winning.max_new_tokens, winning.max_length = None, None
    for name, value in wanted.items():
        if name not in named:
            setattr(winning, name, value)
    if winning.max_new_tokens is not None:
        winning.max_length = width + winning.max_new_tokens
    if {"eos_token_id", "pad_token_id", "bos_token_id"} & (wanted.keys() - named):
        compat.set_special_tokens(winning, prepared.input_ids.device)
    _refuse(winning, recipe)
    max_new_tokens = winning.max_length - width
    if max_new_tokens < 1:
        raise InputError(
            f"max_length {winning.max_length} leaves no room after a prompt of {width} tokens; raise max_new_tokens"
        )
    eos = winning.eos_token_id
    eos = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    pad = winning.pad_token_id if winning.pad_token_id is not None else (eos[0] if eos else 0)
    stops = winning.stop_strings or ()
    copies = winning.num_return_sequences // max(1, call.num_return_sequences)
    return Settings(
        winning,
        frozenset(named),
        max_new_tokens,
        eos,
        pad,
        (stops,) if isinstance(stops, str) else tuple(stops),
        copies,
    )


def _differs(call: GenerationConfig, default: GenerationConfig, name: str) -> bool:
    return bool(getattr(call, name, None) != getattr(default, name, None))


def _names_length(model: Any, call: GenerationConfig, default: GenerationConfig, width: int) -> bool:
    """Whether the call set a length: ``generate`` has already added the prompt to a default ``max_length``."""
    if call.max_new_tokens != default.max_new_tokens:
        return True
    added = default.max_length + width
    unseen = {default.max_length, added, min(added, compat.context_length(model) or added)}
    return call.max_new_tokens is None and call.max_length not in unseen


def _refuse(winning: GenerationConfig, recipe: Recipe) -> None:
    for option, instead in Generation.elsewhere.items():
        if getattr(winning, option, None):
            raise Refused(f"{option}={getattr(winning, option)!r} was given to generate; with decodekit say {instead}")
    beams = winning.num_beams or 1
    if beams > 1 and not isinstance(recipe.strategy, SearchStrategy):
        raise Refused(
            f"num_beams={beams} was given, but strategy {recipe.strategy.kind!r} keeps one hypothesis a row; "
            "leave num_beams out or use a beam strategy"
        )


def merge_rules(rules: tuple[Rule, ...], settings: Settings) -> tuple[Rule, ...]:
    """The recipe's rules, with those replaced whose option the call named."""
    merged = list(rules)
    for option, (kind, field) in _RULE_OF.items():
        if option not in settings.named:
            continue
        value = getattr(settings.config, option)
        if option == "top_k" and value == 0:  # how generate says "off"
            merged = [own for own in merged if own.kind != kind]
            continue
        rule: Any = registry.create("rules", {"kind": kind, field: value})
        places = [index for index, own in enumerate(merged) if own.kind == kind]
        for index in places:
            merged[index] = rule
        if not places:
            merged.append(rule)
    return tuple(merged)
