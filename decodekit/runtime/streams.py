"""Streamers: transformers' own for a batch of one, and ``put(row, tokens)`` ones for any batch."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch

from decodekit.core.errors import InputError
from decodekit.runtime.loop import StepRecord


class BatchStreamer(Protocol):
    """Gets the tokens of every row as they are chosen; ``end`` is called once, whatever happened."""

    def put(self, row: int, tokens: list[int]) -> None:
        """Some more tokens of one row."""

    def end(self) -> None:
        """No more tokens will come."""


class Stream:
    """One call's side of a streamer of either kind.

    Args:
        streamer: a ``BatchStreamer``, a transformers streamer, or ``None``.
    """

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._batch = streamer is not None and _takes_rows(streamer)

    def start(self, input_ids: torch.Tensor) -> None:
        """Say what the prompt is, as ``generate`` does: transformers streamers skip or print it.

        Raises:
            InputError: a transformers streamer and more than one row.
        """
        if self._streamer is None or self._batch:
            return
        if input_ids.shape[0] > 1:
            raise InputError(
                f"{type(self._streamer).__name__} takes one row, got {input_ids.shape[0]}; give a streamer whose put takes "
                "(row, tokens)"
            )
        self._streamer.put(input_ids.cpu())

    def put(self, record: StepRecord) -> None:
        """Pass on what a step chose."""
        if self._streamer is None:
            return
        for sequence, token in zip(record.sequences, record.tokens, strict=True):
            if sequence.error is not None:
                continue
            if self._batch:
                self._streamer.put(sequence.row, [token])
            else:
                self._streamer.put(torch.tensor([token]))

    def end(self) -> None:
        """Tell the streamer that nothing more comes."""
        if self._streamer is not None:
            self._streamer.end()


def _takes_rows(streamer: Any) -> bool:
    parameters = inspect.signature(streamer.put).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) == 2
