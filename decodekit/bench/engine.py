"""Requests a second of the engine, beside padded generate batches (and generate_batch on a GPU): same model, same prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from decodekit.bench.decode import random_model
from decodekit.bench.prompts import DEFAULT, read_rows
from decodekit.cache.shapes import read_config
from decodekit.runtime.engine import Engine

NEW_TOKENS, WARM_UP = 128, 4
BATCH = 8
SLOTS = 64
TOKENS_PER_STEP = 2048
SHAPE_REQUESTS, SHAPE_LENGTHS, SHAPE_TOKENS_A_STEP = 128, (64, 1025), 16384


def reads(path: Path | None, limit: int | None) -> Sequence[Any]:
    """The ``prompt`` or ``question`` of 64 lines, or the built-in prompts over and over; or a ``config.json`` or its folder."""
    if path is not None and path.suffix != ".jsonl":
        return [read_config(path)]
    count = limit or 64
    if path is None:
        return [DEFAULT[place % len(DEFAULT)] for place in range(count)]
    return [str(row.get("prompt", row.get("question", ""))) for row in read_rows(path, count)]


def run(model: Any, tokenizer: Any, prompts: Sequence[str], status: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row a way: seconds, tokens, tokens a second, and how many times as fast as the first as that makes it.

    Of a ``config.json``, which is measured with random weights in bfloat16, with random prompts of many lengths, beside
    ``generate_batch``.
    """
    if prompts and not isinstance(prompts[0], str):
        return _of_shape(prompts[0], tokenizer, status)
    texts = [_chat(tokenizer, prompt) for prompt in prompts]
    return compare(model, tokenizer, [tokenizer(text, add_special_tokens=False).input_ids for text in texts], status)


def compare(
    model: Any,
    tokenizer: Any,
    ids: Sequence[Sequence[int]],
    status: Callable[[str], None],
    *,
    padded: bool = True,
    slots: int = SLOTS,
    tokens_per_step: int = TOKENS_PER_STEP,
) -> list[dict[str, Any]]:
    """The same for prompts of ids, which any model takes: speed does not depend on what weights and tokens say."""
    ways: list[tuple[str, Callable[[int], list[list[int]]]]] = [
        (f"engine, {slots} slots", lambda new: _engine(model, tokenizer, ids, new, slots, tokens_per_step)),
    ]
    if model.device.type == "cuda":
        ways.insert(0, ("generate_batch", lambda new: _generate_batch(model, ids, new)))
    if padded:
        ways.insert(0, (f"generate, padded batches of {BATCH}", lambda new: _padded(model, tokenizer, ids, new)))
    rows: list[dict[str, Any]] = []
    for name, way in ways:
        status(name)
        if model.device.type == "cuda":
            way(WARM_UP)  # kernels are compiled
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        outputs = way(NEW_TOKENS)
        seconds = time.perf_counter() - started
        tokens = sum(map(len, outputs))
        row: dict[str, Any] = {
            "way": name,
            "requests": len(ids),
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
        }
        row["times_the_first"] = row["tokens_per_s"] / (rows[0]["tokens_per_s"] if rows else row["tokens_per_s"])
        if model.device.type == "cuda":
            row["peak_GiB"] = torch.cuda.max_memory_allocated() / 2**30
        first = rows[0]["outputs"] if rows else outputs
        row["same_outputs"] = sum(a == b for a, b in zip(first, outputs, strict=True))
        rows.append({**row, "outputs": outputs})
    return [{name: value for name, value in row.items() if name != "outputs"} for row in rows]


def _of_shape(config: Any, tokenizer: Any, status: Callable[[str], None]) -> list[dict[str, Any]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    status("random weights")
    model = random_model(config, device)
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(*SHAPE_LENGTHS, (SHAPE_REQUESTS,), generator=generator).tolist()
    known = min(config.vocab_size, len(tokenizer))
    ids = [torch.randint(known, (length,), generator=generator).tolist() for length in lengths]
    return compare(
        model, tokenizer, ids, status, padded=False, slots=SHAPE_REQUESTS, tokens_per_step=SHAPE_TOKENS_A_STEP
    )


def _chat(tokenizer: Any, prompt: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        return prompt
    messages = [{"role": "user", "content": prompt}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def _padded(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """In the order of the prompts, as a plain loop does it; outputs end at their EOS."""
    pad, outputs = tokenizer.pad_token_id or 0, []
    eos = model.generation_config.eos_token_id
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        width = max(map(len, batch))
        ids = torch.tensor([[pad] * (width - len(own)) + list(own) for own in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(own)) + [1] * len(own) for own in batch], device=model.device)
        new = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=pad)
        for row in new[:, width:].tolist():
            over = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
            outputs.append(row[:over])
    return outputs


def _engine(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], new_tokens: int, slots: int, tokens_per_step: int
) -> list[list[int]]:
    with Engine(model, tokenizer, {}, slots=slots, tokens_per_step=tokens_per_step) as engine:
        requests = [engine.submit(ids, max_new_tokens=new_tokens) for ids in prompts]
        return [request.result().token_ids for request in requests]


def _generate_batch(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=model.generation_config.eos_token_id
    )
    outputs = model.generate_batch(inputs=[list(ids) for ids in prompts], generation_config=config)
    return [list(output.generated_tokens) for output in outputs.values()]
