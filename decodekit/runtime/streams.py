"""Streamers: transformers' own for a batch of one, and ``put(row, tokens)`` ones for any batch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from decodekit.core.errors import InputError
from decodekit.runtime.choosing import StepRecord
from decodekit.runtime.tasks import Task


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
        """Pass on what a step chose, where that is final."""
        if self._streamer is None:
            return
        for position, task in enumerate(record.tasks):
            if task.streams and record.taken[position]:
                self._give(record.sequences[position].row, [record.tokens[position]])

    def finish(self, tasks: Sequence[Task]) -> None:
        """Pass on the best output of tasks that choose only at their end."""
        if self._streamer is None:
            return
        for task in tasks:
            if not task.streams and task.root.error is None:
                self._give(task.root.row, task.results(1)[0].sequence.tokens)

    def _give(self, row: int, tokens: list[int]) -> None:
        if self._batch:
            self._streamer.put(row, tokens)
        else:
            self._streamer.put(torch.tensor(tokens))

    def end(self) -> None:
        """Tell the streamer that nothing more comes."""
        if self._streamer is not None:
            self._streamer.end()


def _takes_rows(streamer: Any) -> bool:
    parameters = inspect.signature(streamer.put).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) == 2
