"""Traces as one HTML page that needs nothing else: no server, no network."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from decodekit.core.trace import read_trace


def page(traces: Sequence[str | Path]) -> str:
    """A page with these traces side by side; the first is what the others are compared with.

    Raises:
        InputError: one of them is not a trace.
    """
    read, names = [], []
    for path in map(Path, traces):
        header, records = read_trace(path)
        # A seed has more digits than a number of JavaScript.
        header["seed"] = str(header["seed"])
        names.append(path.name)
        read.append({"name": path.name, "header": header, "records": list(records)})
    # "<" would let a text end the element that holds the data.
    data = json.dumps(_finite(read), ensure_ascii=False).replace("<", "\\u003c")
    parts = {name: (files(__name__) / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    title = html.escape(" · ".join(names))
    return Template(parts["html"]).substitute(title=title, style=parts["css"], script=parts["js"], data=data)


def _finite(value: Any) -> Any:
    """Without NaN and infinities, which JSON does not have: a candidate without a score, for example."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
