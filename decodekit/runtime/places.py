"""The places of a paged cache, forwarded with any numbers of new tokens each in as few forwards as can be.

Where attention reads the blocks itself, the new tokens of all places lie after each other in one row, without a pad. Elsewhere
K/V are gathered into a rectangle, and those go together that need few pads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from decodekit.cache.attention import check_config
from decodekit.cache.fixed import FixedStep
from decodekit.cache.paged import PagedCache
from decodekit.core.errors import Refused
from decodekit.core.heads import UnreadOutputs
from decodekit.core.shared import PerModel
from decodekit.core.types import BranchOutputs
from decodekit.kernels import triton_runs
from decodekit.runtime.capture import GraphStats
from decodekit.runtime.forward import FEW, RaggedForward
from decodekit.runtime.fused import fused
from decodekit.runtime.replays import Replays
from decodekit.runtime.session import Ids, Session

_PADS = (32, 1024)
"""Pads that cost as much as another forward, on a CPU and on a GPU."""


class _Masks:
    """What is known of the masks that transformers makes for a model.

    Attributes:
        causal: several tokens a row were forwarded in place, and attention refused none that were made for them; packed rows
            have none.
    """

    causal = False


_MASKS: PerModel[_Masks] = PerModel(_Masks)


class PlacedSession(Session):
    """A model over a paged cache, as far as it does not matter whose each place is.

    Args:
        model: the model.
        cache: its cache.
        layers: hidden layers of the ``main`` branch to keep.
    """

    def __init__(self, model: Any, cache: PagedCache, layers: tuple[int, ...]) -> None:
        self._cache = cache
        super().__init__(model, layers)
        self._reads = self._reads_blocks()
        self._masks = _MASKS.of(model)
        self._spread = len({own.device for own in model.parameters()}) > 1
        # Rows that share blocks with others: gathering would copy these for each of them.
        self._sharing: set[int] = set()
        self._replays = Replays()

    @property
    @override
    def cache(self) -> PagedCache:
        return self._cache

    @override
    def keep_layers(self, layers: tuple[int, ...]) -> None:
        super().keep_layers(layers)
        self._forward = RaggedForward(self.model, self._cache, hidden_states=bool(layers))

    @property
    def keeps_states(self) -> bool:
        """Whether rows have states, so that a run of theirs must not go further than they do."""
        return self._cache.keeps_states

    @override
    @contextmanager
    def optimized(self) -> Iterator[None]:
        with super().optimized(), fused(self.model), self._replays.open(self):
            yield

    @property
    @override
    def replayed(self) -> GraphStats:
        return self._replays.stats

    @property
    @override
    def steady(self) -> bool:
        return self._replays.steady

    def why_no_run(self) -> str | None:
        """Why its rows cannot take many steps at once; ``None``: they can."""
        if self._spread:
            return "weights on several devices"
        reads = self._reads and triton_runs(self.model.device)
        return self._cache.why_no_run() if reads else "rows that are gathered"

    def framed(self, frame: FixedStep) -> BranchOutputs:
        """The outputs of the tokens in a frame, of all branches."""
        if self._readout is None or not self._head_checked or not self._forward.headless:
            return self._keep(self._forward.framed(frame), "main", frame.last)
        raw = self._forward.framed(frame, head=False)
        hidden = {layer: raw.hidden_states[layer].flatten(0, 1) for layer in self.layers}
        return UnreadOutputs(raw.hidden_states[-1].flatten(0, 1), hidden, self._readout)

    def _in_place(self, longest: int) -> bool:
        """Whether attention reads the blocks where they are, of rows with at most so many new tokens."""
        on_gpu = triton_runs(self.model.device)
        if self._cache.quantization is not None:
            # With many queries it costs less to dequantize the blocks once for all of them.
            return self._reads and on_gpu and longest <= FEW
        return self._reads and bool(on_gpu or self._sharing)

    def _packs(self) -> bool:
        """Whether rows with different numbers of new tokens are forwarded without pads."""
        # Where they end is told to the head on the device of the first layer.
        alone = self._cache.quantization is not None or self._cache.keeps_states or self._spread
        return not alone and self._forward.packs and self._in_place(1)

    def _run(self, places: Sequence[int], tokens: Sequence[Ids], last: int = 1) -> Any:
        """Forward the next tokens of these places; rows that share much are attended where it lies, once."""
        longest = max(map(len, tokens))
        if self._in_place(longest):
            try:
                outputs = self._forward(places, tokens, last=last, direct=True)
            except Refused:
                self._reads = False
            else:
                self._masks.causal = self._masks.causal or longest > 1
                return outputs
        return self._forward(places, tokens, last=last)

    def _replay(self, tokens: Mapping[int, Ids], last: Mapping[int, int]) -> BranchOutputs | None:
        """The outputs at the ``last`` positions of these places, from a captured forward; ``None`` where none takes them."""
        ready = self._packs() and (self._readout is None or self._head_checked)
        if not ready or not (self._masks.causal or all(len(ids) == 1 for ids in tokens.values())):
            return None
        if (outputs := self._replays.step(self, [*tokens], [*tokens.values()])) is None:
            return None
        # A copy: the next step overwrites them.
        counts = [*map(len, tokens.values())]
        return outputs.select(self._last(counts, [last[place] for place in tokens]))

    def _last(self, counts: Sequence[int], wanted: Sequence[int]) -> Tensor:
        """The places of the last ``wanted`` tokens of each row, among all of packed rows with so many."""
        ends = itertools.accumulate(counts)
        kept = [place for end, count in zip(ends, wanted, strict=True) for place in range(end - count, end)]
        return torch.tensor(kept, dtype=torch.long, device=self.model.device)

    def _forward_all(
        self, tokens: Mapping[int, Ids], last: Mapping[int, int], hidden: Mapping[int, dict[int, Tensor]]
    ) -> list[BranchOutputs]:
        """Forward these tokens of places, however few of them a step may take.

        Args:
            tokens: a place, its next tokens.
            last: a place, how many of its last positions to give.
            hidden: a place, what is filled with the kept layers at all its positions.

        Returns:
            the outputs at the last positions of each place that wants any, in order.
        """
        parts: dict[int, list[BranchOutputs]] = {place: [] for place in tokens}
        waiting = dict(tokens)
        while waiting:
            chunks = {place: ids[: self._cache.max_query(place, len(ids))] for place, ids in waiting.items()}
            group = self._group({place: len(ids) for place, ids in chunks.items()})
            fed = [chunks[place] for place in group]
            # Of a chunk, those of the wanted positions that are not in later ones.
            wanted = [
                max(0, min(len(chunks[own]), last[own] - (len(waiting[own]) - len(chunks[own])))) for own in group
            ]
            if (forwarded := self._forward_group(group, fed, wanted)) is None:
                continue
            outputs, token_ends, output_ends = forwarded
            for place, ids, count, token_end, output_end in zip(
                group, fed, wanted, token_ends, output_ends, strict=True
            ):
                if place in hidden:
                    self._note(hidden[place], token_end - len(ids), token_end)
                if count:
                    parts[place].append(outputs.span(output_end - count, output_end))
                waiting[place] = waiting[place][len(ids) :]
                if not waiting[place]:
                    del waiting[place]
        return [BranchOutputs.concatenate(own) for own in parts.values() if own]

    def _group(self, lengths: Mapping[int, int]) -> list[int]:
        """Which of these places, with so many tokens each, share the next forward."""
        group = self._cache.together(lengths)
        if not self._packs():
            return _alike({place: lengths[place] for place in group}, _PADS[self.model.device.type != "cpu"])
        return group if self._masks.causal else [place for place in group if lengths[place] == lengths[group[0]]]

    def _forward_group(
        self, group: Sequence[int], tokens: Sequence[Ids], wanted: Ids
    ) -> tuple[BranchOutputs, list[int], list[int]] | None:
        """Forward the tokens of places, without pads where that can be.

        Args:
            group: [P] places.
            tokens: [P] their tokens.
            wanted: [P] how many of their last positions to give.

        Returns:
            the outputs, where each place's tokens end among all that were forwarded, and where its own end in the outputs;
            ``None`` where rows of this model cannot be forwarded so, and are to be grouped anew.
        """
        counts = [*map(len, tokens)]
        places = range(1, len(group) + 1)
        if not (self._packs() and len(set(counts)) > 1):
            width = max(1, *wanted)
            outputs = self._keep(self._run(group, tokens, width), "main", width)
            self._check_head()
            return outputs, [place * max(counts) for place in places], [place * width for place in places]
        kept = self._last(counts, wanted)
        try:
            raw = self._forward.packed(group, tokens, kept)
        except Refused:
            self._reads = False
            return None
        outputs = self._keep(raw, "main", kept=kept)
        self._check_head(kept)
        return outputs, [*itertools.accumulate(counts)], [*itertools.accumulate(wanted)]

    def _note(self, known: dict[int, Tensor], start: int, end: int) -> None:
        """Add the hidden states of some of the tokens of the last forward."""
        for layer in self.layers:
            part = self.raw.hidden_states[layer].flatten(0, 1)[start:end]
            known[layer] = torch.cat([known[layer], part]) if layer in known else part

    def _reads_blocks(self) -> bool:
        try:
            check_config(self.model.config)
        except Refused:
            return False
        return True


def _alike(lengths: Mapping[int, int], most: int) -> list[int]:
    """The longest of these places, and those that can be forwarded with them for at most so many pads.

    Of few tokens a row, reading the weights is what costs: all go together.
    """
    longest = max(lengths.values())
    if longest <= FEW:
        return [*lengths]
    chosen, pads = list[int](), 0
    for place in sorted(lengths, key=lengths.__getitem__, reverse=True):
        pads += longest - lengths[place]
        if pads > most:
            break
        chosen.append(place)
    return chosen
