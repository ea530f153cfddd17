"""The laws of a drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from decodekit.core.protocols import Drafter
from decodekit.core.types import Output
from decodekit.recipe import Generation, Recipe
from decodekit.runtime.text_call import TextCall
from decodekit.testing.models import Family, tiny_model, tiny_tokenizer
from decodekit.testing.values import broken, check_value

PROMPTS = ("the the the the", "a", "1, 2, 3, 1, 2, 3, 1, ")


def check_drafter(
    drafter: Drafter,
    *,
    families: Sequence[Family] = ("dense", "sliding", "hybrid"),
    models: Mapping[str, Any] | None = None,
    new_tokens: int = 12,
) -> int:
    """Check the laws that every drafter obeys, on tiny models in float64: it is a value, never fails, and changes no token.

    Greedy decoding gives the tokens that it gives without a draft, and so does sampling with the same seed, unless drafts
    have a distribution of their own.

    Args:
        drafter: the drafter.
        families: the tiny models to try.
        models: other models that it needs, by name.
        new_tokens: tokens to decode.

    Returns:
        how many drafted tokens were accepted, in all.

    Raises:
        AssertionError: names the law that does not hold, and where.
    """
    check_value(drafter)
    steady = drafter.model_copy(update={"schedule": "constant"})
    accepted = 0
    for family in families:
        model = tiny_model(family, dtype=torch.float64)
        for sample in (False, True):
            plain = _decode(None, model, sample, new_tokens, {})
            drafted = _decode(steady, model, sample, new_tokens, models or {})
            for prompt, one, other in zip(PROMPTS, plain, drafted, strict=True):
                why = other.error or other.stats.get("drafter_error")
                if why is not None:
                    raise broken(drafter, "it never fails", f"{prompt!r} on a {family} model: {why}")
                own = steady.models() if sample else ()  # a model's own draws are accepted by rejection sampling
                if one.token_ids != other.token_ids and not own:
                    found = f"{prompt!r} gives {other.token_ids} instead of {one.token_ids} on a {family} model"
                    raise broken(drafter, "drafts change no token", found)
                accepted += other.stats["accepted_tokens"]
    return accepted


def _decode(
    drafter: Drafter | None, model: Any, sample: bool, new_tokens: int, models: Mapping[str, Any]
) -> list[Output]:
    tokenizer = tiny_tokenizer()
    # So that outputs repeat, and there is something to be right about.
    bias = {"kind": "logit_bias", "bias": {"the": 9.0, " the": 9.0}}
    generation = Generation(
        max_new_tokens=new_tokens, suppress_tokens=[tokenizer.eos_token_id], do_sample=sample, seed=0
    )
    recipe = Recipe.model_validate({"drafter": drafter, "rules": [bias], "generation": generation})
    call = TextCall(recipe, model, tokenizer, PROMPTS, {}, models=models)
    for _ in call.run():
        pass
    return [output for _, output in call.outputs()]
