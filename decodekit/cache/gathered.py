"""A transformers Cache whose K/V lie in blocks and whose states lie by row, with all that transformers calls.

Under ``model.generate`` or ``model(...)`` alone, rows are rectangular and nobody says where a forward begins.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from decodekit.cache.stepping import SteppedCache
from decodekit.cache.steps import Step
from decodekit.cache.storage import FullStore
from decodekit.core import compat
from decodekit.core.errors import InputError, Refused


class GatheredCache(SteppedCache):
    """What :class:`PagedCache` is to transformers; its arguments are the same."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the K/V of new tokens, [R, H, q, D]; returns those the queries see, [R, H, T, D]."""
        if (number := self._group_of.get(layer_idx)) is None:
            raise InputError(f"layer {layer_idx} keeps no K/V; those that do: {sorted(self._group_of)}")
        if self.frame is not None:
            return self.frame.write(layer_idx, key_states, value_states)
        batch, query_length = key_states.shape[0], key_states.shape[2]
        step = self._running(batch, layer_idx, written=True)
        if not step.query_length:
            try:
                self._reserve(step, query_length)
            except BaseException:
                self._undo(step)
                raise
        if (batch, query_length) != step.shape:
            rows, width = step.shape
            raise InputError(
                f"the model was given {batch} rows of {query_length} tokens; the step has {rows} rows of {width}"
            )
        write, read, chosen = step.slots[number].on(key_states.device)
        new = [part.detach() if part.requires_grad else part for part in (key_states, value_states)]
        if (store := self._stores.get(layer_idx)) is None:
            store = self._stores[layer_idx] = self._new_store(number, *map(_by_token, new))
        if isinstance(store, FullStore) and store.joins:
            new = [store.join(*new)]
            [joined] = map(_by_token, new)
            store.write_joined(write, joined if chosen is None else joined[chosen])
        else:
            keys, values = map(_by_token, new)
            store.write(write, *((keys, values) if chosen is None else (keys[chosen], values[chosen])))
            new = [part.to(self._dtype or part.dtype) for part in new]
        step.written.add(layer_idx)
        if step.direct:
            return key_states, value_states
        parts = self.groups[number].rectangle.read(layer_idx, store, read, new)
        keys, values = store.split(parts) if isinstance(store, FullStore) else parts
        if (turn := step.slots[number].turn) is not None:
            keys = turn(keys)
        if key_states.requires_grad and torch.is_grad_enabled():
            keys, values = _NoBackward.apply(keys, key_states), _NoBackward.apply(values, value_states)
        return keys, values

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """See transformers; a forward that nobody announced begins a step."""
        if self.frame is None:
            self._running(conv_states.shape[0], layer_idx, asks=f"update_conv_state {state_idx}")
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """See transformers; a forward that nobody announced begins a step."""
        if self.frame is None:
            self._running(recurrent_states.shape[0], layer_idx, asks=f"update_recurrent_state {state_idx}")
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """See transformers; a forward that nobody announced begins a step."""
        self._touch(layer_idx, f"get_conv_state {state_idx}")
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """See transformers; a forward that nobody announced begins a step."""
        self._touch(layer_idx, f"get_recurrent_state {state_idx}")
        return super().get_recurrent_state(layer_idx, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """See transformers; a forward that nobody announced begins a step."""
        self._touch(layer_idx, f"has_previous_state {state_idx}")
        return super().has_previous_state(layer_idx, state_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest row, in a stream no more than a query sees; of the rows of a step that was begun, before it."""
        if not self.groups:
            return super().get_seq_length(layer_idx)
        return max(self._lengths(), default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many tokens a query sees in this layer, and how many lie before them."""
        group = self.groups[self._group_of.get(layer_idx, 0)]
        longest = max(self._lengths(), default=0)
        cached = group.cached_columns(longest)
        return cached + query_length, longest - cached

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens that fit: no limit but the pool's."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows become those of ``beam_idx``; nothing is copied."""
        self._rearrange(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes ``repeats`` rows that share its blocks."""
        self._rearrange([row for row in range(len(self.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, given by number or by a mask."""
        self._rearrange(torch.arange(len(self.rows))[indices.cpu()].tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Drop ``-tokens_to_remove`` tokens of each row (before transformers 5.18, a positive number is the length to keep)."""
        if tokens_to_remove > 0 and not compat.CROP_TAKES_A_LENGTH:
            raise ValueError(f"crop got {tokens_to_remove}; give the number of tokens to drop as a negative number")
        self._check_idle("crop")
        tokens_to_remove = int(tokens_to_remove)  # assisted generation gives a tensor
        drop = [
            max(row.length - tokens_to_remove, 0) if tokens_to_remove > 0 else min(-tokens_to_remove, row.length)
            for row in self.rows
        ]
        if any(again := self._book.rollback(drop)):
            raise Refused(f"after crop, rows need {again} tokens forwarded again; use rollback, which tells how many")

    def activate_past_recording(self) -> None:
        """From now on keep what a rollback needs until the next one, which may drop nothing."""
        self._book.recording = True

    def deactivate_past_recording(self) -> None:
        """From now on a rollback of recurrent states goes back to what was checkpointed."""
        self._book.recording = False

    def reset(self) -> None:
        """Forget all rows, all prefixes and all checkpoints; snapshots taken before cannot be restored."""
        self._step = self._run = None
        self._book.rows = []
        self._checkpoints.clear()
        for group in self.groups:
            group.pool.reset()
            group.rectangle.clear()
        Step(self, [], None).undo(self.groups, self.layers)
        self._book.on_idle()

    def free(self) -> None:
        """Forget all rows, and give the memory of K/V and graphs back; the next step takes it anew."""
        self.reset()
        self.forget_captured()
        self._stores.clear()

    @property
    def is_initialized(self) -> bool:
        """Whether any K/V or states were stored."""
        return bool(self._stores) or any(row.length for row in self.rows)

    @property
    def is_compileable(self) -> bool:
        """Its tensors change their shapes: it cannot be compiled."""
        return False

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` is exact: K/V can be dropped, recurrent states only be computed again."""
        return not self._state_layers

    @property
    def is_sliding(self) -> list[bool]:
        """Of each layer, whether its attention has a window."""
        return [layer.is_sliding for layer in self.layers]

    @property
    def is_linear(self) -> list[bool]:
        """Of each layer, whether it keeps states only."""
        return [n in self._state_layers and n not in self._group_of for n in range(len(self.layers))]

    @property
    def is_dummy(self) -> list[bool]:
        """Of each layer, whether it keeps nothing."""
        return [n not in self._state_layers and n not in self._group_of for n in range(len(self.layers))]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise Refused("a paged cache is not copied: fork its rows, or take a snapshot, which share their blocks")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rows={len(self.rows)}, layers={len(self.layers)}, groups={len(self.groups)})"


def _by_token(part: Tensor) -> Tensor:
    """[R, H, q, D] as [R * q, H, D]."""
    return part.transpose(1, 2).flatten(0, 1)


class _NoBackward(torch.autograd.Function):
    """Hands cached K/V on, and refuses gradients, which would lack what flows through the keys and values."""

    @staticmethod
    def forward(ctx: Any, stored: Tensor, new: Tensor) -> Tensor:
        return stored.clone()  # what a graph saved must not change when the next step adds its columns

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise Refused("a paged cache keeps no gradients; train with use_cache=False")
