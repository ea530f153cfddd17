"""Texts in, outputs out: what ``Decoder.run``, ``stream`` and ``score`` and the command line share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodekit.core import compat
from decodekit.core.errors import InputError
from decodekit.core.trace import TraceWriter
from decodekit.core.types import Output
from decodekit.recipe import Generation, Recipe, load_recipe
from decodekit.runtime.call import Call, Given, assemble, left_pad
from decodekit.runtime.loop import SequenceState, StepRecord
from decodekit.runtime.streams import Stream
from decodekit.runtime.text import Prompt, encode, split_inputs
from decodekit.runtime.tracing import trace_ends, trace_step


class TextCall:
    """A batch of texts that is decoded step by step.

    Args:
        recipe: what to do.
        model: the causal language model.
        tokenizer: its tokenizer.
        prompts: texts, lists of chat messages, or mappings with ``prompt`` and other inputs.
        options: as ``Decoder.run`` takes them.
        models: other models by name.

    Attributes:
        given_out: characters that the records' pieces held so far.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Any,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        options: Mapping[str, Any],
        models: Mapping[str, Any] | None = None,
    ) -> None:
        options = dict(options)
        raw = bool(options.pop("raw", False))
        self._streamer = options.pop("streamer", None)
        self._trace: str | Path | None = options.pop("trace", None)
        named = {name: options.pop(name) for name in list(options) if name in Generation.model_fields}
        self._recipe = _with_options(recipe, named) if named else recipe
        self._model, self._tokenizer, self._options = model, tokenizer, options
        compat.check_model(model)
        self._errors: dict[int, str] = {}
        self._prompts: list[list[int]] = []
        self._inputs: list[dict[str, Any]] = []
        self._count = len(prompts)
        context = compat.context_length(model)
        for index, prompt in enumerate(prompts):
            try:
                text, inputs = split_inputs(prompt)
                ids = encode(tokenizer, text, raw=raw)
                if context is not None and len(ids) >= context:
                    raise InputError(
                        f"the prompt has {len(ids)} tokens, the model's context holds {context}; shorten it"
                    )
            except InputError as error:
                self._errors[index] = str(error)
                continue
            self._prompts.append(ids)
            self._inputs.append({"text": text, **inputs} if isinstance(text, str) else inputs)
        self._given = Given(
            tokenizer=tokenizer,
            models=models or {},
            raw=raw,
            inputs=self._inputs,
            want_text=True,
            keep_logprobs=True,
            keep_stages=self._trace is not None,
        )
        self.given_out = 0
        self._call: Call | None = None

    def _prepare(self, prompts: Sequence[Sequence[int]]) -> compat.Prepared:
        pad = self._tokenizer.pad_token_id
        ids, mask = left_pad(prompts, pad if pad is not None else 0, self._model.device)
        length = self._recipe.generation.max_new_tokens
        options = {"max_new_tokens": length} if length is not None else {}
        return compat.prepare(self._model, ids, mask, pad_token_id=pad, **options, **self._options)

    def run(self) -> Iterator[StepRecord]:
        """Decode, a record a step."""
        if not self._prompts:
            return
        stream = Stream(self._streamer)
        writer = TraceWriter(self._trace) if self._trace is not None else None
        try:
            call = self._call = assemble(self._model, self._prepare(self._prompts), self._recipe, self._given)
            stream.start(call.prepared.input_ids)
            if writer is not None:
                writer.header(
                    model=self._model.config._name_or_path,
                    recipe=self._recipe.to_dict(),
                    prompt_ids=[list(sequence.request.prompt_ids) for sequence in call.sequences],
                    seed=call.seed,
                )
            for record in call.loop.run():
                stream.put(record)
                if writer is not None:
                    trace_step(writer, record, lambda token: str(self._tokenizer.decode([token])))
                self.given_out += sum(map(len, record.pieces))
                yield record
            if writer is not None:
                trace_ends(writer, call.sequences)
        finally:
            stream.end()
            if writer is not None:
                writer.close()

    def cancel(self) -> None:
        """End every row that is still decoding where it stands; what it has is kept."""
        for sequence in self._call.loop.live if self._call is not None else ():
            sequence.finish("cancelled")

    def outputs(self) -> list[tuple[int, Output]]:
        """(index of the prompt, output) a prompt and copy, in the order of the prompts."""
        done = [self._output(sequence) for sequence in self._call.sequences] if self._call is not None else []
        copies = len(done) // len(self._prompts) if self._prompts else 1
        outputs: list[tuple[int, Output]] = []
        for index in range(self._count):
            if index in self._errors:
                outputs.append((index, Output("", [], "error", error=f"prompt {index}: {self._errors[index]}")))
            else:
                outputs += [(index, output) for output in done[:copies]]
                done = done[copies:]
        return outputs

    def _output(self, sequence: SequenceState) -> Output:
        assert self._call is not None
        assert sequence.finish_reason is not None
        if sequence.tracker is not None:
            sequence.tracker.finish()
        return Output(
            text=sequence.tracker.text if sequence.tracker is not None else "",
            token_ids=sequence.tokens,
            finish_reason=sequence.finish_reason,
            logprobs=sequence.logprobs,
            stats=_stats(self._call, sequence),
            error=sequence.error,
        )

    def score(self, ids: Sequence[int]) -> list[float]:
        """The log-probabilities of these tokens after the one prompt."""
        if self._errors:
            raise InputError(self._errors[0])
        given = dataclasses.replace(self._given, scoring=True)
        call = assemble(self._model, self._prepare(self._prompts), self._recipe, given)
        context = compat.context_length(self._model)
        if context is not None and len(self._prompts[0]) + len(ids) > context:
            raise InputError(
                f"the prompt has {len(self._prompts[0])} tokens and the continuation {len(ids)}; the model's context holds "
                f"{context} in all"
            )
        if call.sequences[0].error is not None:
            raise InputError(call.sequences[0].error)
        return call.loop.score(ids)


def _with_options(recipe: Recipe, named: Mapping[str, Any]) -> Recipe:
    """The recipe with these generation options instead of its own."""
    wanted = {**recipe.generation.model_dump(exclude_none=True), **named}
    return recipe.model_copy(update={"generation": load_recipe({"generation": wanted}).generation})


def _stats(call: Call, sequence: SequenceState) -> dict[str, Any]:
    """Counts and seconds of one row; its tokens went through every branch."""
    loop, times = call.loop, sequence.times
    stats: dict[str, Any] = {
        "prompt_tokens": len(sequence.request.prompt_ids),
        "target_forwards": len(times),
        "forwarded_tokens": sum(session.forwarded[sequence.row] for session in loop.sessions),
        "draft_tokens": 0,
        "accepted_tokens": 0,
        "path": "torch",
    }
    if not times or loop.prefilled is None:
        return stats
    gaps = np.diff(np.asarray(times))
    decode = times[-1] - times[0]
    stats |= {
        "prefill_s": loop.prefilled - loop.started,
        "decode_s": decode,
        "ttft_s": times[0] - loop.started,
        "tokens_per_s": len(times) / max(times[-1] - loop.started, 1e-9),
    }
    if len(gaps):
        stats |= {"itl_p50_s": float(np.percentile(gaps, 50)), "itl_p95_s": float(np.percentile(gaps, 95))}
    if call.prepared.input_ids.is_cuda:
        stats["peak_bytes"] = torch.cuda.max_memory_allocated(call.prepared.input_ids.device)
    return stats
