"""A decoding step on a GPU beside plain Hugging Face's, dynamic and static with compile, and beside what the memory allows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from decodekit.bench.kernels import memory_speed
from decodekit.bench.prompts import read_prompts
from decodekit.cache.ledger import ledger
from decodekit.cache.shapes import read_config
from decodekit.core.errors import InputError
from decodekit.kernels import triton_runs
from decodekit.runtime.api import load
from decodekit.runtime.shelf import release

BATCHES = ((1, 512), (8, 2048), (32, 2048))
"""Rows, and tokens of their prompts."""

NEW_TOKENS = 128
ROUNDS = 3


def reads(path: Path | None, limit: int | None) -> Sequence[Any]:
    """A ``config.json`` or its folder, whose shape is measured with random weights in bfloat16; otherwise prompts."""
    if path is not None and path.suffix != ".jsonl":
        return [read_config(path)]
    return read_prompts(path, limit)


def needs_model(prompts: Sequence[Any]) -> bool:
    """Not where a shape is measured."""
    return not prompts or isinstance(prompts[0], str)


def run(model: Any, tokenizer: Any, prompts: Sequence[Any], status: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row a batch: milliseconds a step of greedy decoding, the prefill taken off on all sides.

    - ``static_ms``: transformers' static cache and compiled forward.
    - ``memory_limit``: the time that reading what a step must takes (weights without the input embedding, K/V halfway), at the
      speed measured here, over ours.
    - ``capture_s``: what the first call took more than a later one.

    Raises:
        InputError: there is no GPU with Triton.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not triton_runs(device):
        raise InputError("suite 'decode' needs an NVIDIA GPU and Triton, and this machine lacks one of them")
    if not needs_model(prompts):
        status("random weights")
        model = random_model(prompts[0], device)
    status("memory limit")
    bytes_a_ms = memory_speed(device)
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    weights = sum(own.nbytes for own in model.parameters()) - (0 if tied else embedding.nbytes)
    rows = []
    for batch, length in BATCHES:
        status(f"{batch} x {length}")
        ids = torch.randint(model.config.vocab_size, (batch, length), device=device)
        plain = partial(
            model.generate, ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None, pad_token_id=0
        )
        ours = partial(plain, custom_generate=load({}))
        first = seconds(ours, NEW_TOKENS)
        later = seconds(ours, NEW_TOKENS)
        mine = step_ms(ours, NEW_TOKENS)
        # Its steps take the same time however many there are.
        dynamic = step_ms(plain, NEW_TOKENS // 4)
        static = step_ms(partial(plain, cache_implementation="static"), NEW_TOKENS)
        held = ledger(model.config, context=length + NEW_TOKENS // 2, batch=batch, dtype=model.dtype)
        rows.append(
            {
                "batch": batch,
                "prompt_tokens": length,
                "decodekit_ms": mine,
                "memory_limit": (weights + batch * held.kv_bytes_per_token * (length + NEW_TOKENS // 2))
                / bytes_a_ms
                / mine,
                "dynamic_ms": dynamic,
                "times_dynamic": dynamic / mine,
                "static_ms": static,
                "times_static": static / mine,
                "capture_s": first - later,
                "identical_tokens": float((ours(max_new_tokens=32) == plain(max_new_tokens=32)).float().mean()),
            }
        )
    release(model)
    return rows


def random_model(config: Any, device: torch.device) -> Any:
    """A causal language model of this shape with random weights in bfloat16: speed does not depend on their values."""
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def step_ms(generate: Callable[..., Tensor], new_tokens: int) -> float:
    """Milliseconds a step of a ``generate``, without its prefill: the median of differences between long and short calls."""
    generate(max_new_tokens=8)
    generate(max_new_tokens=new_tokens)
    taken = [seconds(generate, new_tokens) - seconds(generate, 8) for _ in range(ROUNDS)]
    return 1000 * statistics.median(taken) / (new_tokens - 8)


def seconds(generate: Callable[..., Tensor], new_tokens: int) -> float:
    """What a ``generate`` of so many tokens takes."""
    _wait()
    started = time.perf_counter()
    generate(max_new_tokens=new_tokens)
    _wait()
    return time.perf_counter() - started


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
