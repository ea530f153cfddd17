"""Plain samples of a prompt, drawn once and shared by all recipes: what a budget buys is the first so many of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decodekit.core.protocols import SequenceStrategy
from decodekit.core.types import Output
from decodekit.recipe import Recipe, load_recipe

TEMPERATURE = 0.7
MOST = 64
"""Most samples of a prompt; a recipe that would buy more is held against so many."""
SEEDS = 1 << 32
"""Of the first sample, the next has the next: beyond the seeds of recipes, whose own samples would be these again."""

Sample = dict[str, Any]
"""``text``, ``tokens`` (how many) and ``score`` (mean log-probability under the model, nats)."""


def sampler(options: Mapping[str, Any]) -> Recipe:
    """What a plain sample is decoded with, a call a sample, under generation options."""
    return load_recipe(
        {
            "strategy": {"kind": "best_of_n", "n": 1, "scorer": "logprob"},
            "rules": [{"kind": "temperature", "t": TEMPERATURE}],
            "generation": {**options, "do_sample": True},
        }
    )


def draws_plain_samples(recipe: Recipe, plain: Recipe) -> bool:
    """Whether the candidates of a recipe are samples as ``plain``, a :func:`sampler`, draws them."""
    if not isinstance(recipe.strategy, SequenceStrategy) or recipe.strategy.inner.kind != "sample":
        return False
    # These say which samples are drawn, not from what.
    generation = recipe.generation.model_copy(update={"seed": None, "num_return_sequences": None})
    return recipe.model_copy(update={"strategy": plain.strategy, "generation": generation}) == plain


def samples_of(output: Output) -> list[Sample]:
    """The candidates of an output; none where some did not end by themselves, as those that did would be the short ones."""
    if any(own["finish_reason"] in ("cancelled", "error") for own in output.candidates):
        return []
    return [
        {"text": own["text"], "tokens": len(own["token_ids"]), "score": own["mean_logprob"]}
        for own in output.candidates
    ]


def price(prompt_tokens: int, samples: Sequence[Sample]) -> int:
    """Tokens that samples forward: the prompt once, and of each all but its last token."""
    return prompt_tokens + sum(max(0, sample["tokens"] - 1) for sample in samples)


def lacking(samples: Sequence[Sample], budget: int, prompt_tokens: int, output_tokens: int) -> int:
    """How many more samples to draw towards a budget of forwarded tokens, rather too few than too many; 0 when it is spent.

    Args:
        samples: those that there are.
        budget: forwarded tokens.
        prompt_tokens: of the prompt.
        output_tokens: of a plain output, for the length of samples while there are none.
    """
    left = budget - price(prompt_tokens, samples)
    if left <= 0 or len(samples) >= MOST:
        return 0
    length = sum(sample["tokens"] for sample in samples) / len(samples) if samples else output_tokens
    return min(MOST - len(samples), max(1, int(left / max(length - 1, 1))))
