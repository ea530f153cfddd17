"""The Decoder: a recipe made callable, for ``generate(custom_generate=...)`` and for text in, text out."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, overload

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from decodekit.core import compat
from decodekit.core.errors import InputError, RowError
from decodekit.core.types import Output
from decodekit.recipe import Recipe
from decodekit.runtime.call import Call, assemble
from decodekit.runtime.choosing import StepRecord, spread
from decodekit.runtime.streams import Stream
from decodekit.runtime.tasks import Result
from decodekit.runtime.text import Prompt, split_inputs
from decodekit.runtime.text_call import TextCall
from decodekit.runtime.work import Given


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Decodes any causal language model the way a recipe says. Keeps no state between calls.

    Attributes:
        recipe: what to do.
        tokenizer: for stop strings, texts in rules and chat templates, where a call gives none.
        models: other models by name (draft, amateur, ...); a draft model of another vocabulary with its tokenizer, as
            ``load_model`` gives both.
        streamer: gets the tokens as they are chosen, where a call gives none.
    """

    recipe: Recipe
    tokenizer: Any = None
    models: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    streamer: Any = None

    def bind(self, tokenizer: Any = None, models: Mapping[str, Any] | None = None, streamer: Any = None) -> Decoder:
        """A copy that knows these; ``generate`` never hands its tokenizer or streamer to ``custom_generate``."""
        return dataclasses.replace(
            self,
            tokenizer=tokenizer if tokenizer is not None else self.tokenizer,
            models={**self.models, **(models or {})},
            streamer=streamer if streamer is not None else self.streamer,
        )

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        dk_tokenizer: Any = None,
        dk_streamer: Any = None,
        dk_inputs: Sequence[Mapping[str, Any]] | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """What ``model.generate(..., custom_generate=decoder)`` calls.

        Args:
            model: the causal language model.
            input_ids: [R, T] left-padded.
            logits_processor: what ``generate`` built and the caller gave.
            stopping_criteria: likewise.
            generation_config: the merged options.
            dk_tokenizer: the tokenizer, for stop strings and texts.
            dk_streamer: a transformers streamer (one row) or one with ``put(row, tokens)``.
            dk_inputs: one dict a prompt: text, context, negative_prompt, seed.
            model_kwargs: mask, cache and what else the forwards are given.

        Returns:
            [R, T + N] ids, ended rows filled with the pad id; or the dictionary of ``return_dict_in_generate``.

        Raises:
            Refused: something that was asked for cannot be honoured.
            RowError: no row could be decoded. Where only some fail they end early, with a warning each.
        """
        stream = Stream(dk_streamer if dk_streamer is not None else self.streamer)
        prepared = compat.Prepared(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        tokenizer = dk_tokenizer if dk_tokenizer is not None else self.tokenizer
        try:
            if not isinstance(dk_inputs, Sequence | None) or isinstance(dk_inputs, str):
                raise InputError(f"dk_inputs is a list of one dict a prompt, got {type(dk_inputs).__name__}")
            given = Given(tokenizer=tokenizer, models=self.models, inputs=list(dk_inputs or ()))
            call = assemble(model, prepared, self.recipe, given)
            stream.start(call.prepared.input_ids)
            recorder = Recorder(call)
            # Closed at once where a streamer fails: an error that somebody keeps would hold its blocks.
            with closing(call.loop.run()) as records:
                for record in records:
                    stream.put(record)
                    recorder.take(record)
            results = call.results()
            stream.finish(call.tasks)
            _report_failures(results)
            return recorder.result(results)
        finally:
            stream.end()

    def run(
        self, model: Any, tokenizer: Any, prompts: Sequence[Prompt] | str | Mapping[str, Any], **generation_options: Any
    ) -> list[Output]:
        """Decode texts, as one batch.

        Args:
            model: the causal language model.
            tokenizer: its tokenizer.
            prompts: texts, lists of chat messages, or ``{"prompt": ..., "context": ..., "seed": ...}``.
            generation_options: any option of ``generate`` (beats the recipe), ``seed``, ``raw=True`` (no chat template),
                ``streamer``, ``trace`` (a file to write).

        Returns:
            an output a prompt, in order (``num_return_sequences`` of them in a row); one that failed has
            ``finish_reason`` ``error`` and says why.
        """
        if not isinstance(prompts, str | Mapping | Sequence):
            raise InputError(f"prompts are a text or a list of texts or chats, got {type(prompts).__name__}")
        given: Sequence[Any] = [prompts] if isinstance(prompts, str | Mapping) else prompts
        texts = self._texts(model, tokenizer, given, generation_options)
        for _ in texts.run():
            pass
        return [output for _, output in texts.outputs()]

    def stream(self, model: Any, tokenizer: Any, prompt: Prompt, **generation_options: Any) -> Iterator[str]:
        """Decode one text and give it out piece by piece; the pieces joined are ``run``'s text.

        Raises:
            RowError: the prompt could not be decoded.
            InputError: several sequences are asked for.
        """
        texts = self._texts(model, tokenizer, [prompt], generation_options)
        if texts.copies > 1:
            raise InputError(f"stream gives out one text, num_return_sequences asks for {texts.copies}; use run")
        for record in texts.run():
            for piece in record.pieces:
                if piece:
                    yield piece
        [(_, output), *_] = texts.outputs()
        if output.error is not None:
            raise RowError(output.error)
        if rest := output.text[texts.given_out :]:
            yield rest

    @overload
    def score(
        self, model: Any, tokenizer: Any, prompt: Prompt, continuation: str, **generation_options: Any
    ) -> list[float]: ...

    @overload
    def score(
        self, model: Any, tokenizer: Any, prompt: Prompt, continuation: Sequence[str], **generation_options: Any
    ) -> list[list[float]]: ...

    @torch.no_grad()
    def score(
        self, model: Any, tokenizer: Any, prompt: Prompt, continuation: str | Sequence[str], **generation_options: Any
    ) -> list[float] | list[list[float]]:
        """Log-probabilities (nats) of each token of ``continuation`` after ``prompt``, under this decoder's distribution.

        One forward scores all positions; those of several continuations (the answers of a multiple choice) side by side.
        Options as in ``run``; ``do_sample`` decides whether sampling rules count.

        Returns:
            a number a token; a list of them a continuation where several were given.

        Raises:
            InputError: the prompt or a continuation is empty, or too long for the model.
            RowError: the model or the rules leave no distribution at some position.
        """
        text, inputs = split_inputs(prompt)
        texts = [continuation] if isinstance(continuation, str) else [*continuation]
        tokens = [tokenizer(own, add_special_tokens=False).input_ids for own in texts]
        if not all(tokens) or not tokens:
            empty = texts[tokens.index([])] if tokens else texts
            raise InputError(f"the continuation {empty!r} has no token; give at least one")
        # What happens at the end of the output (a forced EOS) happens where the decoder's own limit is.
        length = generation_options.get("max_new_tokens", self.recipe.generation.max_new_tokens) or 0
        options = {**generation_options, "max_new_tokens": max(length, *map(len, tokens))}
        scored = self._texts(model, tokenizer, [{"prompt": text, **inputs}] * len(tokens), options).score(tokens)
        scores = [[token.logprob for token in own] for own in scored]
        return scores[0] if isinstance(continuation, str) else scores

    def _texts(self, model: Any, tokenizer: Any, prompts: Sequence[Prompt], options: Mapping[str, Any]) -> TextCall:
        return TextCall(
            self.recipe, model, tokenizer, prompts, {"streamer": self.streamer, **options}, models=self.models
        )


class Recorder:
    """Collects what ``generate`` returns."""

    def __init__(self, call: Call) -> None:
        config = call.settings.config
        wanted = bool(config.return_dict_in_generate)
        self._call, self._dict = call, wanted
        self._scores: list[Tensor] | None = [] if wanted and config.output_scores else None
        self._logits: list[Tensor] | None = [] if wanted and config.output_logits else None
        self._attentions: list[Any] | None = [] if wanted and config.output_attentions else None
        self._hidden: list[Any] | None = [] if wanted and config.output_hidden_states else None

    def take(self, record: StepRecord) -> None:
        """One step; one in which all rows failed gave no token, and is not part of what is returned."""
        if all(sequence.error is not None for sequence in record.sequences):
            return
        main = self._call.loop.sessions[0]
        if self._scores is not None:
            self._keep(self._scores, record, record.picked.final)
        if self._logits is not None:
            self._keep(self._logits, record, record.outputs["main"].logits)
        if self._attentions is not None:
            self._attentions.append(main.raw.attentions)
        if self._hidden is not None:
            self._hidden.append(main.raw.hidden_states)

    def _keep(self, kept: list[Tensor], record: StepRecord, values: Tensor) -> None:
        """Add [P, V] of the tokens that rows took to the [R, V] of their places in the output."""
        count, pad = len(self._call.tasks), self._call.settings.pad
        taken = [place for place, took in enumerate(record.taken) if took and record.tasks[place].streams]
        for step in sorted({record.places[place] for place in taken}):
            own = [place for place in taken if record.places[place] == step]
            rows = [record.sequences[place].row for place in own]
            chosen = values if len(own) == len(values) else values[own]
            if step == len(kept):
                kept.append(spread(chosen, rows, count, pad))
            else:
                kept[step] = kept[step].clone()
                kept[step][rows] = chosen.to(kept[step].dtype)

    def result(self, results: Sequence[Result]) -> Tensor | GenerateDecoderOnlyOutput:
        """[R, T + N] ids, or the dictionary."""
        pad = self._call.settings.pad
        prompt = self._call.prepared.input_ids.repeat_interleave(self._call.outputs, dim=0)
        longest = max(len(result.sequence.tokens) for result in results)
        rows = [result.sequence.tokens + [pad] * (longest - len(result.sequence.tokens)) for result in results]
        new = torch.tensor(rows, dtype=prompt.dtype, device=prompt.device).reshape(len(rows), longest)
        ids = torch.cat([prompt, new], dim=-1)
        if not self._dict:
            return ids
        records = {
            "scores": self._scores,
            "logits": self._logits,
            "attentions": self._attentions,
            "hidden_states": self._hidden,
        }
        tuples = {name: None if values is None else tuple(values) for name, values in records.items()}
        cache = self._call.loop.sessions[0].cache
        if all(result.score is None for result in results):
            return compat.generate_output(ids, tuples, cache)
        scores = [-math.inf if result.score is None else result.score for result in results]
        return compat.generate_output(ids, tuples, cache, torch.tensor(scores, device=prompt.device))


def _report_failures(results: Sequence[Result]) -> None:
    failed = [result.sequence for result in results if result.sequence.error is not None]
    if failed and len(failed) == len(results):
        raise RowError(f"prompt {failed[0].request.prompt}: {failed[0].error}")
    for sequence in failed:
        where = f"row {sequence.row} (prompt {sequence.request.prompt})"
        warnings.warn(f"{where} ended early: {sequence.error}", RuntimeWarning, stacklevel=4)
