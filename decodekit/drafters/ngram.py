"""Propose what followed the last tokens where they stood before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from decodekit.core.drafts import Draft, DraftHost, DraftRow, DraftState, confidence
from decodekit.core.protocols import Drafter

MOST_PLACES = 256
"""Latest places of the last tokens that are looked at, so that no text makes a search long."""


class Ngram(Drafter):
    """Prompt lookup: the longest run of last tokens that stands earlier in prompt or output, and what came after it.

    Saxena, 2023, "Prompt Lookup Decoding", https://github.com/apoorvumang/prompt-lookup-decoding. Helps where the output
    repeats the prompt: summaries, edits, retrieval; of no use for text that does not.

    Cost: a lookup a row and pass, over an index that grows with the row; no model.
    """

    cost: ClassVar[str] = "a lookup a pass"

    kind: Literal["ngram"] = "ngram"
    max_ngram: int = Field(3, ge=1, le=64, description="most last tokens that must match")
    min_ngram: int = Field(1, ge=1, le=64, description="fewest last tokens that must match")

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is more than max_ngram {self.max_ngram}")
        return self

    def start(self, host: DraftHost) -> DraftState:
        """An index a row."""
        return _Lookup(self)


class _Lookup(DraftState):
    def __init__(self, options: Ngram) -> None:
        self._options = options
        self._rows: dict[int, _Index] = {}

    def propose(self, rows: Sequence[DraftRow], budgets: Sequence[int]) -> Sequence[Draft]:
        drafts = []
        for row, budget in zip(rows, budgets, strict=True):
            index = self._rows.get(row.row)
            if index is None:
                index = self._rows[row.row] = _Index(row.prompt_ids, self._options)
            index.extend(row.tokens)
            match, tokens = index.continuation(budget)
            drafts.append(Draft(tokens, confidence=[confidence(match + place) for place in range(len(tokens))]))
        return drafts

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._rows.pop(row, None)


class _Index:
    """The places of each run of ``min_ngram`` tokens in a text that grows.

    Args:
        prompt: the text so far.
        options: how much must match.
    """

    def __init__(self, prompt: Sequence[int], options: Ngram) -> None:
        self._least, self._most = options.min_ngram, options.max_ngram
        self._ids: list[int] = []
        self._prompt = len(prompt)
        # Where each run last ended, and for every end, where the same run ended before it.
        self._latest: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []
        self._grow(prompt)

    def extend(self, output: Sequence[int]) -> None:
        """The output has grown to this."""
        self._grow(output[len(self._ids) - self._prompt :])

    def _grow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._ids.append(token)
            end = len(self._ids)
            run = tuple(self._ids[end - self._least :]) if end >= self._least else ()
            self._before.append(self._latest.get(run, 0))
            if run:
                self._latest[run] = end

    def continuation(self, budget: int) -> tuple[int, Sequence[int]]:
        """How many tokens match, and what followed the latest earlier place of the longest match."""
        ids, end = self._ids, len(self._ids)
        best, longest = 0, 0
        place = self._before[-1]
        for _ in range(MOST_PLACES):
            if not place or longest == self._most:
                break
            match = self._least
            while match < min(self._most, place) and ids[place - match - 1] == ids[end - match - 1]:
                match += 1
            if match > longest:
                best, longest = place, match
            place = self._before[place - 1]
        # A match that reaches into its own continuation repeats.
        return longest, [ids[best + step % (end - best)] for step in range(budget)] if longest else ()
