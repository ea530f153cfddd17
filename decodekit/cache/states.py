"""Recurrent and convolution states: what each row has, in batches that never change once a step is over.

A row refers to a batch of states and its place in it. A step works on a copy, since models change states in place, and
its result is a new batch: so a fork, a snapshot or a rollback only keeps an older reference, and an aborted step leaves
no trace.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from decodekit.cache.host import HostCopy, HostTier
from decodekit.cache.prefix import Chain, Prompt, block_contents

StateKey: TypeAlias = tuple[int, str, int]
"""A layer, ``conv_states`` or ``recurrent_states``, and which of the layer's states."""

_KINDS = ("conv_states", "recurrent_states")


@dataclass(frozen=True, eq=False)
class StateBatch:
    """The states of some rows at the end of a step; nobody changes them.

    Attributes:
        tensors: [R, ...] each.
        rows: R.
    """

    tensors: dict[StateKey, Tensor]
    rows: int

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def take(self, places: Sequence[int]) -> StateBatch:
        """A copy of some rows."""
        return StateBatch({key: _take(tensor, places) for key, tensor in self.tensors.items()}, len(places))


class StateRef(NamedTuple):
    """One row's states: a place in a batch."""

    batch: StateBatch
    place: int

    def alone(self) -> StateRef:
        """The same in a batch of its own, which keeps no neighbour alive."""
        return StateRef(self.batch.take([self.place]), 0)

    def on_host(self) -> HostCopy[StateKey]:
        """A copy on the host."""
        return HostCopy({key: [states[self.place]] for key, states in self.batch.tensors.items()})

    @classmethod
    def from_host(cls, copy: HostCopy[StateKey]) -> StateRef:
        """The states of such a copy, on their devices."""
        return cls(StateBatch({key: part.unsqueeze(0) for key, (part,) in copy.restore().items()}, 1), 0)


def working_copy(refs: Sequence[StateRef | None]) -> dict[StateKey, Tensor] | None:
    """The states of some rows as one batch that may be changed; ``None`` where no row has any.

    A row without states among rows that have some gets zeros: what a recurrence begins with, and what a causal
    convolution is padded with.
    """
    present = [ref for ref in refs if ref is not None]
    if not present:
        return None
    first = present[0].batch
    if len(present) == len(refs) and all(ref.batch is first for ref in present):
        places = [ref.place for ref in present]
        if places == list(range(first.rows)):
            return {key: tensor.clone() for key, tensor in first.tensors.items()}
        return {key: _take(tensor, places) for key, tensor in first.tensors.items()}
    return {
        key: torch.stack(
            [torch.zeros_like(tensor[0]) if ref is None else ref.batch.tensors[key][ref.place] for ref in refs]
        )
        for key, tensor in first.tensors.items()
    }


def load(layers: Sequence[Any], states: dict[StateKey, Tensor] | None) -> None:
    """Give the recurrent layers the states they continue from."""
    for number, layer in enumerate(layers):
        for place in range(getattr(layer, "number_of_states", 0)):
            for kind in _KINDS:
                state = None if states is None else states.get((number, kind, place))
                getattr(layer, kind)[place] = state
                getattr(layer, f"is_{kind}_initialized")[place] = state is not None
            layer.has_previous_state[place] = states is not None and any(
                (number, kind, place) in states for kind in _KINDS
            )


def collect(layers: Sequence[Any], rows: int) -> StateBatch:
    """What the recurrent layers hold after a step."""
    return StateBatch(
        {
            (number, kind, place): state.detach()  # one-token forwards write into it, with gradients or without
            for number, layer in enumerate(layers)
            for kind in _KINDS
            for place, state in getattr(layer, kind, {}).items()
            if state is not None
        },
        rows,
    )


def compact(refs: Sequence[StateRef], batch: StateBatch) -> list[StateRef]:
    """The references into ``batch`` moved into a batch without the rows nobody refers to any more."""
    places = sorted({ref.place for ref in refs})
    smaller = batch.take(places)
    return [StateRef(smaller, places.index(ref.place)) for ref in refs]


