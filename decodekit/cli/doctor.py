"""``decodekit doctor``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from decodekit.cli.console import errors, print_json, results
from decodekit.integrations.doctor import Finding, examine
from decodekit.integrations.models import load_model


def examine_model(model: str | None, *, as_json: bool) -> int:
    """Print each law with what was measured; 1 if any fails."""
    with errors.status("loading the model") as status:
        loaded, tokenizer = load_model(model, progress=status.update)
        name = model or loaded.config._name_or_path
        found = list[Finding]()
        for finding in examine(loaded, tokenizer):
            found.append(finding)
            status.update(f"{len(found)} laws measured")
            if not as_json:
                _print(finding)
    failed = sum(finding.status == "fails" for finding in found)
    if as_json:
        print_json({"model": name, "dtype": str(loaded.dtype).removeprefix("torch."), "laws": [*map(_plain, found)]})
    else:
        results.print(
            f"{name}, {loaded.dtype}: {len(found) - failed} of {len(found)} laws hold", markup=False, soft_wrap=True
        )
    return 1 if failed else 0


def _print(finding: Finding) -> None:
    mark = {"holds": "ok     ", "fails": "FAILS  ", "refused": "refused"}[finding.status]
    number = f"{finding.value:.2g} (limit {finding.limit:.2g})" if math.isfinite(finding.value) else "no number"
    note = f"  {finding.note}" if finding.note else ""
    style = {"fails": "bold red", "refused": "dim"}.get(finding.status)
    results.print(f"{mark}  {finding.law:<38} {number}{note}", style=style, markup=False, soft_wrap=True)
    if finding.avoid:
        results.print(f"         do not use: {finding.avoid}", style=style, markup=False, soft_wrap=True)


def _plain(finding: Finding) -> dict[str, Any]:
    """JSON has no infinity."""
    return {**dataclasses.asdict(finding), "value": finding.value if math.isfinite(finding.value) else None}
