"""Who wins: the options of one call, merged from the call, the recipe and the model.

A ``generate`` option that differs from the model's default beats the recipe, the recipe beats the default. A value equal to
the default cannot be seen.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from decodekit.core import compat, registry
from decodekit.core.errors import Refused
from decodekit.core.protocols import Rule
from decodekit.recipe import Generation, Recipe, takes_beams

# An option that the call names takes the place of the recipe's rule of this kind ...
_RULE_OF: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "temperature": ("temperature", "t", {}),
    "top_h": ("top_h", "h", {"mode": "compat"}),  # the option promises the numbers of generate
    "top_k": ("top_k", "k", {}),
    "top_p": ("top_p", "p", {}),
    "min_p": ("min_p", "p", {}),
    "typical_p": ("typical", "p", {}),
    "epsilon_cutoff": ("epsilon", "epsilon", {}),
    "eta_cutoff": ("eta", "epsilon", {}),
}
# ... or, where transformers makes a processor of it, only puts that rule out of force ...
_PROCESSOR_OF = {
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "bad_words_ids": "bad_words",
    "min_new_tokens": "min_length",
    "min_length": "min_length",
    "watermarking_config": "watermark",
}
_OFF_AT_ZERO = ("top_k", "min_p", "epsilon_cutoff", "eta_cutoff")


@dataclass(frozen=True)
class Settings:
    """What holds for one call.

    Attributes:
        config: every winning generation option.
        named: options that the call named.
        max_new_tokens: most tokens of output; ``None`` where ``max_length`` says it.
        max_length: most tokens of prompt and output of a row; ``None`` where ``max_new_tokens`` says it.
        eos: ids that end a row.
        pad: id that fills ended rows.
        stop_strings: texts that end a row.
        copies: rows that are still to be made of each given one (a recipe's ``num_return_sequences``).
        criteria: the caller's own stopping criteria.
    """

    config: GenerationConfig
    named: frozenset[str]
    max_new_tokens: int | None
    max_length: int | None
    eos: tuple[int, ...]
    pad: int
    stop_strings: tuple[str, ...]
    copies: int
    criteria: compat.Criteria

    def room(self, prompt_tokens: int) -> int:
        """Tokens that a row with this prompt may still get."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        assert self.max_length is not None
        return self.max_length - prompt_tokens


_ALWAYS = {"max_length", "num_return_sequences"}
"""Options without which there is no call: None leaves them to the model."""


def resolve(model: Any, prepared: compat.Prepared, recipe: Recipe, named: Collection[str] = ()) -> Settings:
    """Merge the options of the call, the recipe and the model.

    Args:
        model: the model being decoded.
        prepared: what ``generate`` handed over.
        recipe: the recipe.
        named: options of the recipe that the call itself named (``Decoder.run`` sees them all).

    Raises:
        Refused: an option asks for something that this recipe's strategy cannot do.
    """
    call, default = prepared.config, compat.defaults(model)
    criteria = compat.callers_criteria(prepared)
    wanted = recipe.generation.model_dump(exclude_none=True, exclude={"seed"})
    winning = copy.copy(call)
    width = prepared.input_ids.shape[1]
    seen = {name for name in vars(call) if not name.startswith("_") and _differs(call, default, name)}
    seen -= {"max_length", "min_length"}
    if call.min_new_tokens is not None:
        winning.min_length = 0  # generate has added the padded prompt to it; min_new_tokens says the same by itself
    elif call.min_length != default.min_length:
        seen.add("min_length")
    for name, value in wanted.items():
        if name not in seen:
            setattr(winning, name, value)
    # As in a call of generate, None says that the model's own default is not to hold.
    off = {name for name in named if name not in wanted and hasattr(winning, name)} - _ALWAYS
    for name in off:
        setattr(winning, name, None)
    lengths = _lengths(model, call, default, wanted, off, criteria, width)
    if {"eos_token_id", "pad_token_id", "bos_token_id"} & (off | (wanted.keys() - seen)):
        compat.set_special_tokens(winning, prepared.input_ids.device)
    _refuse(winning, recipe)
    eos = winning.eos_token_id
    eos = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    stops = winning.stop_strings or (None if "stop_strings" in off else default.stop_strings) or ()
    if criteria.replaces_time:
        winning.max_time = None
    return Settings(
        config=winning,
        named=frozenset(seen) | frozenset(named),
        max_new_tokens=lengths[0],
        max_length=lengths[1],
        eos=() if criteria.replaces_eos else eos,
        pad=winning.pad_token_id if winning.pad_token_id is not None else (eos[0] if eos else 0),
        stop_strings=(stops,) if isinstance(stops, str) else tuple(stops),
        copies=_copies(winning, call, prepared),
        criteria=criteria,
    )


def _differs(call: GenerationConfig, default: GenerationConfig, name: str) -> bool:
    return bool(getattr(call, name, None) != getattr(default, name, None))


def _lengths(
    model: Any,
    call: GenerationConfig,
    default: GenerationConfig,
    wanted: Mapping[str, Any],
    off: Collection[str],
    criteria: compat.Criteria,
    width: int,
) -> tuple[int | None, int | None]:
    """(max_new_tokens, max_length), one of them ``None``; ``generate`` has added the padded prompt to a default length."""
    if call.max_new_tokens != default.max_new_tokens and call.max_new_tokens is not None:
        return call.max_new_tokens, None
    if criteria.max_length is not None:
        return criteria.max_length - width, None
    own = model.generation_config.max_length
    added = default.max_length + width
    unseen = {own} if own is not None else {added, min(added, compat.context_length(model) or added)}
    if call.max_new_tokens is not None:
        unseen.add(call.max_new_tokens + width)  # what generate makes of a model's default
    if call.max_length not in unseen:
        return None, call.max_length
    if "max_new_tokens" in wanted:
        return wanted["max_new_tokens"], None
    if "max_length" in wanted:
        return None, wanted["max_length"]
    if call.max_new_tokens is not None and "max_new_tokens" not in off:
        return call.max_new_tokens, None
    # A model's own default counts the prompt, transformers' default of 20 does not.
    return (None, own) if own is not None else (call.max_length - width, None)


def _copies(winning: GenerationConfig, call: GenerationConfig, prepared: compat.Prepared) -> int:
    given, asked = call.num_return_sequences or 1, winning.num_return_sequences or 1
    if asked == given:
        return 1
    cache = prepared.model_kwargs.get(compat.CACHE_KEY)
    reason = None
    if asked % given:
        reason = f"the call has already made {given} of each"
    elif cache is not None and getattr(cache, "_is_user_defined", False):
        reason = "the call brings a cache for one row a prompt"
    elif any(type(own).__name__ == "PrefixConstrainedLogitsProcessor" for own in prepared.logits_processor):
        reason = "prefix_allowed_tokens_fn counts the rows of the call"
    if reason is not None:
        raise Refused(
            f"the recipe's num_return_sequences={asked} cannot be honoured: {reason}; give num_return_sequences to the call"
        )
    return asked // given


def _refuse(winning: GenerationConfig, recipe: Recipe) -> None:
    for option, instead in Generation.elsewhere.items():
        if option != "cache_implementation" and getattr(winning, option, None):
            raise Refused(f"{option}={getattr(winning, option)!r} was given to generate; with decodekit say {instead}")
    beams = winning.num_beams or 1
    if beams > 1 and not takes_beams(recipe.strategy):
        raise Refused(
            f"num_beams={beams} was given, but strategy {recipe.strategy.kind!r} keeps one hypothesis a row; "
            "leave num_beams out or use a beam strategy"
        )


def merge_rules(rules: tuple[Rule, ...], settings: Settings) -> tuple[Rule, ...]:
    """The recipe's rules that hold, those replaced whose option the call named; greedy leaves out what only sampling needs."""
    sample = bool(settings.config.do_sample)
    gone = {kind for option, kind in _PROCESSOR_OF.items() if option in settings.named}
    merged = [rule for rule in rules if rule.kind not in gone and (sample or not rule.sampling_only)]
    if not sample:
        return tuple(merged)
    for option, (kind, field, more) in _RULE_OF.items():
        value = getattr(settings.config, option)
        if option not in settings.named or value is None:
            continue
        place = next((index for index, own in enumerate(merged) if own.kind == kind), None)
        merged = [own for own in merged if own.kind != kind]
        if option in _OFF_AT_ZERO and value == 0:  # how generate says "off"
            continue
        rule: Any = registry.create("rules", {"kind": f"{registry.OWN_DISTRIBUTION}:{kind}", field: value, **more})
        if place is None:
            # Temperature comes before what cuts the distribution, as in generate.
            cuts = (index for index, own in enumerate(merged) if own.sampling_only)
            place = next(cuts, len(merged)) if option == "temperature" else len(merged)
        merged.insert(place, rule)
    return tuple(merged)


def processor_options(settings: Settings, *, rules: bool, room: int, prompt_tokens: int) -> GenerationConfig:
    """The options from which transformers makes its processors for a row.

    Args:
        settings: what holds for the call.
        rules: whether the recipe has rules, which replace the sampling warpers.
        room: tokens that the row may still get.
        prompt_tokens: of the row.
    """
    config = copy.copy(settings.config)
    config.max_length = prompt_tokens + room
    if rules:
        config.temperature, config.top_k, config.top_p = 1.0, 0, 1.0
        for option in ("top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
            setattr(config, option, None)
    return config
