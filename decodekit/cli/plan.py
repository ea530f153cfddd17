"""``decodekit plan``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.table import Table

from decodekit.cache.ledger import Ledger, ledger
from decodekit.cli.console import print_json, print_table, results
from decodekit.core.errors import InputError
from decodekit.core.units import format_bytes, parse_bytes


def plan_cache(
    model: str | None,
    config: Path | None,
    *,
    context: int,
    batch: int,
    dtype: str | None,
    block_size: int,
    budget: str | None,
    as_json: bool,
) -> int:
    """Print the ledger of a model's cache; ``as_json`` with the names that it has in Python."""
    source = _source(model, config)
    plan = ledger(source, context, batch, dtype=dtype, block_size=block_size, budget=budget)
    if as_json:
        print_json(dataclasses.asdict(plan))
    else:
        _print(plan)
    return 0


def plan_workload(
    model: str | None,
    config: Path | None,
    workload: Path,
    *,
    slots: int,
    dtype: str | None,
    block_size: int,
    budget: str | None,
    tokens: int,
    flops: float,
    bandwidth: str,
    as_json: bool,
) -> int:
    """Replay a trace of requests in static batches and in the engine, and print what each takes at least."""
    from transformers import AutoConfig

    from decodekit.runtime.workload import continuous, machine_of, read_trace, split_of, static

    trace = read_trace(workload)
    source = _source(model, config)
    longest = max(arrival.prompt + arrival.output for arrival in trace)
    counted = ledger(source, longest, slots, dtype=dtype, block_size=block_size, budget=budget)
    own = source if hasattr(source, "to_dict") else AutoConfig.from_pretrained(source, trust_remote_code=False)
    machine = machine_of(own, counted, flops=flops, bandwidth=parse_bytes(bandwidth))
    blocks = None
    if budget is not None and machine.kv_bytes:
        blocks = (parse_bytes(budget) - slots * machine.state_bytes) // (machine.kv_bytes * block_size)
        if blocks * block_size < longest:
            raise InputError(
                f"budget {budget} holds {max(0, blocks) * block_size} tokens beside the states of {slots} rows; the longest "
                f"request of the workload has {longest}"
            )
    ways = [static(trace, machine, slots=slots)]
    for limit in (None, tokens):
        ways.append(continuous(trace, machine, slots=slots, tokens=limit, blocks=blocks, block_size=block_size))
    rows = [way.figures(machine) for way in ways]
    document: dict[str, Any] = {"floor": True, "requests": len(trace), "slots": slots, "ways": rows}
    if budget is not None:
        document["split"] = split_of(trace, machine, budget, block_size)
    if as_json:
        print_json(document)
        return 0
    results.print(
        f"{len(trace)} requests in {slots} slots, at {flops / 1e12:g} TFLOP/s and {bandwidth}/s: a "
        "floor, which real steps stay above\n",
        markup=False,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("way")
    for row in rows:
        table.add_column(str(row["way"]), justify="right")
    for metric in (name for name in rows[0] if name != "way"):
        values = [row[metric] for row in rows]
        cells = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)
        table.add_row(metric.replace("_", " "), *cells)
    print_table(table)
    if budget is not None:
        split = document["split"]
        results.print(
            f"\n{budget} hold about {split['rows']} rows of {split['mean_live_tokens']:.0f} live tokens: "
            f"{format_bytes(split['state_slots_bytes'])} for states, {split['kv_blocks']} blocks of K/V",
            markup=False,
        )
    return 0


def _source(model: str | None, config: Path | None) -> Any:
    if (model is None) == (config is None):
        given = "neither" if model is None else "both"
        raise InputError(
            "give either a model with -m (a Hub id or a folder) or its config.json with --config (a file, for a model that is "
            f"not here); got {given}"
        )
    return _config_of(model) if model is not None else config


def _config_of(model: str) -> Any:
    if (folder := Path(model).expanduser()).exists():
        return folder
    from huggingface_hub.utils import logging as hub_logging
    from transformers import AutoConfig

    hub_logging.set_verbosity_error()  # the Hub client logs every retry; what fails in the end is raised
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(
            f"cannot read the config of model {model!r}: {reason} Give a Hub id such as Qwen/Qwen3-8B, a model's folder, or "
            "with --config the config.json alone"
        ) from error


def _budget(plan: Ledger) -> str:
    """What the budget holds; where that is too little, what would do."""
    size = format_bytes(plan.budget_bytes or 0)
    if not any(advice.fits for advice in plan.advice):
        least = min(plan.advice, key=lambda advice: advice.bytes)
        return (
            f"{size} hold none of the caches below: the smallest, {least.cache}, takes {format_bytes(least.bytes)}; give "
            "a larger --budget, or a smaller --context or --batch"
        )
    length = "any number of" if plan.largest_context is None else plan.largest_context
    return f"{size} hold {plan.largest_batch} rows of {plan.context} tokens, or {plan.batch} of {length} tokens"


def _print(plan: Ledger) -> None:
    rows = f"{plan.batch} row{'s' * (plan.batch > 1)} of {plan.context} tokens"
    results.print(f"{plan.model_type or 'model'}: {rows}, {plan.dtype}, blocks of {plan.block_size}\n", markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("layers")
    for column in ("K/V a token", "states a row", "convolutions a row", "total"):
        table.add_column(column, justify="right")
    for kind in plan.kinds:
        window = f", last {kind.kept} tokens" if kind.kept is not None else ""
        sizes = (kind.kv_bytes_per_token, kind.state_bytes_per_request, kind.conv_bytes_per_request, kind.total_bytes)
        table.add_row(f"{kind.layers} {kind.kind}{window}", *map(format_bytes, sizes))
    sizes = (plan.kv_bytes_per_token, plan.state_bytes_per_request, plan.conv_bytes_per_request, plan.total_bytes)
    table.add_row("all", *map(format_bytes, sizes), style="bold")
    results.print(table)
    results.print()
    if plan.blocks_per_request:
        unused = format_bytes(plan.block_waste_bytes)
        results.print(f"{plan.blocks_per_request} blocks a row; {unused} stay unused in partly filled ones")
    if plan.crossover_tokens:
        results.print(
            f"from {plan.crossover_tokens} tokens on, recurrent layers take no more than attention layers would"
        )
    if plan.budget_bytes is not None:
        results.print(_budget(plan))
    results.print()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column()
    for advice in plan.advice:
        verdict = "recommended: " if advice.recommended else "does not fit: " if advice.fits is False else ""
        style = "bold" if advice.recommended else None
        table.add_row(advice.cache, format_bytes(advice.bytes), verdict + advice.reason, style=style)
    results.print(table)
