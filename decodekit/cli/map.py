"""``decodekit map``."""

from __future__ import annotations

import glob
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from decodekit.cli.console import errors, fail
from decodekit.core.errors import InputError
from decodekit.recipe import Recipe, load_recipe
from decodekit.runtime.jsonl import Appender, Line, key_of, read_lines, read_results, rewrite

INTERRUPTED = 130
"""Exit code of a run that a key stopped; what was finished is kept."""


class Options(NamedTuple):
    """What the command line says beside recipe and files.

    Attributes:
        model: id or folder.
        settings: of the recipe.
        template: of prompts.
        raw: no chat template.
        resume: go on with an earlier output.
        unordered: write rows as they end.
        budget: of the caches.
        slots: most rows at once.
        ray: address of a cluster; ``local`` starts one here.
        as_json: the summary as one JSON document on stdout.
    """

    model: str | None
    settings: Sequence[str]
    template: str | None
    raw: bool
    resume: bool
    unordered: bool
    budget: str | None
    slots: int
    ray: str | None
    as_json: bool


def map_rows(recipe: str, source: str, target: str, options: Options) -> int:
    """Decode every row of a JSONL file."""
    loaded = load_recipe(recipe, set_values=options.settings)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if (world > 1 or options.ray is not None) and "-" in (source, target):
        raise InputError("several processes cannot share standard input and output; give files")
    if target == "-" and (options.resume or options.as_json):
        raise InputError("standard output holds the rows: --resume and --json need an output file")
    if world > 1:
        from decodekit.cli.shards import map_shard

        return map_shard(loaded, Path(source), Path(target), options, world, rank)
    done = check_target(Path(target), options.resume) if target != "-" else {}
    with closing(Appender(sys.stdout.buffer if target == "-" else Path(target))) as output:
        code = run_lines(loaded, source, output, options, done=set(done))
    if options.ray is not None and not options.unordered and code != INTERRUPTED:
        merge(Path(target), [])  # a cluster gives rows as they end
    return code


def check_target(target: Path, resume: bool) -> dict[str, dict[str, Any]]:
    """The rows that an output already has; what a killed run of several processes left beside it is put into it.

    Rows that failed are taken out, so that they are tried again.

    Raises:
        InputError: there are some, and nobody said that they are to stay.
    """
    left = shards_of(target)
    if not resume and (left or (target.exists() and target.stat().st_size)):
        raise InputError(f"{target} exists; --resume goes on with its missing rows, or give another output file")
    if left:
        merge(target, left)
    known = read_results(target)
    done = {key: row for key, row in known.items() if "error" not in row}
    if len(done) < len(known):
        rewrite(target, done.values())
    return done


def shards_of(target: Path) -> list[Path]:
    """The files into which several processes write their rows."""
    return sorted(target.parent.glob(f"{glob.escape(target.name)}.*-of-*"))


