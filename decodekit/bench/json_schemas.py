"""Schemas with texts that fit and texts that do not: who judges all of them right, beside llguidance's own compiler."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from llguidance import LLMatcher

from decodekit.bench.prompts import read_rows
from decodekit.constraints.json_schema import JsonSchema
from decodekit.core.constraint import CompiledConstraint, mask_words
from decodekit.core.errors import InputError, RowError, UnsupportedConstraint
from decodekit.core.vocabulary import Vocabulary
from decodekit.llg.engine import engine_tokenizer

reads = read_rows
"""A line holds ``schema`` (or ``x``) and ``tests``: a list of ``data`` and whether it is ``valid``."""

Judge = Callable[[str], bool]
_WRITTEN: tuple[dict[str, Any], ...] = ({}, {"ensure_ascii": False}, {"separators": (",", ":")})


def run(
    model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], status: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row an engine: how many schemas it judges right, refuses, or compiles but judges wrong (silent), and its times.

    Every text is written in three ways: as ``json.dumps`` does, without ASCII escapes, and without spaces. Times are those of
    the CPU.
    """
    vocabulary = Vocabulary.of(tokenizer, width=model.config.get_text_config().vocab_size)
    engines: dict[str, Callable[[Any, list[float]], Judge]] = {
        "decodekit": partial(_ours, vocabulary, "error"),
        "decodekit, validate": partial(_ours, vocabulary, "validate"),
        "llguidance": partial(_llguidance, vocabulary),
    }
    results = []
    for name, compiled in engines.items():
        verdicts: Counter[str] = Counter()
        compiling: list[float] = []
        masking: list[float] = []
        for number, row in enumerate(rows):
            status(f"{name}: schema {number + 1} of {len(rows)}")
            started = time.thread_time()
            try:
                judge = compiled(row["schema"] if "schema" in row else row["x"], masking)
            except UnsupportedConstraint:
                verdicts["refused"] += 1
                continue
            except InputError:  # no value fits
                verdicts["exact" if not any(test["valid"] for test in row["tests"]) else "silent"] += 1
                continue
            compiling.append(time.thread_time() - started)
            right = all(judge(text) == test["valid"] for test in row["tests"] for text in _texts(test["data"]))
            verdicts["exact" if right else "silent"] += 1
        results.append(
            {
                "engine": name,
                "schemas": len(rows),
                **{verdict: verdicts[verdict] for verdict in ("exact", "refused", "silent")},
                "exact_share": verdicts["exact"] / len(rows),
                **_spread("compile_ms", compiling, 1e3),
                **_spread("mask_us", masking, 1e6),
            }
        )
    return results


def _texts(value: Any) -> Iterable[str]:
    for options in _WRITTEN:
        text = json.dumps(value, **options)
        # A lone surrogate has no UTF-8: it can only be escaped.
        if all(not 0xD800 <= ord(character) <= 0xDFFF for character in text):
            yield text


def _spread(name: str, seconds: list[float], unit: float) -> dict[str, float]:
    if len(seconds) < 2:
        return {f"{name}_median": float("nan"), f"{name}_p99": float("nan")}
    return {
        f"{name}_median": unit * statistics.median(seconds),
        f"{name}_p99": unit * statistics.quantiles(seconds, n=100)[98],
    }


def _ours(vocabulary: Vocabulary, unsupported: Any, schema: Any, masking: list[float]) -> Judge:
    constraint = JsonSchema(schema=schema, unsupported=unsupported)
    compiled = constraint.compile(vocabulary)
    return lambda text: (
        _walks(compiled, vocabulary, text, masking) and (compiled.exact or constraint.violation(text) is None)
    )


def _llguidance(vocabulary: Vocabulary, schema: Any, masking: list[float]) -> Judge:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = LLMatcher(engine_tokenizer(vocabulary), grammar, log_level=0)
    if matcher.is_error():
        raise UnsupportedConstraint(matcher.get_error())

    def judge(text: str) -> bool:
        place = matcher.deep_copy()
        for token in vocabulary.encode(text, first=True):
            started = time.thread_time()
            place.compute_bitmask()
            masking.append(time.thread_time() - started)
            if not place.try_consume_tokens([token]):
                return False
        return place.is_accepting()

    return judge


def _walks(compiled: CompiledConstraint, vocabulary: Vocabulary, text: str, masking: list[float]) -> bool:
    """Whether the tokens of a text are legal one after another, and the text may end after them; masks are timed."""
    state = compiled.start()
    out = torch.zeros(1, mask_words(vocabulary.width), dtype=torch.int32)
    for token in vocabulary.encode(text, first=True):
        started = time.thread_time()
        try:
            state.mask(out, 0)
            masking.append(time.thread_time() - started)
            state.advance(token)
        except RowError:
            return False
    return state.is_accepting()
