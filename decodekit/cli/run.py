"""``decodekit run``."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn

from decodekit.cli.console import errors, fail, print_json, print_text
from decodekit.core.errors import InputError
from decodekit.core.types import Output
from decodekit.recipe import Recipe, load_recipe

_MAX_PROMPT = 1 << 24


def run_recipe(
    recipe: str,
    prompts: Sequence[str],
    *,
    model: str | None,
    settings: Sequence[str],
    raw: bool,
    trace: Path | None,
    as_json: bool,
) -> int:
    """Decode the prompts as one batch and print what came of each."""
    # The recipe is read first: a typing error should not wait for a model.
    loaded = load_recipe(recipe, set_values=settings)
    texts = list(prompts) or [_standard_input()]
    options: dict[str, Any] = {"raw": raw} | ({"trace": trace} if trace is not None else {})
    outputs, interrupted = decode(loaded, texts, model, options)
    if as_json:
        print_json([{"prompt": texts[index], **dataclasses.asdict(output)} for index, output in outputs])
    else:
        for index, output in outputs:
            _print_output(texts[index], output)
    if interrupted:
        return 130
    return 1 if any(output.finish_reason == "error" for _, output in outputs) else 0


def decode(
    recipe: Recipe, texts: Sequence[str], model: str | None, options: dict[str, Any]
) -> tuple[list[tuple[int, Output]], bool]:
    """The outputs with the index of their prompt, and whether the run was interrupted; progress on stderr."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("starting")

        def say(status: str) -> None:
            progress.update(task, description=status)

        from decodekit.integrations.models import load_model, load_others

        say("loading the model")
        loaded, tokenizer = load_model(model, progress=say)
        others = load_others(recipe, loaded, tokenizer, progress=say)
        from decodekit.runtime.text_call import TextCall

        say(f"reading {len(texts)} prompt{'s' * (len(texts) > 1)}")
        call = TextCall(recipe, loaded, tokenizer, texts, options, models=others)
        started, tokens = time.perf_counter(), 0
        try:
            for record in call.run():
                tokens += len(record.tokens)
                rate = tokens / (time.perf_counter() - started)
                say(
                    f"{tokens} tokens, {rate:.1f} a second, {sum(s.finish_reason is None for s in record.sequences)} rows left"
                )
        except KeyboardInterrupt:
            call.cancel()
            return call.outputs(), True
    return call.outputs(), False


def _standard_input() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError("no prompt was given; give prompts after the recipe, or one on standard input")
    try:
        text = sys.stdin.read(_MAX_PROMPT + 1)
    except UnicodeError as error:
        raise InputError(f"standard input is not text: {error}") from error
    if len(text) > _MAX_PROMPT:
        raise InputError(
            f"standard input holds more than {_MAX_PROMPT} characters; a prompt is a text for a model's context"
        )
    return text.strip()


def _print_output(prompt: str, output: Output) -> None:
    print_text(f"> {prompt}")
    if output.error is not None:
        fail(output.error)
        print_text("")
        return
    print_text(output.text)
    stats = output.stats
    rate = f", {stats['tokens_per_s']:.1f} tokens/s" if "tokens_per_s" in stats else ""
    errors.print(f"[{len(output.token_ids)} tokens, {output.finish_reason}{rate}]", style="dim", markup=False)
    print_text("")
