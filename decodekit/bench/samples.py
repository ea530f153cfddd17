"""Many samples of one prompt, beside num_return_sequences of plain generate, which prefills the prompt once a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from decodekit.bench.prompts import token_prompts
from decodekit.bench.timing import paired
from decodekit.cache.paged import PagedCache
from decodekit.core.compat import CACHE_KEY
from decodekit.runtime.api import load

SAMPLES = 16
NEW_TOKENS = 32
PROMPT_TOKENS = (512, 1024)
ROUNDS = 3


def run(model: Any, tokenizer: Any, prompts: Sequence[str], status: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row a prompt length: seconds of both, how many times faster, and the K/V memory beside copies of the prompt."""
    decoder = load({"rules": [], "generation": {"do_sample": True, "seed": 0}})
    rows = []
    for length in PROMPT_TOKENS:
        status(f"{SAMPLES} samples of {length} tokens")
        ids = token_prompts(tokenizer, prompts, 1, length).to(model.device)
        blocks = 2 * (length + SAMPLES * NEW_TOKENS) // 16 + SAMPLES
        cache = PagedCache(model.config, num_blocks=blocks, device=model.device, prefix_cache=False)
        options = {
            "max_new_tokens": NEW_TOKENS,
            "min_new_tokens": NEW_TOKENS,
            "do_sample": True,
            "num_return_sequences": SAMPLES,
            "pad_token_id": tokenizer.pad_token_id,
        }
        pair = paired(
            partial(model.generate, ids, **options, top_k=0),
            partial(model.generate, ids, **options, custom_generate=decoder),
            rounds=ROUNDS,
        )
        model.generate(ids, **options, custom_generate=decoder, **{CACHE_KEY: cache})
        ours = sum(group["peak"] * group["block_size"] for group in cache.stats()["groups"])
        rows.append(
            {
                "prompt_tokens": length,
                "samples": SAMPLES,
                "new_tokens": NEW_TOKENS,
                "generate_s": pair.peer,
                "decodekit_s": pair.ours,
                "times_faster": 1 / pair.ratio,
                "kv_share": ours / (len(cache.groups) * SAMPLES * (length + NEW_TOKENS - 1)),
            }
        )
    return rows
