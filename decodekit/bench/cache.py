"""A step over the paged cache beside transformers' DynamicCache: same loop, prompts and tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from decodekit.bench.prompts import token_prompts
from decodekit.bench.timing import paired
from decodekit.runtime.api import load

PROMPT_TOKENS = 512
NEW_TOKENS = 32
BATCHES = (1, 8)
ROUNDS = 8


def run(model: Any, tokenizer: Any, prompts: Sequence[str], status: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row a batch size: seconds of a step with both caches, their ratio, and whether the tokens are the same."""
    decoders = {kind: load({"cache": kind}) for kind in ("dynamic", "paged")}
    rows = []
    for batch in BATCHES:
        status(f"cache at batch {batch}")
        ids = token_prompts(tokenizer, prompts, batch, PROMPT_TOKENS).to(model.device)

        options = {"eos_token_id": -1, "pad_token_id": tokenizer.pad_token_id, "do_sample": False}
        dynamic_call, paged_call = (
            partial(model.generate, ids, **options, custom_generate=decoders[kind]) for kind in ("dynamic", "paged")
        )
        whole, first = (
            paired(partial(dynamic_call, max_new_tokens=new), partial(paged_call, max_new_tokens=new), rounds=ROUNDS)
            for new in (NEW_TOKENS, 1)
        )
        dynamic, paged = (
            (total - prefill) / (NEW_TOKENS - 1) for total, prefill in zip(whole.both, first.both, strict=True)
        )
        rows.append(
            {
                "batch": batch,
                "prompt_tokens": PROMPT_TOKENS,
                "dynamic_ms_a_step": 1000 * dynamic,
                "paged_ms_a_step": 1000 * paged,
                "step_ratio": paged / dynamic,
                "whole_ratio": whole.ratio,
                "prefill_ratio": first.ratio,
                "identical_tokens": bool(
                    torch.equal(dynamic_call(max_new_tokens=NEW_TOKENS), paged_call(max_new_tokens=NEW_TOKENS))
                ),
            }
        )
    return rows
