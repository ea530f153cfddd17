"""The command line. Results go to stdout, progress and errors to stderr.

Exit codes: 0 good, 1 some rows failed, 2 bad input (one clear line), 130 interrupted (what was finished is kept).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from decodekit.cli.app import app
from decodekit.cli.console import fail
from decodekit.core.errors import DecodekitError

# typer brings a click of its own, whose base error has no public name.
UsageError = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    try:
        code = app(args=list(arguments) if arguments is not None else None, standalone_mode=False)
    except UsageError as error:  # type: ignore[misc]
        error.show()
        _explain(error)
        code = error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except (DecodekitError, OSError, UnicodeError) as error:
        missing = error.filename if isinstance(error, FileNotFoundError) else None
        fail(f"no such file: {missing!r} (relative paths start at {Path.cwd()})" if missing else str(error))
        code = 2
    sys.exit(code or 0)


def _explain(error: Exception) -> None:
    """Say what a missing or wrong parameter is: its name alone tells that to who knows it already."""
    parameter: Any = getattr(error, "param", None)
    if (told := getattr(parameter, "help", None)) is not None:
        named = parameter.opts[-1:] if parameter.param_type_name == "option" else []
        name = " ".join(filter(None, (*named, parameter.metavar)))
        typer.echo(f"{name}: {told}", err=True)
