"""``decodekit map`` in several processes that ``accelerate launch`` started, one a device."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from decodekit.cli.map import Options, check_target, merge, run_lines, shards_of
from decodekit.core.errors import Refused
from decodekit.recipe import Recipe
from decodekit.runtime.jsonl import Appender, read_results

_PATIENCE = timedelta(days=7)
"""How long a process that is done waits for the others: rows differ in how long they take."""


def map_shard(recipe: Recipe, source: Path, target: Path, options: Options, world: int, rank: int) -> int:
    """Decode every ``world``-th row into a file of its own; the first process puts them together at the end.

    What an interrupted run left in such files, of however many processes, goes into the output first.

    Raises:
        Refused: accelerate did not join the processes that were started.
        InputError: the output holds rows, and nobody said that they are to stay.
    """
    # Without a GPU accelerate has to be told.
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=_PATIENCE)
    if state.num_processes != world:
        raise Refused(
            f"{world} processes were started, and accelerate joined {state.num_processes} of them: each would take itself for "
            "the first, and rows be lost; start map without a launcher, or on devices that accelerate knows"
        )
    error: Exception | None = None
    if state.is_main_process:
        try:
            check_target(target, options.resume)
        except Exception as problem:
            error = problem
    [failure, *_] = gather_object([error])
    if failure is not None:
        if state.is_main_process:
            raise failure
        return 2
    done = set(read_results(target))
    own = target.with_name(f"{target.name}.{rank}-of-{world}")
    with closing(Appender(own)) as output:
        code = run_lines(recipe, str(source), output, options, done=done, shard=(rank, world))
    codes: list[int] = gather_object([code])
    if state.is_main_process:
        merge(target, shards_of(target))
    state.wait_for_everyone()
    state.destroy_process_group()
    return max(codes)
