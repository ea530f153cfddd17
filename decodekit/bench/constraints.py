"""What a constraint costs a step beside outlines' own processors, and the forwards that forced tokens save."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import outlines
import torch
from outlines.backends import get_json_schema_logits_processor
from torch import Tensor
from transformers.generation import StoppingCriteria

from decodekit.constraints.json_schema import JsonSchema
from decodekit.core.errors import InputError
from decodekit.runtime.api import load
from decodekit.runtime.branches import left_pad
from decodekit.runtime.constraining import Constraints, constrain, leaves_a_core
from decodekit.runtime.text import encode

STEPS = 32
ROUNDS = 6
BATCHES = (1, 8)
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["answer", "tags"],
    "additionalProperties": False,
}
TEXT = (
    '{"answer": "Paris, a big city on the river Seine with many museums, and a tower made of iron.", '
    '"tags": ["capital", "Europe", "river"]}'
)
PEERS = ("outlines_core", "llguidance")

_NAME, _COUNT = {"type": "string", "maxLength": 20}, {"type": "integer", "minimum": 0, "maximum": 9999}
COMPACT: dict[str, Any] = {
    "person": {"first_name": _NAME, "last_name": _NAME, "age": _COUNT, "occupation": _NAME},
    "order": {"customer": _NAME, "product": _NAME, "quantity": _COUNT, "delivered": {"type": "boolean"}},
    "city": {
        "city": _NAME,
        "country": _NAME,
        "population": _COUNT,
        "continent": {"enum": ["Europe", "Asia", "Africa"]},
    },
    "rating": {"sentiment": {"enum": ["positive", "negative", "neutral"]}, "confidence": _COUNT, "reason": _NAME},
}
"""The members of some objects, all of them required."""


def run(model: Any, tokenizer: Any, prompts: Sequence[str], status: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row a batch size: a step free and constrained, its masks beside outlines' own; then rows of forwards saved."""
    if len(prompts) < max(BATCHES):
        raise InputError(f"suite 'constraints' needs {max(BATCHES)} prompts, got {len(prompts)}")
    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        rows.append(
            {
                "batch": batch,
                **_steps(model, tokenizer, prompts[:batch], status),
                **_overheads(model, tokenizer, batch, status),
            }
        )
    return [*rows, *_forced(model, tokenizer, status)]


class _Clock(StoppingCriteria):
    """Notes when each forward of one new token a row begins, and ends the call after so many."""

    def __init__(self, rows: int) -> None:
        self.steps: list[tuple[float, float]] = []
        self._rows = rows
        self._begun: tuple[float, float] | None = None

    def hook(self, module: Any, given: tuple[Tensor, ...]) -> None:
        """Of the input embeddings: every forward calls them once."""
        now = time.perf_counter(), time.process_time()
        if self._begun is not None:
            self.steps.append((now[0] - self._begun[0], now[1] - self._begun[1]))
        self._begun = now if given[0].shape == (self._rows, 1) else None

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), len(self.steps) >= STEPS, device=input_ids.device)


