"""What a token of a strategy costs beside plain decoding: same loop, prompts and number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from decodekit.bench.prompts import token_prompts
from decodekit.runtime.api import load
from decodekit.runtime.decoder import Decoder

PROMPT_TOKENS = (128, 1024)
NEW_TOKENS = 32
ROUNDS = 5

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "cad": {"kind": "cad"},
    "cfg": {"kind": "cfg"},
    "contrastive_search": {"kind": "contrastive_search", "top_k": 4},
}
"""A label, and the strategy of a recipe; every one is given the first half of the prompt as its context."""


class Timing(NamedTuple):
    """Seconds of one call: the median between two tokens, and the whole."""

    step: float
    whole: float


def run(model: Any, tokenizer: Any, prompts: Sequence[str], status: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row a strategy and prompt length, at batch 1: medians over rounds in which plain decoding and the strategy take turns.

    ``ratio`` is that of the median milliseconds between two tokens, ``whole_ratio`` that of the call with its prefill. Where
    one branch costs 1, two forwards a token cost 2, and four candidates forwarded one by one cost 4.
    """
    plain = load({})
    rows = []
    for name, strategy in STRATEGIES.items():
        ours = load({"strategy": strategy})
        for length in PROMPT_TOKENS:
            status(f"{name} after {length} tokens")
            ids = token_prompts(tokenizer, prompts, 1, length)[0].tolist()
            halves = [tokenizer.decode(ids[: length // 2]), tokenizer.decode(ids[length // 2 :])]
            prompt = {"prompt": "".join(halves), "context": halves[0]}
            timed = [
                (_time(plain, model, tokenizer, prompt), _time(ours, model, tokenizer, prompt)) for _ in range(ROUNDS)
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


def _time(decoder: Decoder, model: Any, tokenizer: Any, prompt: Mapping[str, Any]) -> Timing:
    # min_new_tokens: both must decode the same number of tokens in every round.
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "raw": True}
    [output] = decoder.run(model, tokenizer, prompt, **options)
    return Timing(output.stats["itl_p50_s"], output.stats["prefill_s"] + output.stats["decode_s"])
