"""The tokens of every sequence, as rules see them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from decodekit.core.types import Rows
from decodekit.runtime.sequence import SequenceState


class History:
    """Prompts and outputs without pads, left-aligned in one tensor, so that a step appends a column and copies nothing.

    Args:
        device: where rules run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._tokens = torch.zeros(0, 0, dtype=torch.long, device=device)
        self._lengths = torch.zeros(0, dtype=torch.long, device=device)
        self._prompt_lengths = torch.zeros(0, dtype=torch.long, device=device)
        # Lengths on the host too, so that no step has to ask the device how wide the histories are.
        self._widths: dict[int, int] = {}

    def add(self, row: int, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        """Begin a row with its prompt and what it has already been given."""
        ids = [*prompt, *output]
        slot = self._take(row, len(ids) + 64)
        self._tokens[slot, : len(ids)] = torch.tensor(ids, dtype=torch.long, device=self._device)
        self._lengths[slot], self._prompt_lengths[slot] = len(ids), len(prompt)
        self._widths[row] = len(ids)

    def fork(self, parents: Mapping[int, int]) -> None:
        """Begin rows as copies of others: a new row, its parent."""
        for row, parent in parents.items():
            slot, source = self._take(row, 0), self._slots[parent]
            self._tokens[slot], self._lengths[slot] = self._tokens[source], self._lengths[source]
            self._prompt_lengths[slot] = self._prompt_lengths[source]
            self._widths[row] = self._widths[parent]

    def keep(self, rows: Collection[int]) -> None:
        """Forget all other rows."""
        for row in self._slots.keys() - rows:
            self._free.append(self._slots.pop(row))
            del self._widths[row]

    def append(self, rows: Sequence[int], tokens: Tensor) -> None:
        """Add one token to each of ``rows`` [P]."""
        for row in rows:
            self._widths[row] += 1
        self._widen(max(self._widths[row] for row in rows))
        index = self._index(rows)
        self._tokens[index, self._lengths[index]] = tokens
        self._lengths[index] += 1

    def extend(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Add several tokens to rows."""
        new = [
            (self._slots[row], self._widths[row] + place, token)
            for row, own in tokens.items()
            for place, token in enumerate(own)
        ]
        if not new:
            return
        for row, own in tokens.items():
            self._widths[row] += len(own)
        self._widen(max(self._widths[row] for row in tokens))
        # All at once: on a GPU every copy from the host takes its time.
        slots, places, values = torch.tensor(new, device=self._device).unbind(1)
        self._tokens[slots, places] = values
        self._lengths.index_add_(0, slots, torch.ones_like(slots))

    def rows(self, sequences: Sequence[SequenceState], eos: tuple[int, ...]) -> Rows:
        """What the rules are told about these sequences."""
        rows = [sequence.row for sequence in sequences]
        index = self._index(rows)
        return Rows(
            tokens=self._tokens[index, : max(self._widths[row] for row in rows)],
            lengths=self._lengths[index],
            prompt_lengths=self._prompt_lengths[index],
            requests=[sequence.request.id for sequence in sequences],
            streams=[sequence.request.stream for sequence in sequences],
            eos=eos,
        )

    def padded(self, rows: Sequence[int], pad: int) -> Tensor:
        """[P, T]: these rows left-padded, as ``generate`` shows them to processors and criteria."""
        width = max(self._widths[row] for row in rows)
        padded = torch.full((len(rows), width), pad, dtype=torch.long, device=self._device)
        for place, row in enumerate(rows):
            length = self._widths[row]
            padded[place, width - length :] = self._tokens[self._slots[row], :length]
        return padded

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor([self._slots[row] for row in rows], device=self._device)

    def _take(self, row: int, width: int) -> int:
        self._widen(width)
        if not self._free:
            held = len(self._slots)
            grown = max(8, held)
            self._tokens = torch.cat([self._tokens, self._tokens.new_zeros(grown, self._tokens.shape[1])])
            self._lengths = torch.cat([self._lengths, self._lengths.new_zeros(grown)])
            self._prompt_lengths = torch.cat([self._prompt_lengths, self._prompt_lengths.new_zeros(grown)])
            self._free = list(range(held + grown - 1, held - 1, -1))
        slot = self._slots[row] = self._free.pop()
        return slot

    def _widen(self, width: int) -> None:
        missing = width - self._tokens.shape[1]
        if missing > 0:
            missing = max(missing, self._tokens.shape[1])
            self._tokens = torch.cat([self._tokens, self._tokens.new_zeros(len(self._tokens), missing)], dim=1)
