"""A recipe over the rows of a data set: prompts from templates, options of single rows, results as they end or in order."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from decodekit.core.errors import InputError, reason
from decodekit.recipe import Recipe, load_recipe
from decodekit.runtime.engine import Engine, EngineRequest
from decodekit.runtime.intake import check_options
from decodekit.runtime.jsonl import Line
from decodekit.runtime.work import INPUTS

_AHEAD = 4
"""Rows that are submitted ahead of those that run, for each slot."""


@dataclass
class Tally:
    """What a run did.

    Attributes:
        rows: that are finished.
        failed: that could not be decoded.
        prompt_tokens: of their prompts.
        output_tokens: of their outputs.
        forwarded_tokens: that went through the models.
    """

    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    forwarded_tokens: int = 0

    def count(self, result: Mapping[str, Any]) -> None:
        """One row more."""
        self.rows += 1
        self.failed += "error" in result
        for name in ("prompt_tokens", "output_tokens", "forwarded_tokens"):
            setattr(self, name, getattr(self, name) + result.get(name, 0))


@dataclass
class Mapper:
    """Decodes rows.

    Attributes:
        engine: where.
        recipe: how; a row's own ``recipe`` is merged over it.
        template: of the prompt, with ``{field}`` for the row's fields; ``None`` takes its ``prompt`` or ``messages``.
        raw: texts skip the chat template.
        ordered: results in the order of the rows.
    """

    engine: Engine
    recipe: Recipe
    template: str | None = None
    raw: bool = False
    ordered: bool = True
    _inputs: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        strategies = [self.recipe.strategy, getattr(self.recipe.strategy, "inner", self.recipe.strategy)]
        needs = {str(need) for strategy in strategies for need in strategy.needs}
        self._inputs = frozenset({*INPUTS, *needs} - {"text", "tokenizer", "hidden_states"})

    def run(self, lines: Iterable[Line], progress: Callable[[int], None] | None = None) -> Iterator[dict[str, Any]]:
        """A result a row, failed ones too.

        Args:
            lines: the rows; none is malformed.
            progress: told how many tokens came since it was told last, after every step.
        """
        source, order = iter(lines), list[int]()
        running: dict[int, tuple[Line, EngineRequest]] = {}
        ready: dict[int, dict[str, Any]] = {}
        most, exhausted = _AHEAD * self.engine.slots, False
        tokens = 0
        while True:
            while not exhausted and len(order) < most:
                line = next(source, None)
                if line is None:
                    exhausted = True
                    break
                order.append(line.number)
                try:
                    running[line.number] = line, self._submit(line)
                except Exception as error:  # whatever one row holds, the others are decoded
                    ready[line.number] = _failure(line, reason(error))
            for number, (line, request) in [*running.items()]:
                if request.done:
                    ready[number] = _result(line, request)
                    del running[number]
            for number in [*order]:
                if number in ready:
                    order.remove(number)
                    yield ready.pop(number)
                elif self.ordered:
                    break
            if exhausted and not order:
                return
            if running:
                self.engine.step()
                if progress is not None:
                    now = self.engine.tokens
                    progress(now - tokens)
                    tokens = now

    def _submit(self, line: Line) -> EngineRequest:
        row = line.row or {}
        options, recipe = row.get("generation", {}), row.get("recipe")
        if not isinstance(options, Mapping) or not isinstance(recipe, Mapping | None):
            raise InputError('a row\'s generation and recipe are objects, such as {"max_new_tokens": 50}')
        check_options(options)
        own = self.recipe
        if recipe is not None:
            own = load_recipe(self.recipe.to_dict(), overrides=dict(recipe))
        prompt = {"prompt": self._prompt(row), **{name: row[name] for name in self._inputs if name in row}}
        return self.engine.submit(prompt, recipe=own, raw=self.raw, **options)

    def _prompt(self, row: Mapping[str, Any]) -> Any:
        if self.template is None:
            prompt = row.get("prompt", row.get("messages"))
            if prompt is None:
                raise InputError(
                    f"the row has no 'prompt' and no 'messages' (it has {sorted(map(str, row))}); give --template"
                )
            return prompt
        try:
            return string.Formatter().vformat(self.template, (), row)
        except (KeyError, IndexError, AttributeError) as error:
            raise InputError(
                f"the template needs {error}, which the row does not have (it has {sorted(map(str, row))})"
            ) from error
        except (TypeError, ValueError) as error:
            raise InputError(f"the template does not fit what the row holds: {error}") from error


def _failure(line: Line, why: str) -> dict[str, Any]:
    return {"id": line.id, "line": line.number, "text": "", "finish_reason": "error", "error": why}


def _result(line: Line, request: EngineRequest) -> dict[str, Any]:
    outputs = request.results()
    best = outputs[0]
    result: dict[str, Any] = {
        "id": line.id,
        "line": line.number,
        "text": best.text,
        "finish_reason": best.finish_reason,
        "prompt_tokens": best.stats.get("prompt_tokens", 0),
        "output_tokens": sum(len(output.token_ids) for output in outputs),
        # What is chosen between was forwarded for all of it together.
        "forwarded_tokens": sum(
            output.stats.get("forwarded_tokens", 0) for output in (outputs[:1] if best.candidates else outputs)
        ),
    }
    if len(outputs) > 1:
        result["texts"] = [output.text for output in outputs]
    if best.error is not None:
        result["error"] = best.error.removeprefix(f"request {request.id}: ")  # the row's own id is in the result
    return result
