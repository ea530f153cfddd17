"""``decodekit replay``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.panel import Panel
from rich.text import Text

from decodekit.cli.console import errors, fail, print_json, results
from decodekit.core.errors import InputError, Refused
from decodekit.core.protocols import TokenStrategy
from decodekit.core.trace import read_trace
from decodekit.recipe import load_recipe
from decodekit.view import page


def replay_trace(
    trace: Path,
    *,
    at: int,
    settings: Sequence[str],
    row: int,
    model: str | None,
    out: Path | None,
    page_to: Path | None,
    as_json: bool,
) -> int:
    """Decode a row of a trace as it was up to token ``at``, and from there on with these settings."""
    header, records = read_trace(trace)
    tokens = [record for record in records if record["type"] == "token" and record["row"] == row]
    if row >= len(header["rows"]) or not tokens:
        raise InputError(f"{trace} has no tokens of row {row}; its prompts are rows 0 to {len(header['rows']) - 1}")
    if at > len(tokens):
        raise InputError(f"--at {at} is behind the end: row {row} of {trace} has {len(tokens)} tokens")
    recipe = load_recipe(header["recipe"], set_values=["generation.num_return_sequences=1", *settings])
    if not isinstance(recipe.strategy, TokenStrategy):
        raise Refused(f"replay follows one row, and strategy {recipe.strategy.kind!r} chooses between several")
    with errors.status("loading the model") as status:
        from decodekit.integrations.models import load_model, load_others
        from decodekit.runtime.text_call import TextCall
        from decodekit.runtime.work import Replay

        loaded, tokenizer = load_model(model or header["model"], progress=status.update)
        others = load_others(recipe, loaded, tokenizer, progress=status.update)
        status.update(f"decoding from token {at} on")
        out = out or trace.with_suffix(f".at{at}.jsonl")
        told = {"of": str(trace), "row": row, "at": at, "set": list(settings)}
        start = Replay([record["id"] for record in tokens[:at]], header["rows"][row]["sample"], told)
        prompt = {**header["inputs"][row], "prompt": header["prompts"][row], "seed": header["rows"][row]["seed"]}
        options: dict[str, Any] = {"raw": header["raw"], "trace": out, "replay": start}
        call = TextCall(recipe, loaded, tokenizer, [prompt], options, models=others)
        for _ in call.run():
            pass
    [(_, output)] = call.outputs()
    if (found := list(read_trace(out)[0]["prompt_ids"][0])) != header["prompt_ids"][row]:
        raise InputError(f"the prompt has other tokens than in {trace} ({len(found)}); give the same model with -m")
    if output.error is not None:
        fail(output.error)
    kept, before, after = (
        str(tokenizer.decode(ids, skip_special_tokens=True))
        for ids in (start.tokens, [record["id"] for record in tokens[at:]], output.token_ids[at:])
    )
    if as_json:
        print_json({**told, "kept": kept, "before": before, "after": after, "output": dataclasses.asdict(output)})
    else:
        results.print(Text(kept, style="dim"))
        title = f"from token {at} on, "
        panels = [Panel(Text(before), title=title + "as traced"), Panel(Text(after), title=title + ", ".join(settings))]
        results.print(Columns(panels, equal=True, expand=True))
    if page_to is not None:
        page_to.write_text(page([trace, out]), encoding="utf-8")
    errors.print(f"wrote {out}" + (f" and {page_to}" if page_to is not None else ""), markup=False, soft_wrap=True)
    return 1 if output.error is not None else 0
