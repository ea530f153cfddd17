"""From what is submitted to work that can be queued: the prompt read, the recipe merged, what is wrong refused."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from decodekit.core.errors import InputError, Refused, nearest
from decodekit.core.types import Request
from decodekit.recipe import Generation, Recipe
from decodekit.runtime.branches import too_long, unknown_id
from decodekit.runtime.caches import context_length
from decodekit.runtime.call import logits_width
from decodekit.runtime.constraining import Constraints
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.text import Prompt, encode, split_inputs
from decodekit.runtime.text_call import prepare, with_options
from decodekit.runtime.work import Given, Work, understand

OF_A_REQUEST = ("seed", "max_new_tokens", "max_length", "max_time", "stop_strings", "num_return_sequences")
"""Options of ``generation`` in which requests may differ that are decoded together."""


class Intake:
    """Reads what is submitted.

    Args:
        model: the causal language model.
        tokenizer: its tokenizer, or ``None`` where all prompts are token ids.
        recipe: of requests without one of their own.
        models: other models by name.
    """

    def __init__(self, model: Any, tokenizer: Any, recipe: Recipe, models: Mapping[str, Any]) -> None:
        self.model, self.tokenizer, self.recipe, self.models = model, tokenizer, recipe, models
        self._constraints: dict[tuple[int, ...], Constraints] = {}

    def read(
        self, prompt: Prompt | Sequence[int], recipe: Recipe | None, *, raw: bool, options: Mapping[str, Any]
    ) -> Work:
        """What a request asks for.

        Raises:
            InputError: the prompt cannot be decoded, or an option is not one of ``generation``.
            Refused: the recipe cannot be honoured in an engine.
        """
        started = time.perf_counter()
        check_options(options)
        recipe = self._fitting(recipe or self.recipe)
        recipe = with_options(recipe, options) if options else recipe
        ids, inputs = self._ids(prompt, raw=raw)
        context = context_length(self.model, recipe, None)
        if (why := unknown_id(ids, self.model) or too_long(len(ids), context)) is not None:
            raise InputError(why)
        if recipe.constraint is not None:
            inputs = {"constraint": recipe.constraint, **inputs}
        given = Given(
            tokenizer=self.tokenizer,
            models=self.models,
            inputs=[inputs],
            raw=raw,
            want_text=self.tokenizer is not None,
            keep_logprobs=True,
            named=frozenset(options),
        )
        prepared = prepare(self.model, self.tokenizer, [ids], recipe, {})
        work = understand(self.model, prepared, recipe, given, context=context, started=started)
        if work.plan.constrained:
            self._constrain(work)
        for sequence in work.sequences:
            if sequence.error is not None:
                raise InputError(sequence.error)
        return work

    def kind(self, work: Work) -> tuple[Recipe, frozenset[str], bool]:
        """Requests of which this is equal are scored and chosen for together."""
        left_out: dict[str, Any] = dict.fromkeys(OF_A_REQUEST)
        generation = work.recipe.generation.model_copy(update=left_out)
        recipe = work.recipe.model_copy(
            update={"constraint": None, "cache": self.recipe.cache, "generation": generation}
        )
        return recipe, work.settings.named - {*OF_A_REQUEST}, work.plan.constrained

    def _fitting(self, recipe: Recipe) -> Recipe:
        if "cache" in recipe.model_fields_set and recipe.cache != self.recipe.cache:
            raise Refused(
                "a request's recipe has a cache of its own; all requests share the engine's: leave cache out, or give it to "
                "the engine's recipe"
            )
        if recipe.generation.prefill_chunk_size is not None:
            raise Refused("prefill_chunk_size is the engine's: give Engine(tokens_per_step=...)")
        return recipe

    def _ids(self, prompt: Prompt | Sequence[int], *, raw: bool) -> tuple[list[int], dict[str, Any]]:
        given: Any = prompt
        text, inputs = split_inputs(given)
        own: Any = text
        if not isinstance(own, str | Sequence):
            raise InputError(f"a prompt is a text, a list of chat messages or token ids, got {own!r}"[:300])
        if not isinstance(own, str) and own and all(type(token) is int for token in own):
            return [*own], inputs
        if self.tokenizer is None:
            raise InputError("a prompt of text needs a tokenizer; give Engine(model, tokenizer), or token ids")
        return encode(self.tokenizer, text, raw=raw), {"text": text, **inputs} if isinstance(text, str) else inputs

    def _constrain(self, work: Work) -> None:
        eos = work.settings.eos
        if eos not in self._constraints:
            self._constraints[eos] = Constraints(None, self.tokenizer, logits_width(self.model), eos)
        for sequence in work.sequences:
            if sequence.error is None:
                sequence.constraint = self._constraints[eos].row(
                    sequence.request.inputs, sequence.limits.max_new_tokens
                )


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse what is no option of a recipe's ``generation``.

    Raises:
        InputError: names it, and what is near.
    """
    if unknown := sorted(options.keys() - Generation.model_fields.keys()):
        raise InputError(f"unknown option {unknown[0]!r}: {nearest(unknown[0], Generation.model_fields)}")


def renumbered(sequence: SequenceState, row: int) -> SequenceState:
    """The same under a number that no other request has."""
    request: Request = dataclasses.replace(sequence.request, id=row)
    return dataclasses.replace(sequence, row=row, request=request)
