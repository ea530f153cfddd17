"""``decodekit plugins``, ``check`` and ``schema``: what there is, and whether a recipe fits it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from decodekit.cli.console import errors, fail, print_json, results
from decodekit.core.registry import inventory
from decodekit.recipe import load_recipe, recipe_faults
from decodekit.recipe.costs import cost_of
from decodekit.recipe.json_schema import recipe_schema


def list_plugins(*, as_json: bool) -> int:
    """A row a plugin; one that failed to import says why."""
    rows = inventory()
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
        return 0
    table = Table(box=None, pad_edge=False)
    for column in ("group", "kind", "distribution", "version", "status", "cost"):
        table.add_column(column, no_wrap=column != "cost", overflow="fold")
    for row in rows:
        cells = (row.group, row.kind, row.distribution, row.version, row.status, row.error or row.cost)
        table.add_row(*map(Text, cells), style=None if row.status == "ok" else "red")
    results.print(table)
    return 0


def check_recipe(recipe: str, settings: Sequence[str]) -> int:
    """Say what a right recipe does, or every fault of a wrong one, a line each."""
    faults = recipe_faults(recipe, set_values=settings)
    for fault in faults:
        fail(str(fault))
    if faults:
        return 2
    loaded = load_recipe(recipe, set_values=settings)
    rules = ", ".join(rule.kind for rule in loaded.rules) if loaded.rules else "none"
    others = {name: getattr(loaded, name) for name in ("constraint", "drafter", "cache") if name in loaded.model_fields_set}
    named = "".join(f", {name} {section.kind}" for name, section in others.items() if section is not None)
    results.print(f"ok: strategy {loaded.strategy.kind}, rules {rules}{named}", markup=False, soft_wrap=True)
    if (cost := cost_of(loaded)).factors or cost.unknown:
        results.print(str(cost), markup=False)
    return 0


def print_schema() -> int:
    """The JSON Schema on stdout, plugins that are missing from it on stderr."""
    document, failures = recipe_schema()
    print_json(document)
    for failure in failures:
        errors.print(f"left out: {failure.group} {failure.kind}: {failure.error}", markup=False, soft_wrap=True)
    return 0
