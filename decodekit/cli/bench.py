"""``decodekit bench``."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from decodekit.bench import load_suite, suites
from decodekit.cli.console import errors, print_json, results
from decodekit.integrations.models import load_model


def run_suite(name: str, *, model: str | None, data: Path | None, limit: int | None, as_json: bool) -> int:
    """Run one suite and print its figures beside plain Hugging Face's."""
    if name == "list":
        for known, summary in suites().items():
            results.print(f"{known}: {summary}", markup=False)
        return 0
    suite = load_suite(name)
    prompts = suite.reads(data, limit)
    with errors.status("loading the model") as status:
        loaded, tokenizer = load_model(model, progress=status.update) if suite.needs_model(prompts) else (None, None)
        rows = suite.run(loaded, tokenizer, prompts, status.update)
    if as_json:
        print_json(rows)
        return 0
    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    results.print(table)
    return 0
