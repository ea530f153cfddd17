"""Many samples of one prompt, beside num_return_sequences of plain generate, which prefills the prompt once a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from decodekit.bench.decode import random_model, reads, seconds
from decodekit.bench.prompts import token_prompts
from decodekit.bench.timing import paired
from decodekit.cache.paged import PagedCache
from decodekit.core.compat import CACHE_KEY
from decodekit.runtime.api import load
from decodekit.runtime.shelf import release

__all__ = ["reads", "run"]

SAMPLES = 16
NEW_TOKENS = 32
PROMPT_TOKENS = (512, 1024)
ROUNDS = 3
SHAPE_NEW_TOKENS = 128
SHAPE_SAMPLES = ((16, 4096), (64, 8192))
"""Samples, and tokens of their prompt, on a model of a given shape."""


def run(model: Any, tokenizer: Any, prompts: Sequence[str], status: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row a prompt length: seconds of both, how many times faster, and the K/V memory beside copies of the prompt.

    Of a ``config.json``, which is measured with random weights in bfloat16, the peak of the GPU's memory instead, of both; a
    peer that does not fit is left out.
    """
    if prompts and not isinstance(prompts[0], str):
        return _of_shape(prompts[0], status)
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


def _of_shape(config: Any, status: Callable[[str], None]) -> list[dict[str, Any]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    status("random weights")
    model, rows = random_model(config, device), []
    decoder = load({"rules": [], "generation": {"do_sample": True, "seed": 0}})
    for samples, length in SHAPE_SAMPLES:
        ids = torch.randint(config.vocab_size, (1, length), device=device)
        options = {"do_sample": True, "num_return_sequences": samples, "eos_token_id": None, "pad_token_id": 0}
        plain = partial(model.generate, ids, attention_mask=torch.ones_like(ids), **options)
        row: dict[str, Any] = {"prompt_tokens": length, "samples": samples, "new_tokens": SHAPE_NEW_TOKENS}
        for name, call in (
            ("decodekit", partial(plain, custom_generate=decoder)),
            ("generate", partial(plain, top_k=0)),
        ):
            status(f"{samples} samples of {length} tokens, {name}")
            row |= {f"{name}_s": None, f"{name}_peak_GiB": None}
            try:
                call(max_new_tokens=2)
                seconds(call, 8)  # captures, where there are graphs
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                row[f"{name}_s"] = seconds(call, SHAPE_NEW_TOKENS)
                if device.type == "cuda":
                    row[f"{name}_peak_GiB"] = torch.cuda.max_memory_allocated() / 2**30
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
            release(model)
        row["times_faster"] = (
            row["generate_s"] / row["decodekit_s"] if row["generate_s"] and row["decodekit_s"] else None
        )
        rows.append(row)
    return rows
