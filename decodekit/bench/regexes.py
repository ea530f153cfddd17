"""Regexes with texts that match and texts that do not: the own automata beside outlines_core, where it is installed."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from decodekit.bench.prompts import read_rows
from decodekit.constraints.regex import Regex
from decodekit.core.constraint import is_legal, mask_words
from decodekit.core.errors import InputError, UnsupportedConstraint
from decodekit.core.vocabulary import Vocabulary

reads = read_rows
"""A line holds ``regex`` and ``tests``: a list of ``data`` and whether it is ``valid``."""

COMPILE_LIMIT_S = 60
WARM_MASKS = 20

Mask = Callable[[Tensor], None]
Engine = Callable[[Vocabulary, str], Callable[[], tuple[Mask, Callable[[int], None], Callable[[], bool]]]]
"""Vocabulary and pattern to what starts a row: how to fill its mask, take a token, and ask whether it may end."""


def run(
    model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], status: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row an engine: how many regexes it judges right, refuses, or compiles but judges wrong (silent), and its times.

    Each regex is compiled in a process of its own, so that an engine that takes more than a minute can be killed. Warm masks
    are those of places that were asked before.
    """
    vocabulary = Vocabulary.of(tokenizer, width=model.config.get_text_config().vocab_size)
    engines: dict[str, Engine] = {"decodekit": _own}
    if find_spec("outlines_core") is not None:
        engines["outlines_core"] = _outlines_core
    for engine in engines.values():
        engine(vocabulary, "a")  # what is made once a vocabulary is not timed
    return [_judged(name, engine, vocabulary, rows, status) for name, engine in engines.items()]


def _judged(
    name: str, engine: Engine, vocabulary: Vocabulary, rows: Sequence[dict[str, Any]], status: Callable[[str], None]
) -> dict[str, Any]:
    verdicts: Counter[str] = Counter()
    times: dict[str, list[float]] = {"compile": [], "first": [], "warm": []}
    for number, row in enumerate(rows, start=1):
        status(f"{name}: regex {number} of {len(rows)}")
        ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=_judge, args=(theirs, engine, vocabulary, row))
        child.start()
        theirs.close()
        try:
            verdict, measured = ours.recv() if ours.poll(COMPILE_LIMIT_S) else ("killed", {})
        except EOFError:
            verdict, measured = "killed", {}
        child.kill()
        child.join()
        verdicts[verdict] += 1
        for what, seconds in measured.items():
            times[what] += seconds
    return {
        "engine": name,
        "regexes": len(rows),
        **{verdict: verdicts[verdict] for verdict in ("exact", "refused", "killed", "silent")},
        "compile_ms_median": 1e3 * statistics.median(times["compile"]),
        "compile_ms_largest": 1e3 * max(times["compile"]),
        "first_mask_us_median": 1e6 * statistics.median(times["first"]),
        "warm_mask_us_median": 1e6 * statistics.median(times["warm"]),
        "warm_mask_us_p99": 1e6 * statistics.quantiles(times["warm"], n=100)[98],
    }


def _judge(answer: Connection, engine: Engine, vocabulary: Vocabulary, row: dict[str, Any]) -> None:
    times: dict[str, list[float]] = {"compile": [], "first": [], "warm": []}
    torch.set_num_threads(1)  # the threads of the parent are not here
    started = time.process_time()
    try:
        start = engine(vocabulary, row["regex"])
    except (UnsupportedConstraint, InputError, ValueError):
        answer.send(("refused", {}))
        return
    times["compile"].append(time.process_time() - started)
    right = all(_walks(start, vocabulary, test["data"], times) == test["valid"] for test in row["tests"])
    answer.send(("exact" if right else "silent", times))


def _walks(start: Callable[[], Any], vocabulary: Vocabulary, text: str, times: dict[str, list[float]]) -> bool:
    fill, advance, may_end = start()
    out = torch.zeros(1, mask_words(vocabulary.width), dtype=torch.int32)
    for token in vocabulary.encode(text, first=True):
        for repeat in range(1 + WARM_MASKS):
            started = time.perf_counter()
            fill(out)
            times["warm" if repeat else "first"].append(time.perf_counter() - started)
        if not is_legal(out[0], token):
            return False
        advance(token)
    return may_end()


def _own(vocabulary: Vocabulary, pattern: str) -> Callable[[], Any]:
    compiled = Regex(pattern=pattern).compile(vocabulary)

    def start() -> Any:
        state = compiled.start()
        return (lambda out: state.mask(out, 0)), state.advance, state.is_accepting

    return start


def _outlines_core(vocabulary: Vocabulary, pattern: str) -> Callable[[], Any]:
    import outlines_core

    (eos,) = vocabulary.eos_ids
    spelt: dict[bytes, list[int]] = {}
    for token, text in enumerate(vocabulary.tokens):
        if text is not None:
            spelt.setdefault(text, []).append(token)
    tokens = _VOCABULARIES.setdefault(id(vocabulary), outlines_core.Vocabulary(eos, spelt))
    index = outlines_core.Index(pattern, tokens)

    def start() -> Any:
        guide = outlines_core.Guide(index)

        def fill(out: Tensor) -> None:
            guide.write_mask_into(out.data_ptr(), out.numel(), out.element_size())

        def may_end() -> bool:
            return eos in guide.get_tokens()

        return fill, lambda token: guide.advance(token, False), may_end

    return start


_VOCABULARIES: dict[int, Any] = {}
