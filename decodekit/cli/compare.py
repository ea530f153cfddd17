"""``decodekit compare``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from decodekit.cli.console import errors, print_json, print_table, results
from decodekit.compare import Comparison, Line, as_json
from decodekit.compare.metrics import metric_of
from decodekit.compare.plot import plot
from decodekit.compare.rows import Progress, read_rows
from decodekit.core.errors import InputError
from decodekit.core.units import format_bytes
from decodekit.recipe import Recipe, load_recipe


def compare_recipes(
    paths: Sequence[str],
    *,
    data: Path,
    metric: str | None,
    template: str | None,
    reference: str | None,
    limit: int | None,
    model: str | None,
    settings: Sequence[str],
    batch: int,
    out: Path,
    resume: bool,
    as_json_document: bool,
) -> int:
    """Decode the rows with every recipe, and print and write what came of it."""
    recipes = _named({path: load_recipe(path, set_values=settings) for path in paths})
    rows = read_rows(data, template=template, reference=reference, limit=limit)
    name, rate = metric_of(metric, [row.reference for row in rows])
    identity = {"recipes": {key: own.to_dict() for key, own in recipes.items()}, "model": model}
    progress = Progress(out / "rows.jsonl", identity, rows, resume=resume)
    comparison = Comparison(recipes, rows, rate, progress, batch=batch)
    interrupted = False
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Bar(*columns, console=errors, transient=True) as bar:
        from decodekit.integrations.models import load_model, load_others

        task = bar.add_task("loading the model", total=None)

        def loading(what: str) -> None:
            bar.update(task, description=what)

        def decoding(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)
            if not errors.is_terminal:
                errors.print(f"{what} ({100 * done // total} % done)", markup=False, soft_wrap=True)

        loaded, tokenizer = load_model(model, progress=loading)
        others = {key: load_others(own, loaded, tokenizer, progress=loading) for key, own in recipes.items()}
        try:
            comparison.run(loaded, tokenizer, others, decoding)
        except KeyboardInterrupt:
            interrupted = True
    lines = comparison.lines()
    document = {"metric": name, "rows": len(comparison.complete()), "recipes": as_json(lines)}
    (out / "report.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if lines:
        (out / "plot.svg").write_text(plot(lines, comparison.frontier(), name), encoding="utf-8")
    if as_json_document:
        print_json(document)
    elif lines:
        _print(lines, name)
        results.print(f"wrote {out}: rows.jsonl, report.json, plot.svg", markup=False, soft_wrap=True)
    if interrupted:
        errors.print(
            f"interrupted after {len(comparison.complete())} of {len(rows)} rows; --resume goes on", markup=False
        )
        return 130
    return 1 if any(line.failed for line in lines) else 0


def _named(recipes: dict[str, Recipe]) -> dict[str, Recipe]:
    """By file name without its ending; by path where two have the same."""
    stems = [Path(path).stem for path in recipes]
    unique = len(set(stems)) == len(stems) and not {"plain", "samples"} & set(stems)
    if not unique and {"plain", "samples"} & set(recipes):
        raise InputError("a recipe cannot be called plain or samples here; rename its file")
    return dict(zip(stems, recipes.values(), strict=True)) if unique else recipes


def _print(lines: Sequence[Line], metric: str) -> None:
    results.print(f"{metric} over {lines[0].rows} rows: mean and 95 % interval; costs are means a row", markup=False)
    table = Table(box=None, pad_edge=False)
    for column in ("recipe", "quality", "over the first", "plain, same compute", "over plain"):
        table.add_column(column)
    for column in ("forwards", "forwarded", "tokens", "s", "K/V"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for line in lines:
        table.add_row(
            line.recipe,
            str(line.quality),
            "" if line.gain is None else str(line.gain),
            f"{line.matched.mean:.3f} (best of {line.samples:.1f}; oracle {line.oracle:.3f})",
            str(line.over_matched),
            f"{line.forwards:.0f}",
            f"{line.forwarded_tokens:.0f}",
            f"{line.tokens:.0f}",
            f"{line.seconds:.2f}",
            format_bytes(int(line.kv_bytes)),
            "" if line.recipe == "plain" else line.verdict + (f", {line.failed} rows failed" if line.failed else ""),
        )
    print_table(table)
