"""``decodekit eval``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from decodekit.cli.console import errors, print_json, results
from decodekit.core.errors import InputError
from decodekit.core.extras import optional_module
from decodekit.recipe import load_recipe


def evaluate_recipe(
    recipe: str,
    *,
    task: str,
    limit: int | None,
    model: str | None,
    settings: Sequence[str],
    batch: int,
    raw: bool,
    as_json: bool,
) -> int:
    """Run one task and print its metrics."""
    loaded = load_recipe(recipe, set_values=settings)
    harness = optional_module("lm_eval", extra="eval", used_by="decodekit eval")
    manager, name = _task(optional_module("lm_eval.tasks", extra="eval", used_by="decodekit eval"), task)
    with errors.status("loading the model") as status:
        from decodekit.integrations.harness import HarnessModel
        from decodekit.integrations.models import load_model, load_others

        lm, tokenizer = load_model(model, progress=status.update)
        others = load_others(loaded, lm, tokenizer, progress=status.update)
        status.update(f"running {name}")
        found = harness.simple_evaluate(
            model=HarnessModel(loaded, lm, tokenizer, others, batch=batch),
            tasks=[name],
            limit=limit,
            task_manager=manager,
            bootstrap_iters=1000,
            apply_chat_template=bool(getattr(tokenizer, "chat_template", None)) and not raw,
            log_samples=False,
        )
    rows = found["results"]
    if as_json:
        print_json(
            {"task": name, "limit": limit, "recipe": loaded.to_dict(), "results": rows, "versions": found["versions"]}
        )
        return 0
    table = Table("task", "metric", "value", "standard error", box=None, pad_edge=False)
    for own, metrics in rows.items():
        for metric, value in metrics.items():
            if isinstance(value, float) and "_stderr" not in metric:
                error: Any = metrics.get(metric.replace(",", "_stderr,", 1))
                shown = f"{error:.4f}" if isinstance(error, float) else ""
                table.add_row(own, metric.removesuffix(",none"), f"{value:.4f}", shown)
    results.print(table)
    return 0


def _task(tasks: Any, name: str) -> tuple[Any, str]:
    """What finds tasks, and the task's name: of the harness, or in a YAML file."""
    if not name.endswith((".yaml", ".yml")):
        manager = tasks.TaskManager()
        if name not in manager.all_tasks:
            raise InputError(
                f"lm-evaluation-harness has no task {name!r}; 'lm-eval ls tasks' lists them, or give a YAML file"
            )
        return manager, name
    path = Path(name)
    try:
        # Its own tags (!function) are left to the harness.
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("task:")]
        own = yaml.safe_load(lines[0])["task"]
    except (OSError, IndexError, yaml.YAMLError) as error:
        raise InputError(f"{name!r} is no task file of lm-evaluation-harness (no line 'task: NAME')") from error
    return tasks.TaskManager(include_path=str(path.parent), include_defaults=False), str(own)
