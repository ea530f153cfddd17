"""A transformers Cache whose K/V lie in blocks and whose states lie by row, with all that transformers calls.

Under ``model.generate`` or ``model(...)`` alone, rows are rectangular and nobody says where a forward begins: layers come in
order, each once, so a layer that comes again begins another. A forward that never got to its last layer is taken back then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from transformers import Cache

from decodekit.cache.blocks import Copy
from decodekit.cache.gather import Group
from decodekit.cache.layers import make_layers
from decodekit.cache.quantization import QuantizedStore
from decodekit.cache.rows import Row, RowBook
from decodekit.cache.states import Checkpoints
from decodekit.cache.steps import Step
from decodekit.cache.storage import FullStore, KVStore
from decodekit.cache.streaming import frequencies, make_stream
from decodekit.core import compat
from decodekit.core.errors import InputError, Refused, nearest
from decodekit.kernels.kv_quantize import BITS


class GatheredCache(Cache):
    """What :class:`PagedCache` is to transformers; its arguments are the same.

    Attributes:
        device: where masks and positions are made.
        groups: the cache groups.
    """

    def __init__(
        self,
        config: Any,
        *,
        num_blocks: int,
        block_size: int = 16,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        quantization: Literal["int8", "fp8", "int4", "int2"] | None = None,
        prefix_cache: bool = True,
        salt: bytes | str | None = None,
        checkpoint: Literal["prompt"] | int | None = "prompt",
        max_checkpoints: int = 32,
        sinks: int = 0,
        window: int | None = None,
    ) -> None:
        _check_heads(config.get_text_config(decoder=True))
        kinds = compat.cache_layers(config)
        super().__init__(layers=make_layers(kinds))
        self._config = config
        self.device = torch.device(device or "cpu")
        self._dtype, self._prefix_cache, self._salt = dtype, prefix_cache, salt
        self._quantization = quantization
        self.stream = make_stream(config, sinks, window)
        members: dict[int | None, list[int]] = {}
        for layer, kind in enumerate(kinds):
            if kind.attention:
                members.setdefault(kind.window, []).append(layer)
        if self.stream is not None and None not in members:
            raise Refused("every layer of this model that keeps K/V has a window of its own; leave window out")
        self.groups = [
            Group(
                layers,
                num_blocks,
                block_size,
                own,
                self.stream,
                None if self.stream is None else frequencies(config, layers[0]),
            )
            for own, layers in members.items()
        ]
        if quantization is not None:
            _check_quantization(quantization, dtype, self.groups)
        self._group_of = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        self._state_layers = {number for number, kind in enumerate(kinds) if kind.states}
        self._continues = not self._state_layers or compat.continues(config)
        self._stores: dict[int, KVStore] = {}
        self._checkpoints = Checkpoints(max_checkpoints)
        self._book = RowBook(
            self.groups,
            block_size,
            recurrent=bool(self._state_layers),
            checkpoint=checkpoint if prefix_cache else None,
            checkpoints=self._checkpoints,
            on_idle=partial(_settle_idle, self.groups, {} if quantization is None else self._stores),
        )
        self._step: Step | None = None

    @property
    def rows(self) -> list[Row]:
        """The rows, in the order of the batch; read only."""
        self._settle_if_complete()
        return self._book.rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the K/V of new tokens, [R, H, q, D]; returns those the queries see, [R, H, T, D]."""
        if (number := self._group_of.get(layer_idx)) is None:
            raise InputError(f"layer {layer_idx} keeps no K/V; those that do: {sorted(self._group_of)}")
        batch, query_length = key_states.shape[0], key_states.shape[2]
        step = self._running(batch, layer_idx, written=True)
        if not step.query_length:
            try:
                self._reserve(step, query_length)
            except BaseException:
                self._undo(step)
                raise
        if (batch, query_length) != (len(step.rows), step.query_length):
            raise InputError(
                f"the model was given {batch} rows of {query_length} tokens; the step has {len(step.rows)} rows of "
                f"{step.query_length}"
            )
        write, read, chosen = step.slots[number].on(key_states.device)
        keys = key_states.detach().transpose(1, 2).flatten(0, 1)
        values = value_states.detach().transpose(1, 2).flatten(0, 1)
        if (store := self._stores.get(layer_idx)) is None:
            store = self._stores[layer_idx] = self._new_store(number, keys, values)
        store.write(write, *((keys, values) if chosen is None else (keys[chosen], values[chosen])))
        step.written.add(layer_idx)
        if step.direct:
            return key_states, value_states
        graph = key_states.requires_grad and torch.is_grad_enabled()
        run = step.slots[number].run
        found = store.run(*run) if run and not graph and isinstance(store, FullStore) else store.read(read)
        turn = step.slots[number].turn
        keys = found[0] if turn is None else turn(found[0])
        keys, values = keys.transpose(1, 2), found[1].transpose(1, 2)
        if graph:
            keys, values = _NoBackward.apply(keys, key_states), _NoBackward.apply(values, value_states)
        return keys, values

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """See transformers; a forward that nobody announced begins a step."""
        self._running(conv_states.shape[0], layer_idx, asks=f"update_conv_state {state_idx}")
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """See transformers; a forward that nobody announced begins a step."""
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
        self._step = None
        self._book.rows = []
        self._checkpoints.clear()
        for group in self.groups:
            group.pool.reset()
        Step(self, [], None).undo(self.groups, self.layers)
        self._book.on_idle()

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

    # Steps

    def _running(self, batch: int, layer: int, *, written: bool = False, asks: str = "") -> Step:
        """The step that a forward, now at ``layer``, belongs to."""
        step = self._step
        if step is not None and step.explicit:
            if written and layer in step.written:
                raise InputError(f"layer {layer} was forwarded twice in one step; commit it, and begin another")
        elif step is None or _is_new(step, layer, written, asks):
            self._settle()
            step = self._begin_unannounced(batch)
        if asks:
            step.touched.add(layer)
            step.asked.add((layer, asks))
        step.last = layer
        return step

    def _touch(self, layer: int | None, asks: str) -> None:
        if self._step is None and not self._book.rows:
            return
        if layer is not None:
            self._running(len(self._book.rows), layer, asks=asks)
        elif self._step is None:
            self._step = self._begin_unannounced(len(self._book.rows))

    def _begin_unannounced(self, batch: int) -> Step:
        if self.stream is not None:
            raise Refused(
                "a cache with a window says at which position each token is forwarded, which generate alone does not ask; give "
                "generate custom_generate=decodekit.load({}), or begin a step before each forward"
            )
        if any(row.prompt is not None for row in self._book.rows):
            raise InputError("the rows of this cache were opened by name; begin a step before each forward")
        if opened := not self._book.rows:
            self._use_names(False)
            self._book.open_unknown(batch)
        elif batch != len(self._book.rows):
            raise InputError(
                f"the model was given {batch} rows; the cache has {len(self._book.rows)} (reset it for a new batch)"
            )
        step = self._step = Step(self, self._book.rows, None, opened=opened)
        step.load(self.layers)
        return step

    def _reserve(self, step: Step, query_length: int) -> None:
        copies = step.reserve(self.groups, query_length)
        for group, copied in zip(self.groups, copies, strict=True):
            self._copy(group, copied)

    def _copy(self, group: Group, copies: Sequence[Copy]) -> None:
        if not copies:
            return
        source, target = torch.tensor(copies).unbind(1)
        for layer in group.layers:
            if (store := self._stores.get(layer)) is not None:
                store.copy(source, target)

    def _missing(self, step: Step) -> list[int]:
        return sorted((self._group_of.keys() - step.written) | (self._state_layers - step.touched))

    def _settle(self) -> None:
        """End a step that nobody announced: an exception may have left it unfinished."""
        if (step := self._step) is not None:
            if self._missing(step):
                self._undo(step)
            else:
                self._finish(step)

    def _settle_if_complete(self) -> None:
        if (step := self._step) is not None and not step.explicit and not self._missing(step):
            self._finish(step)

    def _finish(self, step: Step) -> None:
        stale = {id(row.state.batch): row.state.batch for row in step.rows if row.state is not None}
        step.finish(self._book, self.layers, recurrent=bool(self._state_layers))
        self._step = None
        self._book.tidy(step.rows, list(stale.values()))
        for number, group in enumerate(self.groups):
            self._seal(number, group, step.rows)

    def _seal(self, number: int, group: Group, rows: Sequence[Row]) -> None:
        blocks: list[int] = []
        for row in rows:
            full = row.final // group.pool.block_size
            if full > row.sealed[number]:
                held = row.tables[number].blocks[row.sealed[number] : full]
                blocks.extend(block for block in held if block is not None)
                row.sealed[number] = full
        if blocks:
            for layer in group.layers:
                self._stores[layer].seal(torch.tensor(sorted(set(blocks))))

    def _undo(self, step: Step) -> None:
        step.undo(self.groups, self.layers)
        self._step = None
        if step.opened:
            self._book.fork([])
        self._book.on_idle()

    def _check_idle(self, operation: str) -> None:
        if self._step is not None and self._step.explicit:
            raise InputError(f"{operation} inside a step; commit or abort it first")
        self._settle()

    def _rearrange(self, parents: list[int]) -> None:
        self._check_idle("reordering")
        if self._book.rows:
            self._book.fork(parents)

    def group_of(self, layer_idx: int) -> int:
        """The number of the cache group that a layer belongs to."""
        return self._group_of[layer_idx]

    def store(self, layer_idx: int) -> KVStore:
        """Where a layer's K/V are; there from its first forward on."""
        return self._stores[layer_idx]

    def shown(self, lengths: Sequence[int]) -> list[int]:
        """Lengths as masks have them: a stream's masks stay as small as what a query sees."""
        if self.stream is None:
            return list(lengths)
        most = max(self.stream.capacity, *(group.window or 0 for group in self.groups))
        return [min(length, most) for length in lengths]

    def _lengths(self) -> list[int]:
        if self._step is not None and self._step.explicit:
            return self.shown(self._step.lengths)
        return self.shown([row.length for row in self.rows])

    def _use_names(self, named: bool) -> None:
        """Rows whose tokens are known can be reused, others cannot: an empty cache changes from one kind to the other."""
        if any((row.prompt is not None) != named for row in self._book.rows):
            raise InputError(
                "the rows of this cache were made by a forward without names; reset it before opening prompts"
            )
        for group in self.groups:
            if not self._book.rows and group.pool.prefix_cache != (named and self._prefix_cache):
                group.renew(prefix_cache=named and self._prefix_cache)

    def _new_store(self, number: int, keys: Tensor, values: Tensor) -> KVStore:
        pool = self.groups[number].pool
        if self._quantization is not None:
            return QuantizedStore(pool.num_blocks, pool.block_size, keys, values, self._quantization)
        return FullStore(pool.num_blocks, pool.block_size, keys, values, self._dtype)


