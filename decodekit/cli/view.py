"""``decodekit view``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from decodekit.cli.console import results
from decodekit.core.errors import InputError
from decodekit.view import page


def view_traces(traces: Sequence[Path], out: Path) -> int:
    """Write the page of these traces."""
    text = page(traces)
    if not out.absolute().parent.is_dir():
        raise InputError(f"{out} cannot be written: its folder does not exist")
    out.write_text(text, encoding="utf-8")
    results.print(f"wrote {out}: open it in a browser", markup=False, soft_wrap=True)
    return 0
