"""``decodekit plugins``, ``check`` and ``schema``: what there is, and whether a recipe fits it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from pydantic.fields import FieldInfo
from rich.table import Table
from rich.text import Text

from decodekit.cli.console import errors, fail, print_json, print_table, results
from decodekit.cli.tables import options_of
from decodekit.core.errors import InputError, nearest
from decodekit.core.options import names
from decodekit.core.protocols import Plugin
from decodekit.core.registry import GROUPS, inventory, kinds, load
from decodekit.recipe import load_recipe, recipe_faults
from decodekit.recipe.costs import cost_of
from decodekit.recipe.json_schema import recipe_schema

_WIDE = 110
"""Columns of a terminal from which on versions and costs have room."""


def list_plugins(*, as_json: bool) -> int:
    """A row a plugin; one that failed to import says why, below the table."""
    rows = inventory()
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
        return 0
    columns: tuple[str, ...] = ("group", "kind", "distribution", "version", "status", "cost")
    if results.is_terminal and results.width < _WIDE:
        columns = ("group", "kind", "distribution", "status")
    table = _table(*columns)
    for row in rows:
        cells = (getattr(row, column) for column in columns)
        table.add_row(*map(Text, cells), style=None if row.status == "ok" else "red")
    print_table(table)
    for row in rows:
        if row.error:
            results.print(f"{row.group} {row.kind} of {row.distribution}: {row.error}", markup=False, soft_wrap=True)
    return 0


def show_plugin(kind: str, *, as_json: bool) -> int:
    """What one plugin does and the options it has; of every group that has one of this name."""
    name = kind.rpartition(":")[2]
    known = [(group, each) for group in GROUPS for each in kinds(group)]
    groups = [group for group, each in known if each == name]
    if not groups:
        raise InputError(f"unknown plugin {kind!r}: {nearest(name, {each for _, each in known})}")
    shown = [(group, load(group, kind)) for group in groups]
    if as_json:
        print_json([_described(group, name, plugin) for group, plugin in shown])
        return 0
    for number, (group, plugin) in enumerate(shown):
        if number:
            results.print()
        results.print(f"{name} ({group})", style="bold", markup=False)
        results.print(inspect.getdoc(plugin) or "", markup=False, soft_wrap=True)
        table = _table("option", "default", "meaning")
        for option, default, meaning in options_of(plugin):
            required = not default and _field(plugin, option).is_required()
            table.add_row(*map(Text, (option, "required" if required else default, meaning)))
        results.print()
        print_table(table)
    return 0


def _described(group: str, kind: str, plugin: type[Plugin]) -> dict[str, Any]:
    options = [
        {"name": name, "required": _field(plugin, name).is_required(), "default": default, "description": meaning}
        for name, default, meaning in options_of(plugin)
    ]
    return {"group": group, "kind": kind, "doc": inspect.getdoc(plugin), "cost": plugin.cost, "options": options}


def _field(plugin: type[Plugin], option: str) -> FieldInfo:
    return plugin.model_fields[names(plugin)[option]]


def _table(*columns: str) -> Table:
    """The last column takes the room that is left."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column != columns[-1], overflow="fold")
    return table


def check_recipe(recipe: str, settings: Sequence[str]) -> int:
    """Say what a right recipe does, or every fault of a wrong one, a line each."""
    faults = recipe_faults(recipe, set_values=settings)
    for fault in faults:
        fail(str(fault))
    if faults:
        return 2
    loaded = load_recipe(recipe, set_values=settings)
    rules = ", ".join(rule.kind for rule in loaded.rules) if loaded.rules else "none"
    others = {
        name: getattr(loaded, name) for name in ("constraint", "drafter", "cache") if name in loaded.model_fields_set
    }
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