class Input:
    """The lines of the input that are to be decoded; those that are malformed are told and counted.

    Args:
        source: the file, ``-`` for standard input.
        done: keys of ids that are not to be decoded again.
        shard: which of how many processes this is.
    """

    def __init__(self, source: str, done: set[str], shard: tuple[int, int] = (0, 1)) -> None:
        self._source, self._done, self._shard = source, done, shard
        self.malformed = self.skipped = 0

    def __iter__(self) -> Iterator[Line]:
        rank, world = self._shard
        try:
            with sys.stdin.buffer if self._source == "-" else open(self._source, "rb") as file:
                name = "standard input" if self._source == "-" else self._source
                for place, line in enumerate(read_lines(file, name)):
                    if place % world != rank:
                        continue
                    if line.error is not None:
                        self.malformed += 1
                        fail(line.error)
                    elif key_of(line.id) in self._done:
                        self.skipped += 1
                    else:
                        yield line
        except OSError as error:
            raise InputError(f"{self._source} cannot be read: {error.strerror}") from error

    def count(self) -> int | None:
        """Rows still to be decoded by this process, for the time that is left; ``None`` where nobody knows."""
        if self._source == "-":
            return None
        with open(self._source, "rb") as file:
            lines = sum(bool(line.strip()) for line in file)
        return -(-max(0, lines - len(self._done)) // self._shard[1])


def run_lines(
    recipe: Recipe,
    source: str,
    output: Appender,
    options: Options,
    *,
    done: set[str],
    shard: tuple[int, int] = (0, 1),
) -> int:
    """Decode the lines that are missing, and write each result; the exit code."""
    from decodekit.runtime.mapping import Tally

    lines, tally, started = Input(source, done, shard), Tally(), time.perf_counter()
    interrupted, total = False, lines.count()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors, transient=True, disable=shard[0] > 0) as progress:
        bar = progress.add_task("loading the model", total=total)
        tokens, began = 0, time.perf_counter()

        def stepped(new: int) -> None:
            nonlocal tokens
            tokens += new
            progress.update(bar, description=f"{tokens / max(time.perf_counter() - began, 1e-9):.1f} tokens/s")

        try:
            results = _results(recipe, lines, options, shard, stepped, progress, bar)
            began = time.perf_counter()
            for result in results:
                output.append(result)
                tally.count(result)
                progress.advance(bar)
        except KeyboardInterrupt:
            interrupted = True
    summary = {
        "rows": tally.rows,
        "failed": tally.failed,
        "malformed": lines.malformed,
        "skipped": lines.skipped,
        "prompt_tokens": tally.prompt_tokens,
        "output_tokens": tally.output_tokens,
        "forwarded_tokens": tally.forwarded_tokens,
        "seconds": time.perf_counter() - started,
        "tokens_per_s": tally.output_tokens / max(time.perf_counter() - began, 1e-9),
    }
    if shard[1] == 1:
        report(summary, as_json=options.as_json)
    if interrupted:
        return INTERRUPTED
    return 1 if tally.failed or lines.malformed else 0


def _results(
    recipe: Recipe, lines: Input, options: Options, shard: tuple[int, int], stepped: Any, progress: Progress, bar: Any
) -> Iterator[dict[str, Any]]:
    if options.ray is not None:
        from decodekit.integrations.cluster import map_on_ray

        return map_on_ray(
            recipe,
            lines,
            options.ray,
            model=options.model,
            engine=_engine_options(options),
            mapper={"template": options.template, "raw": options.raw},
        )
    from decodekit.integrations.models import load_model, load_others
    from decodekit.runtime.engine import Engine
    from decodekit.runtime.mapping import Mapper

    def say(status: str) -> None:
        progress.update(bar, description=status)

    model, tokenizer = load_model(options.model, progress=say)
    others = load_others(recipe, model, tokenizer, progress=say)
    if shard[1] > 1:
        from accelerate import PartialState

        model.to(PartialState().device)
    engine = Engine(model, tokenizer, recipe, models=others, **_engine_options(options))
    mapper = Mapper(engine, recipe, options.template, raw=options.raw, ordered=not options.unordered)
    return mapper.run(lines, stepped)


def _engine_options(options: Options) -> dict[str, Any]:
    return {"budget": options.budget, "slots": options.slots}


def report(summary: dict[str, Any], *, as_json: bool) -> None:
    """Say what was done, and what it cost."""
    if as_json:
        json.dump(summary, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    rows = ", ".join(f"{summary[name]} {name}" for name in ("rows", "failed", "malformed", "skipped") if summary[name])
    errors.print(
        f"{rows or 'no rows'}; {summary['prompt_tokens']} prompt and {summary['output_tokens']} output tokens, "
        f"{summary['forwarded_tokens']} forwarded, in {summary['seconds']:.1f} s ({summary['tokens_per_s']:.1f} tokens/s)",
        style="dim",
        markup=False,
    )


def merge(target: Path, shards: Sequence[Path]) -> None:
    """Put the rows of all processes into the output, in the order of the input."""
    rows = read_results(target)
    for shard in shards:
        rows |= read_results(shard)
    rewrite(target, sorted(rows.values(), key=lambda row: int(row.get("line", 0))))
    for shard in shards:
        shard.unlink()
