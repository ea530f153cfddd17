"""Self-consistency over a long prompt, beside num_return_sequences of plain generate, which prefills it once a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from decodekit.bench.prompts import token_prompts
from decodekit.bench.timing import paired
from decodekit.runtime.api import load

CANDIDATES = 16
NEW_TOKENS = 32
PROMPT_TOKENS = 1024
ROUNDS = 2


def run(model: Any, tokenizer: Any, prompts: Sequence[str], status: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row: seconds of both, and how many times faster the vote over as many samples is."""
    status(f"{CANDIDATES} candidates of {PROMPT_TOKENS} tokens")
    strategy = {"kind": "self_consistency", "n": CANDIDATES}
    decoder = load({"strategy": strategy, "rules": [], "generation": {"do_sample": True, "seed": 0}})
    ids = token_prompts(tokenizer, prompts, 1, PROMPT_TOKENS).to(model.device)
    options = {
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "do_sample": True,
        "pad_token_id": tokenizer.pad_token_id,
    }
    pair = paired(
        partial(model.generate, ids, **options, top_k=0, num_return_sequences=CANDIDATES),
        partial(model.generate, ids, **options, custom_generate=decoder.bind(tokenizer=tokenizer)),
        rounds=ROUNDS,
    )
    return [
        {
            "prompt_tokens": PROMPT_TOKENS,
            "candidates": CANDIDATES,
            "new_tokens": NEW_TOKENS,
            "generate_s": pair.peer,
            "decodekit_s": pair.ours,
            "times_faster": 1 / pair.ratio,
        }
    ]
