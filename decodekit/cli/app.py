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
    resume: Annotated[bool, typer.Option("--resume", help="go on with the rows that OUT lacks")] = False,
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
def plugins(json: Json = False) -> int:
    """List every plugin, and what failed to load."""
    from decodekit.cli.listing import list_plugins

    return list_plugins(as_json=json)


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
    kind: Annotated[str, typer.Argument(metavar="KIND", help="rule or strategy")],
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