def _steps(model: Any, tokenizer: Any, prompts: Sequence[str], status: Callable[[str], None]) -> dict[str, Any]:
    """What a step of a batch costs, three ways in turn; forwards with forced tokens are left out."""
    ids, attention = left_pad([encode(tokenizer, prompt) for prompt in prompts], tokenizer.pad_token_id, model.device)
    no_end = {"eos_token_id": [-1]}
    free, constrained = load({}), load({"constraint": {"kind": "json_schema", "schema": SCHEMA}})
    ways: dict[str, dict[str, Any]] = {
        "generate": no_end,
        "free": {**no_end, "custom_generate": free.bind(tokenizer=tokenizer)},
        "constrained": {"custom_generate": constrained.bind(tokenizer=tokenizer)},
    }
    gaps: dict[str, list[float]] = defaultdict(list)
    for number in range(ROUNDS + 1):
        status(f"constraints at batch {len(prompts)}: round {number} of {ROUNDS}")
        for name, own in ways.items():
            clock = _Clock(len(prompts))
            handle = model.get_input_embeddings().register_forward_pre_hook(clock.hook)
            model.generate(
                ids,
                attention_mask=attention,
                **own,
                stopping_criteria=[clock],
                max_new_tokens=8 * STEPS,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
            handle.remove()
            if number:  # the first round warms up
                gaps[f"{name}_ms"] += [seconds for seconds, _ in clock.steps]
                gaps[f"{name}_cpu_ms"] += [cpu for _, cpu in clock.steps]
    cost = {name: 1000 * statistics.median(own) for name, own in gaps.items()}
    return {
        **cost,
        "ratio": cost["constrained_ms"] / cost["free_ms"],
        "cpu_ratio": cost["constrained_cpu_ms"] / cost["free_cpu_ms"],
    }


def _overheads(model: Any, tokenizer: Any, batch: int, status: Callable[[str], None]) -> dict[str, float]:
    """What the masks of a step cost beside outlines' own processors: all walk the same text, without a model."""
    width = model.config.get_text_config().vocab_size
    ids = torch.tensor([tokenizer.encode(TEXT, add_special_tokens=False)] * batch)
    scores = torch.randn(batch, width)
    outer = outlines.from_transformers(model, tokenizer)
    walks: dict[str, Callable[[], list[float]]] = {"decodekit": partial(_walk_ours, tokenizer, ids, scores)}
    for name in PEERS:
        status(f"constraints at batch {batch}: outlines compiles with {name}")
        processor = get_json_schema_logits_processor(name, outer, json.dumps(SCHEMA))
        walks[name] = partial(_walk_outlines, processor, ids, scores)
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(ROUNDS + 1):
        status(f"constraints at batch {batch}: masks, round {number} of {ROUNDS}")
        for name, walk in walks.items():
            seconds[name] += walk() if number else walk()[:0]
    cost = {name: 1000 * statistics.median(own) for name, own in seconds.items()}
    return {
        **{f"masks_{name}_ms": milliseconds for name, milliseconds in cost.items()},
        **{f"masks_to_{name}": cost["decodekit"] / cost[name] for name in PEERS},
    }


def _walk_ours(tokenizer: Any, ids: Tensor, scores: Tensor) -> list[float]:
    """Seconds of each step, as the loop takes it: forced tokens, masks, and on to the next."""
    schema = JsonSchema(schema=SCHEMA)
    constraints = Constraints(schema, tokenizer, scores.shape[-1], (tokenizer.eos_token_id,))
    rows = [constraints.row({}, 8 * ids.shape[1]) for _ in ids]
    times, ahead = [time.perf_counter()], leaves_a_core(scores.device)
    for tokens in ids.T.tolist():
        for row in rows:
            assert row is not None
            row.forced(1)
            if ahead:
                row.prefetch()
        constrain(scores, scores, rows)
        for row, token in zip(rows, tokens, strict=True):
            assert row is not None
            row.advance(token)
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def _walk_outlines(processor: Any, ids: Tensor, scores: Tensor) -> list[float]:
    processor.reset()
    seconds = []
    for place in range(ids.shape[1]):
        own = scores.clone()
        started = time.perf_counter()
        processor(ids[:, :place], own)
        seconds.append(time.perf_counter() - started)
    return seconds


def _forced(model: Any, tokenizer: Any, status: Callable[[str], None]) -> list[dict[str, Any]]:
    """How many forwards compact objects take, beside their tokens: each, and all together."""
    rows: list[dict[str, Any]] = []
    for name, members in COMPACT.items():
        status(f"constraints: the forwards of {name!r}")
        schema = {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}
        decoder = load({"constraint": {"kind": "json_schema", "schema": schema, "whitespace": "compact"}})
        prompt = f"Make up a {name}, in JSON with {', '.join(members)}."
        [output] = decoder.run(model, tokenizer, [prompt], max_new_tokens=200, do_sample=False)
        rows.append({"schema": name, "tokens": len(output.token_ids), "forwards": output.stats["target_forwards"]})
    rows.append({"schema": "all", **{key: sum(row[key] for row in rows) for key in ("tokens", "forwards")}})
    return [row | {"saved": 1 - row["forwards"] / row["tokens"]} for row in rows]
