"""What a token costs through decodekit, beside plain generate: same model, prompts and tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from decodekit.bench.timing import paired
from decodekit.core.errors import InputError
from decodekit.runtime.api import load

NEW_TOKENS = 32
BATCHES = (1, 8)
CACHES = ("dynamic", "paged")
ROUNDS = 8


def run(model: Any, tokenizer: Any, prompts: Sequence[str], status: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row a batch size and cache: seconds a token of both, their ratio, and whether the tokens are the same."""
    if len(prompts) < max(BATCHES):
        raise InputError(f"suite 'overhead' needs {max(BATCHES)} prompts, got {len(prompts)}")
    rows = []
    for batch in BATCHES:
        inputs = tokenizer(list(prompts[:batch]), return_tensors="pt", padding=True, padding_side="left")
        # No EOS: both must decode the same number of tokens in every round.
        options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": -1, "pad_token_id": tokenizer.pad_token_id}
        plain = partial(model.generate, **inputs.to(model.device), **options, do_sample=False)
        for cache in CACHES:
            status(f"overhead at batch {batch}, {cache} cache")
            ours = partial(plain, custom_generate=load({"cache": cache}))
            pair = paired(plain, ours, rounds=ROUNDS)
            rows.append(
                {
                    "batch": batch,
                    "cache": cache,
                    "new_tokens": NEW_TOKENS,
                    "generate_ms_a_step": 1000 * pair.peer / NEW_TOKENS,
                    "decodekit_ms_a_step": 1000 * pair.ours / NEW_TOKENS,
                    "ratio": pair.ratio,
                    "ratio_q1": pair.low,
                    "ratio_q3": pair.high,
                    "identical_tokens": bool(torch.equal(plain(), ours())),
                }
            )
    return rows
