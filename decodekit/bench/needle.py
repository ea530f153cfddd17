"""Is a fact found in a long prompt, by where it stands and how long the prompt is, for each kind of cache?"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from decodekit.runtime.api import load

CACHES: Mapping[str, Mapping[str, Any]] = {
    "full": {"kind": "paged"},
    "int8": {"kind": "paged", "quantization": "int8"},
    "int4": {"kind": "paged", "quantization": "int4"},
    "window": {"kind": "paged", "window": 128, "sinks": 4},
}
LENGTHS = (192, 768)
"""Tokens of a prompt, about."""
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where the fact stands: 0 is the beginning, 1 the end."""
CASES = 4
NEW_TOKENS = 12
NEEDLE = "The pass key is {key}. Remember it: {key} is the pass key."
QUESTION = "\nWhat is the pass key? The pass key is"


def run(model: Any, tokenizer: Any, prompts: Sequence[str], status: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row a cache and length: ``found`` of ``cases`` in all, and of ``CASES`` at each depth, greedily.

    ``prompts`` are what the fact is hidden in. A window sees what stands in its sinks and its last tokens alone, and what
    later tokens made of the rest.
    """
    rows = []
    for name, cache in CACHES.items():
        decoder = load({"cache": cache, "generation": {"max_new_tokens": NEW_TOKENS}})
        for length in LENGTHS:
            status(f"{name}, {length} tokens")
            hidden = [
                (depth, *_prompt(tokenizer, prompts, length, depth, case)) for depth in DEPTHS for case in range(CASES)
            ]
            outputs = decoder.run(model, tokenizer, [text for *_, text in hidden], raw=True)
            found = dict.fromkeys(DEPTHS, 0)
            for (depth, key, _), output in zip(hidden, outputs, strict=True):
                found[depth] += key in output.text
            rows.append(
                {
                    "cache": name,
                    "prompt_tokens": max(output.stats["prompt_tokens"] for output in outputs),
                    "cases": CASES * len(DEPTHS),
                    "found": sum(found.values()),
                    **{f"depth {depth:g}": count for depth, count in found.items()},
                }
            )
    return rows


def _prompt(tokenizer: Any, prompts: Sequence[str], length: int, depth: float, case: int) -> tuple[str, str]:
    """The key, and a text of about ``length`` tokens that holds it."""
    draws = random.Random(case)
    key = str(draws.randrange(10_000, 100_000))
    own = [NEEDLE.format(key=key), QUESTION]
    room = length - sum(len(tokenizer(text, add_special_tokens=False).input_ids) for text in own)
    sentences: list[str] = []
    while room > 0:
        sentences.append(prompts[draws.randrange(len(prompts))])
        room -= len(tokenizer(" " + sentences[-1], add_special_tokens=False).input_ids)
    sentences.insert(round(depth * len(sentences)), own[0])
    return key, " ".join(sentences) + own[1]
