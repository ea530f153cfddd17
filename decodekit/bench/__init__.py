"""Benchmarks beside plain Hugging Face in the same process, one suite a file: figures are ratios."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from decodekit.bench.prompts import read_prompts
from decodekit.core.errors import InputError, nearest

Suite = Callable[[Any, Any, Sequence[Any], Callable[[str], None]], list[dict[str, Any]]]
"""Model, tokenizer, prompts (or what the suite reads instead) and a status callback to rows of figures."""
Reader = Callable[[Path | None, int | None], Sequence[Any]]
"""A data file, if any, and how many of its lines to what a suite is given."""


def suites() -> dict[str, str]:
    """Every suite and the sentence that says what it measures; a suite is a module here with a ``run`` function."""
    found = {}
    for path in sorted(files(__name__).iterdir(), key=lambda path: path.name):
        name, dot, suffix = path.name.partition(".")
        if not dot or suffix != "py":
            continue
        module = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(own, ast.FunctionDef) and own.name == "run" for own in module.body):
            found[name] = (ast.get_docstring(module) or "").splitlines()[0]
    return found


def load_suite(name: str) -> tuple[Suite, Reader]:
    """The suite of this name and what reads its data: its module's ``reads``, by default prompts.

    Raises:
        InputError: there is none.
    """
    if name not in suites():
        raise InputError(f"unknown suite {name!r}: {nearest(name, suites())}")
    module = import_module(f"{__name__}.{name}")
    return module.run, getattr(module, "reads", read_prompts)
