"""Transformers' logits processors as steps of the chain: the caller's own, and those that options ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import LogitsProcessor, SynthIDTextWatermarkLogitsProcessor

from decodekit.core import compat
from decodekit.core.types import Rows
from decodekit.runtime.choosing import Chooser
from decodekit.runtime.pipeline import Step
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.settings import Settings, processor_options

_READ_LOGITS_ALONE = {f"{name}LogitsWarper" for name in ("Temperature", "TopK", "TopP", "MinP", "Typical", "Epsilon")}


class CallersStep:
    """One of the caller's logits processors as a step of the chain.

    Args:
        processor: sees the whole padded batch, as in ``generate``: it may keep something for each row.

    Attributes:
        chooser: where the padded ids are; ``None`` where rows do not grow together: each position is then shown alone.
    """

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor = processor
        self.chooser: Chooser | None = None

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        """[P, V] to [P, V]."""
        if self.chooser is None:
            return row_by_row([self._processor] * len(rows), rows, logits)
        ids = self.chooser.input_ids
        if len(rows) == ids.shape[0]:
            return self._processor(ids, logits.clone())
        whole = logits.new_zeros(ids.shape[0], logits.shape[-1])
        index = torch.tensor(rows.requests, device=ids.device)
        whole[index] = logits
        return self._processor(ids, whole)[index]


class OptionStep:
    """The logits processor that transformers makes of an option, as a step of the chain: one a row, which never sees pads.

    Args:
        processors: a request, its own; the same for all where these are of one length.

    Attributes:
        processors: the same; requests may come and go.
        stateless: what they do depends on ids and logits alone, so that any position can be shown at any time.
        capturable: what they do depends on logits alone, is the same for all rows and never waits for a GPU.
    """

    def __init__(self, processors: dict[int, LogitsProcessor]) -> None:
        self.processors = processors
        first = next(iter(processors.values()))
        self.stateless = not isinstance(first, SynthIDTextWatermarkLogitsProcessor)
        self.capturable = type(first).__name__ in _READ_LOGITS_ALONE

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        """[P, V] to [P, V]."""
        if self.capturable:
            return next(iter(self.processors.values()))(rows.tokens, logits.clone())
        lengths, own = rows.lengths.tolist(), [self.processors[request] for request in rows.requests]
        if len(set(lengths)) == 1 and all(processor is own[0] for processor in own):
            return own[0](rows.tokens[:, : lengths[0]], logits.clone())
        return row_by_row(own, rows, logits)


def row_by_row(processors: Sequence[LogitsProcessor], rows: Rows, logits: Tensor) -> Tensor:
    """[P, V] to [P, V]: each position through its own processor, alone and without pads."""
    parts = zip(processors, rows.tokens, rows.lengths.tolist(), logits, strict=True)
    return torch.cat([own(ids[:n].unsqueeze(0), row.unsqueeze(0).clone()) for own, ids, n, row in parts])


def option_steps(
    model: Any,
    prepared: compat.Prepared,
    settings: Settings,
    sequences: Sequence[SequenceState],
    instead: set[type],
    *,
    rules: bool,
) -> tuple[list[tuple[str, Step]], ...]:
    """What transformers makes of the options, for each row as if it were alone: processors, warpers, and what comes last."""
    lengths = {len(sequence.request.prompt_ids) for sequence in sequences}
    # Two look at the prompt itself; the others need no copy for every row where all rows are of one length.
    config = settings.config
    looks = bool(config.encoder_no_repeat_ngram_size) or (config.encoder_repetition_penalty or 1.0) != 1.0
    shared = len(lengths) == 1 and not looks
    built = []
    for sequence in sequences[:1] if shared else sequences:
        prompt = sequence.request.prompt_ids or (settings.pad,)
        ids = torch.tensor([prompt], device=prepared.input_ids.device)
        room = max(1, sequence.limits.max_new_tokens)
        options = processor_options(settings, rules=rules, room=room, prompt_tokens=len(prompt))
        built.append(compat.make_processors(model, options, ids, instead=instead))

    def steps(part: int) -> list[tuple[str, Step]]:
        columns = zip(*(own[part] for own in (built * len(sequences) if shared else built)), strict=True)
        ids = [sequence.request.id for sequence in sequences]
        return [(type(column[0]).__name__, OptionStep(dict(zip(ids, column, strict=True)))) for column in columns]

    return steps(0), steps(1), steps(2)
