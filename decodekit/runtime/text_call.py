"""Texts in, outputs out: what ``Decoder.run``, ``stream`` and ``score`` and the command line share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodekit.cache.paged import PagedCache
from decodekit.core import compat
from decodekit.core.errors import InputError, Refused, nearest
from decodekit.core.trace import TraceWriter
from decodekit.core.types import Output
from decodekit.recipe import Generation, PagedSpec, Recipe, load_recipe
from decodekit.runtime.branches import left_pad, too_long, unknown_id
from decodekit.runtime.caches import context_length
from decodekit.runtime.call import Call, assemble
from decodekit.runtime.capture import captures
from decodekit.runtime.choosing import StepRecord
from decodekit.runtime.scoring import Scored
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.streams import Stream
from decodekit.runtime.tasks import Result, Task
from decodekit.runtime.text import Prompt, encode, split_inputs
from decodekit.runtime.tracing import Tracer
from decodekit.runtime.work import Given, Replay


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
        self._stream = Stream(options.pop("streamer", None))
        self._trace: str | Path | None = options.pop("trace", None)
        replay: Replay | None = options.pop("replay", None)
        named = {name: options.pop(name) for name in list(options) if name in Generation.model_fields}
        self._prompts: list[list[int]] = []
        self._indices: list[int] = []
        self._inputs: list[dict[str, Any]] = []
        self._texts: list[Any] = []
        self._errors: dict[int, str] = {}
        self._count = len(prompts)
        self.given_out = 0
        self._call: Call | None = None
        try:
            self._recipe = with_options(recipe, named) if named else recipe
            self._model, self._tokenizer, self._options = model, tokenizer, options
            _check_kinds(model, tokenizer)
            compat.check_model(model)
            self._read(prompts, raw=raw)
        except BaseException:
            # Whoever reads from the streamer in another thread would wait for ever.
            self._stream.end()
            raise
        self._given = Given(
            tokenizer=tokenizer,
            models=models or {},
            raw=raw,
            inputs=self._inputs,
            want_text=True,
            keep_logprobs=True,
            keep_stages=self._trace is not None,
            named=frozenset(named),
            prompts=self._indices,
            replay=replay,
        )

    def _read(self, prompts: Sequence[Prompt], *, raw: bool) -> None:
        context = context_length(self._model, self._recipe, self._options.get(compat.CACHE_KEY))
        for index, prompt in enumerate(prompts):
            try:
                text, inputs = split_inputs(prompt)
                ids = encode(self._tokenizer, text, raw=raw)
                if (why := unknown_id(ids, self._model) or too_long(len(ids), context)) is not None:
                    raise InputError(why)
            except InputError as error:
                self._errors[index] = str(error)
                continue
            self._prompts.append(ids)
            self._indices.append(index)
            self._texts.append(text)
            self._inputs.append({"text": text, **inputs} if isinstance(text, str) else inputs)

    def _prepare(self, prompts: Sequence[Sequence[int]]) -> compat.Prepared:
        return prepare(self._model, self._tokenizer, prompts, self._recipe, self._options)

    def run(self) -> Iterator[StepRecord]:
        """Decode, a record a step."""
        writer: TraceWriter | None = None
        try:
            if not self._prompts:
                return
            writer = TraceWriter(self._trace) if self._trace is not None else None
            call = self._call = assemble(self._model, self._prepare(self._prompts), self._recipe, self._given)
            self._stream.start(call.prepared.input_ids)
            tracer = self._tracer(writer, call) if writer is not None else None
            with closing(call.loop.run()) as records:
                for record in records:
                    self._stream.put(record)
                    if tracer is not None:
                        tracer.step(record)
                    self.given_out += sum(map(len, record.pieces))
                    yield record
            self._stream.finish(call.tasks)
            if tracer is not None:
                tracer.end()
        finally:
            self._stream.end()
            if writer is not None:
                writer.close()

    def _tracer(self, writer: TraceWriter, call: Call) -> Tracer:
        model, recipe = self._model.config._name_or_path, self._recipe.to_dict()
        return Tracer(writer, call, self._tokenizer, model=model, recipe=recipe, prompts=self._texts, given=self._given)

    @property
    def copies(self) -> int:
        """Outputs of each prompt."""
        return self._recipe.generation.num_return_sequences or 1

    def cancel(self) -> None:
        """End every row that is still decoding where it stands; what it has is kept."""
        for task in self._call.tasks if self._call is not None else ():
            task.finish()

    def outputs(self) -> list[tuple[int, Output]]:
        """(index of the prompt, output) a prompt and copy, in the order of the prompts."""
        call = self._call
        done = [self._output(task, own) for task in call.tasks for own in task.results(call.outputs)] if call else []
        copies = len(done) // len(self._prompts) if self._prompts else 1
        outputs: list[tuple[int, Output]] = []
        for index in range(self._count):
            if index in self._errors:
                outputs.append((index, Output("", [], "error", error=f"prompt {index}: {self._errors[index]}")))
            else:
                outputs += [(index, output) for output in done[:copies]]
                done = done[copies:]
        return outputs

    def _output(self, task: Task, result: Result) -> Output:
        assert self._call is not None
        sequence = result.sequence
        assert sequence.finish_reason is not None
        return Output(
            text=sequence.text,
            token_ids=sequence.tokens,
            finish_reason=sequence.finish_reason,
            logprobs=sequence.logprobs,
            candidates=result.candidates,
            stats=_stats(self._call, task, sequence) | result.report,
            error=None if sequence.error is None else f"prompt {sequence.request.prompt}: {sequence.error}",
        )

    def score(self, tokens: Sequence[Sequence[int]]) -> list[list[Scored]]:
        """The log-probabilities of these tokens, [R] of any numbers, each after its prompt.

        Raises:
            InputError: a prompt cannot be read, or is too long with its tokens.
            RowError: no distribution is left at some position.
        """
        if self._errors:
            raise InputError(next(iter(self._errors.values())))
        # Rows whose tokens are all known, in one forward.
        options = {"num_return_sequences": 1, "prefill_chunk_size": None}
        generation = self._recipe.generation.model_copy(update=options)
        recipe = self._recipe.model_copy(update={"generation": generation})
        call = assemble(
            self._model, self._prepare(self._prompts), recipe, dataclasses.replace(self._given, scoring=True)
        )
        sequences = [task.root for task in call.tasks]
        for sequence, ids in zip(sequences, tokens, strict=True):
            if sequence.error is not None:
                raise InputError(sequence.error)
            # Copies of a prompt are no samples here: rules that draw draw the same for each.
            sequence.request = dataclasses.replace(sequence.request, stream=sequences[0].request.stream)
            self._check_length(len(sequence.request.prompt_ids), len(ids), sequence.limits.context)
        return call.lane.scorer.given(tokens, sequences, call.lane.pipeline)

    def _check_length(self, prompt: int, continuation: int, context: int | None) -> None:
        cache, whole = self._recipe.cache, prompt + continuation
        if isinstance(cache, PagedSpec) and cache.window is not None and whole > cache.sinks + cache.window:
            raise Refused(
                f"{whole} tokens cannot be scored with cache.window {cache.window}: all are forwarded at once, and no mask "
                f"tells what each sees; up to {cache.sinks + cache.window} can, or leave window out"
            )
        if context is not None and whole > context:
            raise InputError(
                f"the prompt has {prompt} tokens and the continuation {continuation}; the model's context holds {context} "
                "in all"
            )


def prepare(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], recipe: Recipe, options: Mapping[str, Any]
) -> compat.Prepared:
    """What ``generate`` would be given for these prompts of ids, [R] of any lengths."""
    pad = getattr(tokenizer, "pad_token_id", None)
    ids, mask = left_pad(prompts, pad if pad is not None else 0, model.device)
    length = recipe.generation.max_new_tokens
    given: dict[str, Any] = {} if length is None else {"max_new_tokens": length}
    # generate would ask for the tokenizer, which it has no place for here: stop strings are decodekit's own.
    given["stop_strings"] = None
    try:
        return compat.prepare(model, ids, mask, pad_token_id=pad, **given, **options)
    except ValueError as error:
        # What generate calls model_kwargs are options that neither it nor the model knows.
        unknown = [name for name in options if "model_kwargs" in str(error) and f"'{name}'" in str(error)]
        if not unknown:
            raise
        known = {*Generation.model_fields, "raw", "streamer", "trace"}
        raise InputError(f"unknown option {unknown[0]!r}: {nearest(unknown[0], known)}") from error


def _check_kinds(model: Any, tokenizer: Any) -> None:
    if not hasattr(model, "generate") or not hasattr(tokenizer, "decode"):
        given = f"{type(model).__name__} and {type(tokenizer).__name__}"
        raise InputError(f"expected a model and its tokenizer, in this order; got {given}")


def with_options(recipe: Recipe, named: Mapping[str, Any]) -> Recipe:
    """The recipe with these generation options instead of its own."""
    wanted = {**recipe.generation.model_dump(exclude_none=True), **named}
    # Validated beside the strategy, which some options must fit; the rules give way to options that are named.
    checked = load_recipe({"strategy": recipe.strategy, "generation": wanted})
    return recipe.model_copy(update={"generation": checked.generation})


def _path(call: Call) -> str:
    """Which kernels ran: how attention read the blocks of paged caches; ``torch`` where nothing did."""
    caches = [session.cache for session in call.loop.sessions]
    return (
        ", ".join(sorted({path for cache in caches if isinstance(cache, PagedCache) for path in cache.paths}))
        or "torch"
    )


def _memory(call: Call) -> dict[str, int]:
    """Blocks and bytes of K/V that the rows of a call took at most, where its caches are paged."""
    blocks, size = 0, 0
    for session in call.loop.sessions:
        if isinstance(session.cache, PagedCache):
            stats = session.cache.stats()
            peak = sum(group["peak"] for group in stats["groups"])
            blocks += peak
            size += stats["kv_bytes"] * peak // max(1, sum(group["num_blocks"] for group in stats["groups"]))
    return {"kv_blocks": blocks, "kv_bytes": size} if blocks else {}


def _stats(call: Call, task: Task, sequence: SequenceState) -> dict[str, Any]:
    """Counts and seconds of one output; what its task forwarded went through every branch and candidate."""
    loop, times = call.loop, sequence.times
    stats: dict[str, Any] = {
        "prompt_tokens": len(sequence.request.prompt_ids),
        "target_forwards": task.steps,
        "forwarded_tokens": sum(session.forwarded[row] for session in loop.sessions for row in task.rows),
        "draft_tokens": 0,
        "accepted_tokens": 0,
        "path": _path(call),
        **_memory(call),
    }
    if loop.graphs is not None and captures(loop.sessions[0].model.device):
        stats["graphs"] = dataclasses.asdict(loop.graphs.stats.joined(session.replayed for session in loop.sessions))
    if sequence.constraint is not None:
        stats["constraint"] = sequence.constraint.report(sequence.text)
    if call.lane.speculation is not None:
        stats |= call.lane.speculation.stats(sorted(task.rows))
    if call.lane.auditor is not None:
        stats["audit"] = call.lane.auditor.certificate(task.root.request.id)
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
