"""From loop records to trace records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decodekit.core.trace import TraceWriter
from decodekit.kernels.layer_divergence import layer_divergence
from decodekit.runtime.choosing import StepRecord
from decodekit.runtime.tasks import Task

ALTERNATIVES = 5
"""Most likely tokens that a trace keeps of every stage."""


def trace_start(writer: TraceWriter, model: str, recipe: dict[str, Any], seed: int, tasks: Sequence[Task]) -> None:
    """Write the header; a row's own seed and sample index, with its prompt, name all its draws."""
    writer.header(
        model=model,
        recipe=recipe,
        seed=seed,
        prompt_ids=[list(task.root.request.prompt_ids) for task in tasks],
        rows=[
            {
                "prompt": task.root.request.prompt,
                "seed": task.root.request.stream.seed,
                "sample": task.root.request.stream.sample,
            }
            for task in tasks
        ],
    )


def trace_step(writer: TraceWriter, record: StepRecord, text_of: Callable[[int], str]) -> None:
    """Write one token record a live row."""
    final = record.picked.final
    log_probs = final.log_softmax(-1)
    entropy = torch.where(log_probs == -torch.inf, 0.0, -log_probs.exp() * log_probs).sum(-1).tolist()
    legal = (final > -torch.inf).sum(-1).tolist()
    chosen = log_probs.exp().gather(-1, record.picked.tokens.unsqueeze(-1)).squeeze(-1).tolist()
    [(_, scores), *_] = record.picked.stages
    plain = record.outputs["main"].logits.log_softmax(-1)
    # Rounding may leave a little less than nothing.
    shift = layer_divergence(plain, scores.log_softmax(-1).unsqueeze(0))[0].clamp(min=0).tolist()
    stages = [(name, *_top(logits)) for name, logits in record.picked.stages]
    notes = {name: values.tolist() for name, values in record.outputs.annotations.items()}
    for position, (sequence, token) in enumerate(zip(record.sequences, record.tokens, strict=True)):
        # A search chooses for itself, and a prompt that candidates fork from is given no token.
        if sequence.error is not None or not record.taken[position]:
            continue
        writer.token(
            row=sequence.row,
            position=record.places[position],
            id=token,
            text=text_of(token),
            prob=chosen[position],
            entropy=entropy[position],
            legal=legal[position],
            shift=shift[position],
            alternatives=[
                {
                    "stage": name,
                    "top": [
                        [token_id, text_of(token_id), probability]
                        for token_id, probability in zip(ids[position], probabilities[position], strict=True)
                        if probability > 0
                    ],
                }
                for name, ids, probabilities in stages
            ],
            **{name: values[position] for name, values in notes.items()},
        )


def trace_ends(writer: TraceWriter, tasks: Sequence[Task], copies: int) -> None:
    """Write how every row ended, and what was chosen from."""
    for task in tasks:
        results = task.results(copies)
        if results[0].candidates:
            writer.event("candidates", row=task.root.row, candidates=results[0].candidates, **results[0].report)
        for result in results:
            fields: dict[str, Any] = {"row": result.sequence.row, "finish_reason": result.sequence.finish_reason}
            if result.sequence.error is not None:
                fields["error"] = result.sequence.error
            writer.event("finished", **fields)


def _top(logits: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    probabilities = logits.softmax(-1)
    values, ids = probabilities.topk(min(ALTERNATIVES, logits.shape[-1]), dim=-1)
    return ids.tolist(), values.tolist()