def _take(tensor: Tensor, places: Sequence[int]) -> Tensor:
    return tensor.index_select(0, torch.tensor(places, device=tensor.device))


_Key: TypeAlias = tuple[Hashable, Hashable, int, tuple[Hashable, ...]]
"""Salt, extra key, number of tokens, and what tells these apart: equal for prompts that share the checkpoint."""


class _Saved(NamedTuple):
    """A checkpoint; without ``ref`` its states are on the host."""

    chain: weakref.ref[Chain] | None
    ref: StateRef | None


class Checkpoints:
    """States saved along prompts, from which later prompts that begin alike continue.

    A checkpoint lives no longer than the block of K/V that ends where it was taken, and goes to the host with it. Beyond
    ``limit``, the longest unused goes first: to the host, or for good.

    Args:
        limit: most checkpoints kept on the device.
        host: holds those that are not.

    Attributes:
        host: the same.
    """

    def __init__(self, limit: int, host: HostTier) -> None:
        self._limit, self.host = limit, host
        self._saved: dict[_Key, _Saved] = {}

    def __len__(self) -> int:
        self._sweep()
        return len(self._saved)

    @property
    def nbytes(self) -> int:
        """Bytes of all saved states on the device."""
        return sum(saved.ref.batch.nbytes for saved in self._saved.values() if saved.ref is not None)

    def save(self, prompt: Prompt, chain: Chain | None, ref: StateRef) -> None:
        """Keep a copy of the states after ``prompt``.

        Args:
            prompt: the tokens they are the fold of.
            chain: the blocks of K/V of these tokens; ``None`` where the model has no attention.
            ref: the states.
        """
        key = _key(prompt, len(prompt.tokens))
        known = self._saved.pop(key, None)
        kept = known.ref if known is not None and known.ref is not None else ref.alone()
        self._saved[key] = _Saved(None if chain is None else weakref.ref(chain), kept)
        self._sweep()

    def depths(self, prompt: Prompt) -> list[int]:
        """After how many tokens of this prompt a state was saved; at least one token is left to compute."""
        self._sweep()
        lengths = sorted({length for _, _, length, _ in self._saved if length < len(prompt.tokens)})
        return [length for length in lengths if _key(prompt, length) in self._saved]

    def get(self, prompt: Prompt, depth: int) -> StateRef:
        """The states saved after ``depth`` tokens, one of :meth:`depths`."""
        key = _key(prompt, depth)
        chain, ref = self._saved[key]
        ref = StateRef.from_host(self.host.get(key)) if ref is None else ref
        del self._saved[key]
        self._saved[key] = _Saved(chain, ref)
        return ref

    def clear(self) -> None:
        """Forget all."""
        for key in self._saved:
            self.host.discard(key)
        self._saved.clear()

    def _sweep(self) -> None:
        for key, (reference, ref) in list(self._saved.items()):
            chain = None if reference is None else reference()
            if ref is None and key not in self.host:
                del self._saved[key]
            elif reference is not None and (chain is None or not (chain.holders or chain in self.host)):
                del self._saved[key]
                self.host.discard(key)
            elif ref is not None and chain is not None and not chain.holders:
                self._offload(key)
        on_device = [key for key, saved in self._saved.items() if saved.ref is not None]
        for key in on_device[: max(len(on_device) - self._limit, 0)]:
            self._offload(key)

    def _offload(self, key: _Key) -> None:
        """To the host, if that has room for it."""
        saved = self._saved.pop(key)
        if key not in self.host and saved.ref is not None and saved.ref.batch.nbytes <= self.host.budget:
            self.host.put(key, saved.ref.on_host())
        if key in self.host:
            self._saved[key] = saved._replace(ref=None)


def _key(prompt: Prompt, depth: int) -> _Key:
    return prompt.salt, prompt.extra, depth, tuple(block_contents(prompt.tokens[:depth], media=prompt.media))
