"""``decodekit run``."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodekit.cli.console import errors, fail, print_json, print_text, results
from decodekit.cli.live import LiveText
from decodekit.core.errors import InputError
from decodekit.core.types import Output
from decodekit.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from decodekit.runtime.choosing import StepRecord
    from decodekit.runtime.text_call import TextCall

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
    if not any(text.strip() for text in texts):
        raise InputError("the prompt is empty; give at least one word")
    options: dict[str, Any] = {"raw": raw} | ({"trace": trace} if trace is not None else {})
    live = LiveText(results, texts) if results.is_terminal and not as_json else None
    outputs, interrupted = decode(loaded, texts, model, options, live)
    if as_json:
        print_json([{"prompt": texts[index], **dataclasses.asdict(output)} for index, output in outputs])
    else:
        for index, output in outputs:
            if live is None or index not in live.shown:
                _print_output(texts[index], output)
            _print_stats(output, prompt=index if live is not None and len(outputs) > 1 else None)
    if interrupted:
        return 130
    return 1 if any(output.finish_reason == "error" for _, output in outputs) else 0


def decode(
    recipe: Recipe, texts: Sequence[str], model: str | None, options: dict[str, Any], live: LiveText | None
) -> tuple[list[tuple[int, Output]], bool]:
    """The outputs with the index of their prompt, and whether the run was interrupted.

    Progress goes to stderr; with ``live`` it and the texts go there as they come.
    """
    with errors.status("starting") as status:
        from decodekit.integrations.models import load_model, load_others

        status.update("loading the model")
        loaded, tokenizer = load_model(model, progress=status.update)
        others = load_others(recipe, loaded, tokenizer, progress=status.update)
        from decodekit.runtime.text_call import TextCall

        status.update(f"reading {len(texts)} prompt{'s' * (len(texts) > 1)}")
        call = TextCall(recipe, loaded, tokenizer, texts, options, models=others)
        if live is None or call.copies > 1:
            finished = _run(call, lambda _, said: status.update(said))
            return call.outputs(), not finished
    with live:
        finished = _run(call, live.take)
    return call.outputs(), not finished


def _run(call: TextCall, say: Callable[[StepRecord, str], None]) -> bool:
    """Decode, telling every step; whether it came to the end."""
    started, tokens = time.perf_counter(), 0
    try:
        for record in call.run():
            tokens += sum(record.taken)
            rate = tokens / (time.perf_counter() - started)
            left = sum(sequence.finish_reason is None for sequence in record.sequences)
            say(record, f"{tokens} tokens, {rate:.1f} a second, {left} rows left")
    except KeyboardInterrupt:
        call.cancel()
        return False
    return True


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
        return
    print_text(output.text)


def _print_stats(output: Output, prompt: int | None) -> None:
    stats = output.stats
    if output.error is None:
        parts = [f"{len(output.token_ids)} tokens", output.finish_reason]
        if "tokens_per_s" in stats:
            parts.append(f"{stats['tokens_per_s']:.1f} tokens/s")
            parts.append(f"first after {stats['ttft_s']:.2f} s")
        if stats.get("draft_tokens"):
            parts.append(f"{stats['accepted_tokens']} of {stats['draft_tokens']} drafted tokens accepted")
        which = "" if prompt is None else f"prompt {prompt}: "
        errors.print(f"[{which}{', '.join(parts)}]", style="dim", markup=False)
        held = stats.get("constraint", {})
        if "violation" in held:
            unheld = ", ".join(held["unsupported"])
            errors.print(f"[{which}the text is not valid: {held['violation']}; not enforced: {unheld}]", markup=False)
    if prompt is None:
        print_text("")
