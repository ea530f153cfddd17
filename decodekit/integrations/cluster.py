"""A data set on a Ray cluster: Ray Data hands batches of rows to actors, each with an engine of its own.

An actor that dies is started again and its batch given to it anew; results come back to the one process that writes them, so
that an interrupted run goes on as on one machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from decodekit.core.errors import InputError
from decodekit.recipe import Recipe, load_recipe
from decodekit.runtime.jsonl import Line

_BATCH = 64
"""Rows that an actor is handed at once."""


class RowActor:
    """Decodes batches of rows on a worker.

    Args:
        recipe: as a mapping.
        model: id or folder; the demo model for ``None``.
        engine: options of the engine.
        mapper: options of the :class:`decodekit.runtime.mapping.Mapper`.
    """

    def __init__(
        self, recipe: Mapping[str, Any], model: str | None, engine: Mapping[str, Any], mapper: Mapping[str, Any]
    ) -> None:
        import torch

        from decodekit.integrations.models import load_model, load_others
        from decodekit.runtime.engine import Engine
        from decodekit.runtime.mapping import Mapper

        loaded = load_recipe(dict(recipe))
        own, tokenizer = load_model(model)
        if torch.cuda.is_available():
            own.to("cuda")
        others = load_others(loaded, own, tokenizer)
        self._mapper = Mapper(Engine(own, tokenizer, loaded, models=others, **engine), loaded, **mapper)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        """A batch of rows in JSON to their results in JSON."""
        lines = [Line(*json.loads(str(text))) for text in batch["line"]]
        return {"result": [json.dumps(result) for result in self._mapper.run(lines)]}


def map_on_ray(
    recipe: Recipe,
    lines: Iterable[Line],
    address: str,
    *,
    model: str | None,
    engine: Mapping[str, Any],
    mapper: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """The result of every row, as batches are done; one actor a GPU of the cluster, or one for every two CPUs.

    Args:
        recipe: how to decode.
        lines: the rows.
        address: of the cluster; ``local`` starts one in this machine.
        model: id or folder, which every worker can load.
        engine: options of each actor's engine.
        mapper: options of each actor's mapper.

    Raises:
        InputError: Ray is not installed, or the cluster cannot be reached.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise InputError("--ray needs Ray: pip install 'decodekit[ray]'") from error
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address=None if address == "local" else address, log_to_driver=False)
        except ConnectionError as error:
            raise InputError(f"the Ray cluster {address!r} cannot be reached: {error}") from error
    try:
        cluster = ray.cluster_resources()
        gpus, cpus = int(cluster.get("GPU", 0)), int(cluster.get("CPU", 1))
        rows = [{"line": json.dumps([line.number, line.row])} for line in lines]
        if not rows:
            return
        data = ray.data.from_items(rows, override_num_blocks=max(1, -(-len(rows) // _BATCH))).map_batches(
            RowActor,
            fn_constructor_args=(recipe.to_dict(), model, dict(engine), dict(mapper)),
            batch_size=_BATCH,
            concurrency=gpus or max(1, cpus // 2),
            num_gpus=1 if gpus else 0,
            num_cpus=1,
            max_restarts=-1,
            max_task_retries=3,
        )
        for row in data.iter_rows():
            yield json.loads(row["result"])
    finally:
        if started:
            ray.shutdown()
