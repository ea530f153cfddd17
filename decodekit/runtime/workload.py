"""What a stream of requests would take: a trace replayed against the ledger and a cost model, before anything is loaded.

A step of T tokens takes at least ``max(F / peak, M / bandwidth)`` seconds, with ``F = 2 N T`` and 4 x query width x tokens
seen for attention, and ``M`` the weights, the K/V that are read and the states: a floor, as in rooflines (Williams et al.,
2009), which real kernels and launches stay above.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from decodekit.cache.ledger import Ledger
from decodekit.core.errors import InputError
from decodekit.core.units import parse_bytes


class Arrival(NamedTuple):
    """A request of a trace: when it comes (seconds), the tokens of its prompt, and those that it gets."""

    seconds: float
    prompt: int
    output: int


@dataclass(frozen=True)
class Machine:
    """What a step is counted with.

    Attributes:
        parameters: that each token is multiplied with, embeddings left out.
        weight_bytes: of these.
        attention_flops: of one query and one token that it sees, all layers together.
        kv_bytes: K/V of a token.
        state_bytes: recurrent states of a row, convolutions included.
        flops: a second.
        bandwidth: bytes a second.
    """

    parameters: int
    weight_bytes: int
    attention_flops: int
    kv_bytes: int
    state_bytes: int
    flops: float
    bandwidth: float

    def seconds(self, pieces: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """Of a step over rows of (cached, new) tokens; and its operations."""
        tokens = sum(new for _, new in pieces)
        seen = sum(new * cached + new * (new + 1) // 2 for cached, new in pieces)
        work = 2.0 * self.parameters * tokens + self.attention_flops * seen
        moved = self.weight_bytes + sum(
            (cached + 2 * new) * self.kv_bytes + 2 * self.state_bytes for cached, new in pieces
        )
        return max(work / self.flops, moved / self.bandwidth), work


@dataclass
class Replay:
    """What became of a trace.

    Attributes:
        way: how it was scheduled.
        steps: forwards.
        seconds: from the first arrival to the last token.
        ttft: of each request, seconds to its first token.
        gaps: seconds between tokens of a request.
        tokens: of outputs.
        work: operations.
        rows: most rows at once.
        blocks: most blocks in use at once.
    """

    way: str
    steps: int = 0
    seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    work: float = 0.0
    rows: int = 0
    blocks: int = 0

    def figures(self, machine: Machine) -> dict[str, Any]:
        """For people and scripts; seconds are floors."""
        return {
            "way": self.way,
            "steps": self.steps,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens / max(self.seconds, 1e-12),
            "flop_utilisation": self.work / max(self.seconds * machine.flops, 1e-12),
            "most_rows": self.rows,
            "most_blocks": self.blocks,
            "ttft_p50_s": _percentile(self.ttft, 50),
            "ttft_p99_s": _percentile(self.ttft, 99),
            "itl_p50_s": _percentile(self.gaps, 50),
            "itl_p99_s": _percentile(self.gaps, 99),
        }


@dataclass(eq=False)
class _Row:
    arrival: Arrival
    cached: int = 0
    given: int = 0
    last: float = 0.0


def read_trace(path: Path) -> list[Arrival]:
    """The requests of a JSONL trace: ``prompt_tokens``, ``output_tokens`` and ``arrival_s`` (0 when left out) a line.

    Raises:
        InputError: a line is none; names it.
    """
    arrivals = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise InputError(f"the workload {str(path)!r} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            arrival = Arrival(float(row.get("arrival_s", 0.0)), int(row["prompt_tokens"]), int(row["output_tokens"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise InputError(
                f'{path}:{number}: expected {{"arrival_s": 0.5, "prompt_tokens": 100, "output_tokens": 50}}: {reason}'
            ) from error
        if arrival.seconds < 0 or arrival.prompt < 1 or arrival.output < 1:
            raise InputError(
                f"{path}:{number}: a request has at least 1 token of prompt and output, and comes at 0 or later"
            )
        arrivals.append(arrival)
    if not arrivals:
        raise InputError(f"the workload {str(path)!r} has no request")
    return sorted(arrivals)


def machine_of(config: Any, counted: Ledger, *, flops: float, bandwidth: float) -> Machine:
    """What steps of a model are counted with; its weights are never made.

    Args:
        config: the model's.
        counted: its ledger.
        flops: of the device, a second.
        bandwidth: of its memory, bytes a second.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embeddings = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    # A tied embedding is the head, which every token is multiplied with; one of its own is only looked up.
    parameters = sum(own.numel() for own in model.parameters()) - (0 if head is embeddings else embeddings.numel())
    text = config.get_text_config(decoder=True)
    layers = sum(kind.layers for kind in counted.kinds if kind.kv_bytes_per_token)
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    size = {"float64": 8, "float32": 4}.get(counted.dtype, 2)
    return Machine(
        parameters=parameters,
        weight_bytes=parameters * size,
        attention_flops=4 * layers * heads * width,
        kv_bytes=counted.kv_bytes_per_token,
        state_bytes=counted.state_bytes_per_request + counted.conv_bytes_per_request,
        flops=flops,
        bandwidth=bandwidth,
    )


