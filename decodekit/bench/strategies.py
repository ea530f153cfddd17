"""What a token of a strategy costs beside plain decoding: same loop, prompts and number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from decodekit.bench.decode import random_model, reads
from decodekit.bench.prompts import token_prompts
from decodekit.runtime.api import load
from decodekit.runtime.decoder import Decoder
from decodekit.runtime.shelf import release

__all__ = ["reads", "run"]

PROMPT_TOKENS = (128, 1024)
NEW_TOKENS = 32
ROUNDS = 5

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "cad": {"kind": "cad"},
    "cfg": {"kind": "cfg"},
    "contrastive_search": {"kind": "contrastive_search", "top_k": 4},
}
"""A label, and the strategy of a recipe; every one is given the first half of the prompt as its context."""


SHAPE_PROMPT_TOKENS, SHAPE_NEW_TOKENS = 512, 128
SAMPLED = {"do_sample": True, "seed": 0}
_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["name", "count"],
    },
    "minItems": 60,  # the text does not end before the tokens that are timed
}
SHAPE_RECIPES: Mapping[str, Mapping[str, Any]] = {
    "dola": {"strategy": "dola"},
    "cad": {"strategy": "cad"},
    "rules": {
        "rules": [
            {"kind": "repetition_penalty", "penalty": 1.1},
            {"kind": "temperature", "t": 0.8},
            {"kind": "top_k", "k": 50},
            {"kind": "top_p", "p": 0.9},
            {"kind": "min_p", "p": 0.05},
        ],
        "generation": SAMPLED,
    },
    "json_schema": {"constraint": {"kind": "json_schema", "schema": _SCHEMA}, "rules": [], "generation": SAMPLED},
}
"""A label, and a recipe that is timed on a model of a given shape."""


class Timing(NamedTuple):
    """Seconds of one call: the median between two tokens, and the whole."""

    step: float
    whole: float


def run(model: Any, tokenizer: Any, prompts: Sequence[str], status: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row a strategy and prompt length, at batch 1: medians over rounds in which plain decoding and the strategy take turns.

    ``ratio`` is that of the median milliseconds between two tokens, ``whole_ratio`` that of the call with its prefill. Where
    one branch costs 1, two forwards a token cost 2, and four candidates forwarded one by one cost 4. Of a ``config.json``,
    which is measured with random weights in bfloat16, there is a row a recipe, rules and constraints among them.
    """
    if prompts and not isinstance(prompts[0], str):
        return _of_shape(prompts[0], tokenizer, status)
    plain = load({})
    rows = []
    # min_new_tokens: both must decode the same number of tokens in every round.
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    for name, strategy in STRATEGIES.items():
        ours = load({"strategy": strategy})
        for length in PROMPT_TOKENS:
            status(f"{name} after {length} tokens")
            ids = token_prompts(tokenizer, prompts, 1, length)[0].tolist()
            halves = [tokenizer.decode(ids[: length // 2]), tokenizer.decode(ids[length // 2 :])]
            prompt = {"prompt": "".join(halves), "context": halves[0]}
            timed = [
                (
                    _time(plain, model, tokenizer, prompt, **options),
                    _time(ours, model, tokenizer, prompt, **options),
                )
                for _ in range(ROUNDS)
            ]
            rows.append(
                {
                    "strategy": name,
                    "prompt_tokens": length,
                    "new_tokens": NEW_TOKENS,
                    "plain_ms_a_token": median(1000 * one.step for one, _ in timed),
                    "ms_a_token": median(1000 * other.step for _, other in timed),
                    "ratio": median(other.step / one.step for one, other in timed),
                    "whole_ratio": median(other.whole / one.whole for one, other in timed),
                }
            )
    return rows


def _of_shape(config: Any, tokenizer: Any, status: Callable[[str], None]) -> list[dict[str, Any]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    status("random weights")
    model = random_model(config, device)
    known = min(config.vocab_size, len(tokenizer))
    context, ids = torch.randint(known, (2, SHAPE_PROMPT_TOKENS)).tolist()
    prompt = {"prompt": tokenizer.decode(ids), "context": tokenizer.decode(context)}
    plain, rows = load({}), []
    for name, recipe in SHAPE_RECIPES.items():
        status(name)
        ours = load(recipe)
        # A constrained text could end only with the EOS.
        options: dict[str, Any] = {"max_new_tokens": SHAPE_NEW_TOKENS}
        ends = {"eos_token_id": tokenizer.eos_token_id if name == "json_schema" else None}
        timed = [
            (
                _time(plain, model, tokenizer, prompt, eos_token_id=None, **options),
                _time(ours, model, tokenizer, prompt, **ends, **options),
            )
            for _ in range(1 + ROUNDS)
        ][1:]
        rows.append(
            {
                "strategy": name,
                "prompt_tokens": SHAPE_PROMPT_TOKENS,
                "new_tokens": SHAPE_NEW_TOKENS,
                "plain_ms_a_token": median(1000 * one.step for one, _ in timed),
                "ms_a_token": median(1000 * other.step for _, other in timed),
                "ratio": median(other.step / one.step for one, other in timed),
            }
        )
    release(model)
    return rows


def _time(decoder: Decoder, model: Any, tokenizer: Any, prompt: Mapping[str, Any], **options: Any) -> Timing:
    [output] = decoder.run(model, tokenizer, prompt, raw=True, **options)
    return Timing(output.stats["itl_p50_s"], output.stats["prefill_s"] + output.stats["decode_s"])
