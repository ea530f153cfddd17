"""What a person sees: notes and progress on stderr, results on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

errors = Console(stderr=True, highlight=False, emoji=False)
results = Console(highlight=False, emoji=False)

_LINE = 1000


def fail(message: str) -> None:
    """One line that says what went wrong; never wrapped, so that scripts can match it."""
    errors.print("error: ", style="bold red", end="")
    errors.print(" ".join(message.split()), markup=False, soft_wrap=True)


def print_text(text: str) -> None:
    """A line of a model's or a person's text, to the letter: tabs and control characters too."""
    sys.stdout.write(f"{text}\n")


def print_table(table: Table) -> None:
    """A table as wide as the terminal; in a pipe or a file each of its rows is one line, however long."""
    (results if results.is_terminal else Console(width=_LINE, highlight=False, emoji=False)).print(table)


def print_json(document: Any) -> None:
    """The one JSON document of ``--json``."""
    json.dump(document, sys.stdout, ensure_ascii=False, indent=2)
    sys.stdout.write("\n")
