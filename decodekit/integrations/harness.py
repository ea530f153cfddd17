"""A recipe as a model of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness).

``lm_eval.simple_evaluate(model=HarnessModel(recipe, model, tokenizer), tasks=[...])``, or ``decodekit eval``. What is measured
is the recipe's distribution and search: its own sampling options stand, a task's ``until`` and ``max_gen_toks`` are honoured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_eval.api.model import LM

from decodekit.core.errors import RowError
from decodekit.recipe import Recipe
from decodekit.runtime.caches import context_length
from decodekit.runtime.text_call import TextCall

MAX_NEW_TOKENS = 256
"""Where neither the recipe nor the task says."""


class HarnessModel(LM):
    """Answers the requests of lm-evaluation-harness as a recipe decodes.

    Args:
        recipe: the recipe.
        model: the causal language model.
        tokenizer: its tokenizer.
        models: other models that the recipe names.
        batch: requests that are run side by side.
    """

    def __init__(
        self, recipe: Recipe, model: Any, tokenizer: Any, models: Mapping[str, Any] | None = None, *, batch: int = 8
    ) -> None:
        super().__init__()
        self._recipe, self._model, self._tokenizer, self._models = recipe, model, tokenizer, models or {}
        self._size = batch
        self._start = tokenizer.bos_token or tokenizer.eos_token

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The outputs for contexts; one that cannot be decoded is empty.

        Raises:
            RowError: none could be decoded.
        """
        asked = [request.args for request in requests]
        answers: dict[int, str] = {}
        failures: list[str] = []
        for (until, length), places in _grouped(asked).items():
            own = self._recipe.generation.max_new_tokens
            options: dict[str, Any] = {"stop_strings": list(until)} if until else {}
            options["max_new_tokens"] = length or own or MAX_NEW_TOKENS
            for some in _batches(places, self._size):
                for place, output in zip(some, self._decode([asked[at][0] for at in some], options), strict=True):
                    answers[place] = output.text
                    failures += [output.error] if output.error is not None else []
        if failures and len(failures) == len(asked):
            raise RowError(failures[0])
        return [answers[place] for place in range(len(asked))]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """(log-probability in nats, whether greedy decoding would say it) of continuations of contexts."""
        pairs = [self._pair(*request.args) for request in requests]
        return [answer for some in _batches(pairs, self._size) for answer in self._score(some)]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-probability (nats) of whole texts, in windows of the model's context, each after a BOS (or EOS) alone."""
        width = (context_length(self._model, self._recipe, None) or 1024) - 1
        totals = []
        for request in requests:
            ids = self._tokenizer(request.args[0], add_special_tokens=False).input_ids
            windows = [(self._start, ids[first : first + width]) for first in range(0, len(ids), width)]
            totals.append(sum(self._score([own])[0][0] for own in windows))
        return totals

    @property
    def tokenizer_name(self) -> str:
        """Names what the harness caches of this model."""
        return str(self._tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The history as the model's own template writes it."""
        return str(
            self._tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _decode(self, prompts: list[str], options: dict[str, Any]) -> list[Any]:
        call = self._call(prompts, options)
        for _ in call.run():
            pass
        return [output for _, output in call.outputs()][:: call.copies]

    def _call(self, prompts: list[str], options: dict[str, Any]) -> TextCall:
        return TextCall(
            self._recipe, self._model, self._tokenizer, prompts, {"raw": True, **options}, models=self._models
        )

    def _pair(self, context: str, continuation: str) -> tuple[str, list[int]]:
        """A prompt and the ids after it, cut as the tokenizer cuts both together; spaces between belong to the second."""
        if not context:
            return self._start, self._tokenizer(continuation, add_special_tokens=False).input_ids
        stripped = context.rstrip()
        whole = self._tokenizer(context + continuation).input_ids
        kept = len(self._tokenizer(stripped).input_ids)
        return stripped, whole[kept:]

    def _score(self, pairs: Sequence[tuple[str, list[int]]]) -> list[tuple[float, bool]]:
        longest = max(len(ids) for _, ids in pairs)
        length = {"max_new_tokens": max(longest, self._recipe.generation.max_new_tokens or 0)}
        scored = self._call([prompt for prompt, _ in pairs], length).score([ids for _, ids in pairs])
        return [(sum(token.logprob for token in own), all(token.likeliest for token in own)) for own in scored]


def _grouped(asked: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[tuple[tuple[str, ...], int | None], list[int]]:
    """Places of the requests with the same stop strings and length."""
    groups: dict[tuple[tuple[str, ...], int | None], list[int]] = {}
    for place, (_, options) in enumerate(asked):
        until = options.get("until") or ()
        key = ((until,) if isinstance(until, str) else tuple(until), options.get("max_gen_toks"))
        groups.setdefault(key, []).append(place)
    return groups


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