def static(trace: Sequence[Arrival], machine: Machine, *, slots: int) -> Replay:
    """Batches of ``slots`` in the order of arrival, prefilled whole and padded, each until its longest has ended."""
    replay, now = Replay("static batches"), 0.0
    for start in range(0, len(trace), slots):
        rows = [_Row(arrival) for arrival in trace[start : start + slots]]
        now = max(now, rows[-1].arrival.seconds)
        width = max(row.arrival.prompt for row in rows)
        for step in range(max(row.arrival.output for row in rows)):
            pieces = [(0, width) if step == 0 else (width + step - 1, 1)] * len(rows)
            now = _step(replay, machine, pieces, now)
            for row in rows:
                if step < row.arrival.output:
                    _token(replay, row, now)
        replay.rows = max(replay.rows, len(rows))
    return replay


def continuous(
    trace: Sequence[Arrival],
    machine: Machine,
    *,
    slots: int,
    tokens: int | None,
    blocks: int | None,
    block_size: int,
    promise: float = 0.1,
) -> Replay:
    """Requests come and go as in the engine: first come, first served, nobody put aside.

    Args:
        trace: in the order of arrival.
        machine: what steps are counted with.
        slots: most rows at once.
        tokens: most tokens a step, prompts in chunks; ``None`` prefills them whole.
        blocks: in the pool; ``None`` for any number.
        block_size: tokens a block.
        promise: part of the output that is kept free for a request when it is taken in.
    """
    replay = Replay("continuous, chunked prefill" if tokens is not None else "continuous, whole prefill")
    waiting, rows, now = deque(_Row(arrival) for arrival in trace), list[_Row](), 0.0

    def held(row: _Row, least: float) -> int:
        return -(-max(row.cached + 1, int(row.arrival.prompt + least * row.arrival.output)) // block_size)

    while waiting or rows:
        if not rows:
            now = max(now, waiting[0].arrival.seconds)
        while waiting and waiting[0].arrival.seconds <= now and len(rows) < slots:
            # As simple as safe: what does not fit even alone runs alone.
            taken = sum(held(row, promise) for row in rows) + held(waiting[0], promise)
            if blocks is not None and rows and taken > blocks:
                break
            rows.append(waiting.popleft())
        decoding = [row for row in rows if row.cached >= row.arrival.prompt]
        pieces = [(row.cached, 1) for row in decoding]
        fed = list(_chunks([row for row in rows if row.cached < row.arrival.prompt], tokens, len(decoding), block_size))
        pieces += [(row.cached, count) for row, count in fed]
        now = _step(replay, machine, pieces, now)
        replay.rows = max(replay.rows, len(rows))
        for row in decoding:
            row.cached += 1
            _token(replay, row, now)
        for row, count in fed:
            row.cached += count
            if row.cached == row.arrival.prompt:
                _token(replay, row, now)
        replay.blocks = max(replay.blocks, sum(-(-row.cached // block_size) for row in rows))
        rows = [row for row in rows if row.given < row.arrival.output]
    return replay


def split_of(trace: Sequence[Arrival], machine: Machine, budget: int | str, block_size: int) -> dict[str, Any]:
    """How a budget is best split between K/V blocks and state slots for requests of these lengths.

    Rows are live for as many steps as they have output tokens, and longer ones more often seen: the mean length while live is
    weighted so.
    """
    steps = sum(arrival.output for arrival in trace)
    mean = sum(arrival.output * (arrival.prompt + arrival.output / 2) for arrival in trace) / steps
    row = machine.state_bytes + machine.kv_bytes * (mean + block_size / 2)
    rows = int(parse_bytes(budget) / max(row, 1))
    states = rows * machine.state_bytes
    block = machine.kv_bytes * block_size
    return {
        "mean_live_tokens": mean,
        "rows": rows,
        "state_slots_bytes": states,
        "kv_blocks": (parse_bytes(budget) - states) // block if block else 0,
        "kv_bytes": parse_bytes(budget) - states if block else 0,
    }


def _chunks(rows: Sequence[_Row], tokens: int | None, decoding: int, least: int) -> Iterator[tuple[_Row, int]]:
    left = None if tokens is None else max(tokens - decoding, least)
    for row in rows:
        if left is not None and left < 1:
            return
        rest = row.arrival.prompt - row.cached
        count = rest if left is None else min(rest, left)
        left = None if left is None else left - count
        yield row, count


def _step(replay: Replay, machine: Machine, pieces: Sequence[tuple[int, int]], now: float) -> float:
    seconds, work = machine.seconds(pieces)
    replay.steps += 1
    replay.work += work
    replay.seconds = now + seconds
    return now + seconds


def _token(replay: Replay, row: _Row, now: float) -> None:
    if row.given:
        replay.gaps.append(now - row.last)
    else:
        replay.ttft.append(now - row.arrival.seconds)
    row.given, row.last = row.given + 1, now
    replay.tokens += 1


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return quantiles(values, n=100, method="inclusive")[percent - 1]
