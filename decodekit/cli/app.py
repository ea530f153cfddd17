"""All commands, each imported when it is called, so that ``--help`` needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from decodekit import __version__

app = typer.Typer(
    name="decodekit",
    help="Decoding strategies, logits rules and recipes over Hugging Face generate.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

RecipeFile = Annotated[str, typer.Argument(metavar="RECIPE", help="a recipe file (YAML or JSON)")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="a.b=c", help="set one option; may be repeated")]
Model = Annotated[
    str | None, typer.Option("-m", "--model", help="a Hugging Face id or local folder; the demo model if left out")
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"decodekit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    recipe: RecipeFile,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT ...]", help="stdin is one prompt if left out")
    ] = None,
    model: Model = None,
    settings: Settings = None,
    raw: Annotated[bool, typer.Option("--raw", help="do not use the chat template")] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="write what happened, a line a token")
    ] = None,
    json: Json = False,
) -> int:
    """Decode prompts as a recipe says."""
    from decodekit.cli.run import run_recipe

    return run_recipe(recipe, prompts or [], model=model, settings=settings or [], raw=raw, trace=trace, as_json=json)


@app.command("map")
def map_command(
    recipe: RecipeFile,
    source: Annotated[str, typer.Argument(metavar="IN", help="a JSONL file of rows: id, prompt; - for standard input")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="a JSONL file; - for standard output")],
    model: Model = None,
    settings: Settings = None,
    template: Annotated[
        str | None, typer.Option("--template", metavar="TEXT", help="the prompt, with {field} for fields of the row")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="do not use the chat template")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with the rows that OUT lacks, and those that failed")
    ] = False,
    unordered: Annotated[bool, typer.Option("--unordered", help="write rows as they end")] = False,
    budget: Annotated[str | None, typer.Option("--budget", metavar="SIZE", help="of the caches, such as 4GiB")] = None,
    slots: Annotated[int, typer.Option("--slots", metavar="N", min=1, help="most rows decoded at once")] = 64,
    ray: Annotated[
        str | None, typer.Option("--ray", metavar="ADDRESS", help="run on this Ray cluster; 'local' starts one here")
    ] = None,
    json: Json = False,
) -> int:
    """Decode every row of a JSONL file as a recipe says."""
    from decodekit.cli.map import Options, map_rows

    options = Options(model, settings or [], template, raw, resume, unordered, budget, slots, ray, json)
    return map_rows(recipe, source, target, options)


@app.command()
def view(
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="TRACE.jsonl ...", help="what run --trace wrote; several are shown side by side"),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT.html", help="the page to write")],
) -> int:
    """Show what decoding did, as one HTML page that works offline."""
    from decodekit.cli.view import view_traces

    return view_traces(traces, out)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE.jsonl", help="what run --trace wrote")],
    at: Annotated[int, typer.Option("--at", metavar="N", min=0, help="the first token that may differ, from 0")],
    settings: Settings = None,
    row: Annotated[int, typer.Option("--row", metavar="R", min=0, help="which row of the trace")] = 0,
    model: Model = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="NEW.jsonl", help="the new trace; beside the old one if left out"),
    ] = None,
    page: Annotated[Path | None, typer.Option("--view", metavar="OUT.html", help="write a page with both")] = None,
    json: Json = False,
) -> int:
    """Decode a traced row again from one token on, with other settings, and show both continuations."""
    from decodekit.cli.replay import replay_trace

    return replay_trace(
        trace, at=at, settings=settings or [], row=row, model=model, out=out, page_to=page, as_json=json
    )


@app.command("eval")
def evaluate(
    recipe: RecipeFile,
    task: Annotated[
        str, typer.Option("--task", metavar="NAME", help="of lm-evaluation-harness, or a task's YAML file")
    ],
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="use so many documents")] = None,
    model: Model = None,
    settings: Settings = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="requests that are run side by side")] = 8,
    raw: Annotated[bool, typer.Option("--raw", help="do not use the chat template")] = False,
    json: Json = False,
) -> int:
    """Evaluate a recipe on a task of lm-evaluation-harness (pip install 'decodekit[eval]')."""
    from decodekit.cli.evaluate import evaluate_recipe

    return evaluate_recipe(
        recipe, task=task, limit=limit, model=model, settings=settings or [], batch=batch, raw=raw, as_json=json
    )


@app.command()
def compare(
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE ...", help="the others are compared with the first")],
    data: Annotated[
        Path, typer.Option("--data", metavar="FILE", help="a JSONL file, a prompt and its reference a line")
    ],
    metric: Annotated[
        str | None, typer.Option("--metric", metavar="NAME", help="number, contains, or a utility such as exact, chrf")
    ] = None,
    template: Annotated[
        str | None, typer.Option("--template", metavar="TEXT", help="the prompt, with {fields} of a line")
    ] = None,
    reference: Annotated[
        str | None, typer.Option("--reference", metavar="FIELD", help="the field with what is expected")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="use so many lines")] = None,
    model: Model = None,
    settings: Settings = None,
    batch: Annotated[
        int,
        typer.Option("--batch", metavar="N", min=1, help="rows of the model side by side: samples, beams, branches"),
    ] = 64,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="where rows, report and plot go")] = Path(
        "compare"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="go on with what is in DIR")] = False,
    json: Json = False,
) -> int:
    """Say what recipes gain on a data file, what they cost, and whether plain samples would gain as much.

    A recipe is held against the best, by probability, of as many plain samples (temperature 0.7, 64 at most) as the tokens
    that it forwarded would buy. All recipes buy from one pool a prompt; where a recipe's candidates are such samples, they are
    the first of the pool. Ctrl-C loses the batch at hand; --resume goes on.
    """
    from decodekit.cli.compare import compare_recipes

    return compare_recipes(
        recipes,
        data=data,
        metric=metric,
        template=template,
        reference=reference,
        limit=limit,
        model=model,
        settings=settings or [],
        batch=batch,
        out=out,
        resume=resume,
        as_json_document=json,
    )


@app.command()
def plugins(
    kind: Annotated[
        str | None, typer.Argument(metavar="[KIND]", help="show this plugin with its options, such as dola")
    ] = None,
    json: Json = False,
) -> int:
    """List every plugin, and what failed to load; or show one with its options."""
    from decodekit.cli.listing import list_plugins, show_plugin

    return list_plugins(as_json=json) if kind is None else show_plugin(kind, as_json=json)


@app.command()
def check(recipe: RecipeFile, settings: Settings = None) -> int:
    """Say whether a recipe is right, without loading a model."""
    from decodekit.cli.listing import check_recipe

    return check_recipe(recipe, settings or [])


@app.command()
def schema() -> int:
    """Print the JSON Schema of a recipe, with all installed plugins."""
    from decodekit.cli.listing import print_schema

    return print_schema()


@app.command()
def export(
    recipe: RecipeFile,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a new or empty folder")],
    settings: Settings = None,
) -> int:
    """Write a custom_generate folder that runs with model.generate(custom_generate=DIR, trust_remote_code=True)."""
    from decodekit.cli.scaffold import export_recipe

    return export_recipe(recipe, directory, settings or [])


@app.command()
def new(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="rule, strategy, constraint, drafter, scorer or utility")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="the plugin's name, such as top_secret")],
) -> int:
    """Write a plugin package whose tests pass at once."""
    from decodekit.cli.scaffold import new_plugin

    return new_plugin(kind, name)


@app.command()
def bench(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="the suite's name; 'list' names all")],
    model: Model = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FILE", help="a JSONL file with a 'prompt' a line")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="use so many prompts")] = None,
    json: Json = False,
) -> int:
    """Measure decodekit beside plain Hugging Face, in the same run."""
    from decodekit.cli.bench import run_suite

    return run_suite(suite, model=model, data=data, limit=limit, as_json=json)


@app.command()
def plan(
    context: Annotated[int, typer.Option("--context", metavar="N", min=1, help="tokens of a row, prompt and output")],
    batch: Annotated[int, typer.Option("--batch", metavar="B", min=1, help="rows, samples and beams counted")],
    model: Annotated[str | None, typer.Option("-m", "--model", help="a Hugging Face id or local folder")] = None,
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="a config.json or its folder")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="of K/V; the model's own if left out")] = None,
    block_size: Annotated[int, typer.Option("--block-size", metavar="N", min=1, help="tokens of a block")] = 16,
    budget: Annotated[str | None, typer.Option("--budget", metavar="SIZE", help="of the caches, such as 4GiB")] = None,
    workload: Annotated[
        Path | None,
        typer.Option(
            "--workload", metavar="FILE", help="a JSONL trace to replay: prompt_tokens, output_tokens, arrival_s"
        ),
    ] = None,
    tokens_per_step: Annotated[
        int, typer.Option("--tokens-per-step", metavar="N", min=1, help="of the replayed engine")
    ] = 2048,
    tflops: Annotated[float, typer.Option("--tflops", help="of the device; an H200's dense bf16 by default")] = 989.0,
    bandwidth: Annotated[
        str, typer.Option("--bandwidth", metavar="SIZE", help="bytes a second of its memory")
    ] = "4.8TB",
    json: Json = False,
) -> int:
    """Say what a model's cache takes, and which kind to choose, without loading weights."""
    from decodekit.cli.plan import plan_cache, plan_workload

    if workload is not None:
        return plan_workload(
            model,
            config,
            workload,
            slots=batch,
            dtype=dtype,
            block_size=block_size,
            budget=budget,
            tokens=tokens_per_step,
            flops=tflops * 1e12,
            bandwidth=bandwidth,
            as_json=json,
        )
    return plan_cache(
        model, config, context=context, batch=batch, dtype=dtype, block_size=block_size, budget=budget, as_json=json
    )


@app.command()
def doctor(model: Model = None, json: Json = False) -> int:
    """Measure on a model whether it decodes right: its cache, padding, masks, rollback, tokenizer; 1 if something is wrong."""
    from decodekit.cli.doctor import examine_model

    return examine_model(model, as_json=json)
