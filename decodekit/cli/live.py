"""Tokens in a terminal as they come, coloured by probability, over a line that says how far the run is."""

from __future__ import annotations

import math
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from decodekit.runtime.choosing import StepRecord

SHADES = (
    (0.9, ""),
    (0.6, "rgb(190,150,60)"),
    (0.3, "rgb(220,130,40)"),
    (0.1, "rgb(225,95,45)"),
    (0.0, "rgb(220,60,60)"),
)
"""From which probability on a token has which colour; one that was nearly certain has the terminal's own."""


class LiveText:
    """Prints prompts' outputs one after the other while they are decoded side by side: the first that is not over grows.

    Args:
        console: where to; a terminal.
        prompts: the texts of the prompts.
    """

    def __init__(self, console: Console, prompts: list[str]) -> None:
        self._console, self._prompts = console, prompts
        self._texts = [Text() for _ in prompts]
        self._over = [False] * len(prompts)
        self._front = 0
        self._begun = False
        self._printed = 0
        self._line = Text()
        self._status = Text("", style="dim")
        self._live = Live(console=console, transient=True, refresh_per_second=12, get_renderable=self._view)

    @property
    def shown(self) -> range:
        """Which prompts' outputs were printed whole."""
        return range(self._front)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if self._line:
            self._console.print(self._line)

    def take(self, record: StepRecord, status: str) -> None:
        """Show what a step made certain."""
        self._status.plain = status
        for task, sequence, piece in zip(record.tasks, record.sequences, record.pieces, strict=True):
            if task.streams:
                prompt = sequence.request.prompt
                self._texts[prompt].append(piece, _shade(sequence.logprobs[-1]) if sequence.logprobs else "")
                self._over[prompt] |= sequence.finish_reason is not None
                if self._over[prompt] and sequence.error is None:
                    # The end of a text is held back while it could still become a stop string.
                    self._texts[prompt].append(sequence.text[len(self._texts[prompt].plain) :])
        while self._front < len(self._texts) and self._texts[self._front]:
            self._grow()
            if not self._over[self._front]:
                break
            line, self._line = self._line, Text()
            self._console.print(line, end="\n\n")
            self._front, self._begun = self._front + 1, False

    def _grow(self) -> None:
        """Print the whole lines of the first text, and keep the last one growing."""
        if not self._begun:
            self._console.print(Text(f"> {self._prompts[self._front]}", style="bold"))
            self._begun = True
        *whole, last = self._texts[self._front].split("\n", allow_blank=True)
        self._line = Text()
        for line in whole[self._printed :]:
            self._console.print(line)
        self._printed = len(whole) if not self._over[self._front] else 0
        self._line = last

    def _view(self) -> Group:
        return Group(self._line, self._status)


def _shade(logprob: float) -> str:
    return next(colour for least, colour in SHADES if math.exp(logprob) >= least)
