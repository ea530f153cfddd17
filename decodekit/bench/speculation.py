"""Training-free drafters beside plain decoding and transformers' prompt lookup: speed, tokens a pass, identity."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decodekit.bench.prompts import DEFAULT, read_rows
from decodekit.core.errors import InputError
from decodekit.runtime.api import load

NEW_TOKENS = 64
DRAFTERS = ("ngram", "suffix", "recycle", "lookahead")
LOOKUPS = (3, 5, 10)
BATCH = 8
UNREAD = {"suffix": {"kind": "suffix", "max_cached_tokens": 1 << 16}}
"""A drafter with a memory of its own, which the prompts that were decoded alone are not in."""
RESAMPLES = 2000
PLAIN = "plain"


@dataclass(frozen=True)
class _Run:
    """One prompt, or batch of prompts, decoded one way.

    Attributes:
        seconds: of all of it.
        passes: forwards of the model, the prefill not counted.
        output: [R, T].
    """

    seconds: float
    passes: int
    output: Tensor


@dataclass(frozen=True)
class Question:
    """A prompt and the category that it belongs to."""

    text: str
    category: str = ""


def reads(path: Path | None, limit: int | None) -> list[Question]:
    """Questions in the format of Spec-Bench (the first of their ``turns``, by ``task``) or plain ``prompt`` lines.

    ``limit`` takes as many of each category, evenly spaced, the categories in turn.

    Raises:
        InputError: the file cannot be read, or a line has no prompt; names the line.
    """
    if path is None:
        return [Question(text) for text in DEFAULT[:limit]]
    groups: dict[str, list[Question]] = {}
    for number, row in enumerate(read_rows(path, None), start=1):
        text = row["turns"][0] if row.get("turns") else row.get("prompt")
        if text is None:
            raise InputError(f"{path}:{number}: expected a JSON object with the key 'prompt' or 'turns'")
        question = Question(str(text), str(row.get("task", "")))
        groups.setdefault(question.category, []).append(question)
    most = sum(map(len, groups.values())) if limit is None else limit
    each = -(-most // len(groups))
    chosen = [own[:: max(1, len(own) // each)][:each] for own in groups.values()]
    return [question for turn in zip_longest(*chosen) for question in turn if question is not None][:most]


def run(model: Any, tokenizer: Any, prompts: Sequence[Question], status: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row a method and category, and for all prompts together; then a row a drafter for batches of 8.

    Drafters meet the prompts in order, each once, so that ``suffix`` and ``recycle`` know earlier ones, as in service; in
    batches ``suffix`` begins anew, ``recycle`` knows the same text.

    - ``speedup``: seconds of plain decoding over those of the method, summed over the prompts.
    - ``low``, ``high``: its 95 % interval over resampled prompts, each with both its times.
    - ``tokens_a_pass``: passes of plain decoding, which give a token each, over those of the method.
    - ``slower``: prompts on which it took longer than plain decoding.
    - ``identical``: prompts on which the tokens are plain decoding's.
    """
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    ours = {kind: {"custom_generate": load({"drafter": kind})} for kind in DRAFTERS}
    methods: dict[str, dict[str, Any]] = {PLAIN: {"custom_generate": load({})}, **ours}
    lookups = {f"lookup {count} (transformers)": {"prompt_lookup_num_tokens": count} for count in LOOKUPS}
    decode = partial(_decode, model, tokenizer, options)
    for method in (methods | lookups).values():
        decode(["Hello"], method)
    runs = _in_turn(decode, methods | lookups, [[question.text] for question in prompts], status)
    groups = defaultdict(list)
    for place, question in enumerate(prompts):
        groups[question.category].append(place)
    rows = [
        _row(name, own, 1, [runs[PLAIN][place] for place in places], [runs[name][place] for place in places])
        for name in runs
        for own, places in [("all", list(range(len(prompts)))), *sorted(groups.items())]
        if name != PLAIN and (own == "all" or len(groups) > 1)
    ]
    # Every so many prompts, so that each batch has some of every category.
    stride = len(prompts) // BATCH
    batches = [[own.text for own in prompts[first::stride][:BATCH]] for first in range(min(stride, 2))]
    together = methods | {kind: {"custom_generate": load({"drafter": spec})} for kind, spec in UNREAD.items()}
    batched = _in_turn(decode, together, batches, status)
    return rows + [_row(name, "all", BATCH, batched[PLAIN], batched[name]) for name in ours if batches]


def _in_turn(
    decode: Callable[[Sequence[str], dict[str, Any]], _Run],
    methods: dict[str, dict[str, Any]],
    batches: Sequence[Sequence[str]],
    status: Callable[[str], None],
) -> dict[str, list[_Run]]:
    """Each method's runs; every batch begins with another method, so that all meet the same machine."""
    runs: dict[str, list[_Run]] = {name: [] for name in methods}
    names = list(methods)
    for number, batch in enumerate(batches):
        status(f"{number + 1} of {len(batches)} ({len(batch)} together)")
        for name in names[number % len(names) :] + names[: number % len(names)]:
            runs[name].append(decode(batch, methods[name]))
    return runs


def _decode(
    model: Any, tokenizer: Any, options: dict[str, Any], prompts: Sequence[str], method: dict[str, Any]
) -> _Run:
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
        if tokenizer.chat_template
        else prompt
        for prompt in prompts
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    hook = model.register_forward_pre_hook(count)
    try:
        started = time.perf_counter()
        output = model.generate(**inputs.to(model.device), **options, **method)
        seconds = time.perf_counter() - started
    finally:
        hook.remove()
    return _Run(seconds, passes - 1, output)


def _row(name: str, group: str, batch: int, plain: Sequence[_Run], own: Sequence[_Run]) -> dict[str, Any]:
    pairs = [(first.seconds, second.seconds) for first, second in zip(plain, own, strict=True)]
    low, high = _interval(pairs)
    return {
        "method": name,
        "category": group,
        "batch": batch,
        "prompts": len(own) * batch,
        "speedup": _ratio(pairs),
        "low": low,
        "high": high,
        "tokens_a_pass": sum(run.passes for run in plain) / max(1, sum(run.passes for run in own)),
        "slower": sum(second > first for first, second in pairs),
        "identical": sum(torch.equal(first.output, second.output) for first, second in zip(plain, own, strict=True)),
    }


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(plain for plain, _ in pairs) / sum(own for _, own in pairs)


def _interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The 95 % interval of the ratio, from prompts drawn with replacement, each with both its times."""
    source = random.Random(0)
    ratios = sorted(_ratio(source.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return ratios[int(0.025 * RESAMPLES)], ratios[int(0.975 * RESAMPLES) - 1]