class _NoBackward(torch.autograd.Function):
    """Hands cached K/V on, and refuses gradients, which would lack what flows through the keys and values."""

    @staticmethod
    def forward(ctx: Any, stored: Tensor, new: Tensor) -> Tensor:
        return stored.view_as(stored)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise Refused("a paged cache keeps no gradients; train with use_cache=False")


def _is_new(step: Step, layer: int, written: bool, asks: str) -> bool:
    """Whether a forward that reaches ``layer`` is another than that of the step: layers come in order, each once."""
    return (layer in step.written) if written else layer < step.last or (layer, asks) in step.asked


def _settle_idle(groups: Sequence[Group], stores: Mapping[int, KVStore]) -> None:
    """Tell the stores which blocks no row has; those that prompts can still hit are full, whatever their rows awaited."""
    for group in groups:
        if held := [stores[layer] for layer in group.layers if layer in stores]:
            free, cached = (torch.tensor(blocks, dtype=torch.int64) for blocks in group.pool.idle())
            for store in held:
                store.release(free)
                store.seal(cached)


def _check_quantization(kind: str, dtype: torch.dtype | None, groups: Sequence[Group]) -> None:
    if kind not in BITS:
        raise InputError(f"unknown quantization {kind!r}: {nearest(str(kind), BITS)}")
    if dtype is not None:
        raise InputError(f"quantization {kind!r} beside dtype {dtype}: both say how K/V are kept; give one of them")
    if not groups:
        raise Refused(f"quantization {kind!r} is of K/V, and this model keeps none, only states; leave it out")


def _check_heads(config: Any) -> None:
    heads, kv_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads and heads % kv_heads:
        raise Refused(
            f"{heads} query heads cannot share {kv_heads} K/V heads; the first must be a multiple of the second"
        )
