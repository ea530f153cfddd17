"""Steps over rows in blocks: where a forward begins, what it reserves and writes, and how it ends or is taken back.

A step is begun by name (``PagedCache.begin``), or by a forward that nobody announced. Its layers come in order, each once, so
a layer that comes again begins another. A forward that never got to its last layer is taken back then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import Cache

from decodekit.cache.blocks import Copy
from decodekit.cache.fixed import FixedStep
from decodekit.cache.gather import Group
from decodekit.cache.host import GroupHost, HostTier
from decodekit.cache.layers import make_layers
from decodekit.cache.preempt import Suspended
from decodekit.cache.quantization import QuantizedStore
from decodekit.cache.rows import Row, RowBook
from decodekit.cache.runs import Run
from decodekit.cache.states import Checkpoints, StateKey
from decodekit.cache.steps import Step
from decodekit.cache.storage import FullStore, KVStore
from decodekit.cache.streaming import frequencies, make_stream
from decodekit.core import compat
from decodekit.core.errors import InputError, Refused, nearest
from decodekit.kernels.kv_quantize import BITS


class SteppedCache(Cache):
    """Rows, their stores and states, and the step that is going on; its arguments are those of :class:`PagedCache`.

    Attributes:
        device: where masks and positions are made.
        groups: the cache groups.
        quantization: how full blocks are kept; ``None``: in full precision.
        paths: what attended to the blocks of the steps so far, see :attr:`Layout.path`.
        heads_a_kv_head: query heads that share a K/V head.
        frame: whose forward is going on, of those that are captured.
        captured: graphs over its K/V by what tells them apart; whoever gives the cache up lets go of them.
        lent: by what would tell a graph apart, steps that were taken without it, before it was captured.
        frame_states: rows of a frame to their states, which graphs write in place.
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
        host_bytes: int = 0,
        keep_gathered: bool = True,
        sinks: int = 0,
        window: int | None = None,
        preallocate: bool = False,
    ) -> None:
        if host_bytes < 0:
            raise InputError(
                f"host_bytes is {host_bytes}; give the bytes of host memory for evicted blocks, 0 for none"
            )
        self.heads_a_kv_head = _check_heads(config.get_text_config(decoder=True))
        kinds = compat.cache_layers(config)
        super().__init__(layers=make_layers(kinds))
        self._config = config
        self.device = torch.device(device or "cpu")
        self._dtype, self._prefix_cache, self._salt = dtype, prefix_cache, salt
        self._checkpoint = checkpoint if prefix_cache else None
        self.quantization = quantization
        self._host, self._stores = HostTier(host_bytes), dict[int, KVStore]()
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
                host=GroupHost(self._host, layers, self._stores) if host_bytes else None,
                keeps=keep_gathered and quantization is None,
                stream=self.stream,
                frequencies=None if self.stream is None else frequencies(config, layers[0]),
            )
            for own, layers in members.items()
        ]
        if quantization is not None:
            _check_quantization(quantization, dtype, self.groups)
        self.preallocated = preallocate
        if preallocate:
            for group in self.groups:
                group.stored = num_blocks
        self._group_of = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        self._state_layers = {number for number, kind in enumerate(kinds) if kind.states}
        self._continues = not self._state_layers or compat.continues(config)
        self._checkpoints = Checkpoints(max_checkpoints, self._host)
        self._book = RowBook(
            self.groups,
            block_size,
            recurrent=bool(self._state_layers),
            checkpoint=self._checkpoint,
            checkpoints=self._checkpoints,
            on_idle=partial(_settle_idle, self.groups, {} if quantization is None else self._stores),
        )
        self._suspended: WeakSet[Suspended] = WeakSet()
        self._step: Step | None = None
        self._run: Run | None = None
        self.frame: FixedStep | None = None
        self.captured: dict[Any, list[Any]] = {}
        self.lent = Counter[Any]()
        self.frame_states: dict[int, dict[StateKey, Tensor]] = {}
        self.paths: set[str] = set()

    @property
    def rows(self) -> list[Row]:
        """The rows, in the order of the batch; read only."""
        self._settle_if_complete()
        return self._book.rows

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
        if self.frame is not None or (self._step is None and not self._book.rows):
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
            self.settle_copies(group, copied)

    def _make_room(self, group: Group) -> None:
        """Let the stores hold all blocks that were handed out, and as many again, so that they seldom grow."""
        if group.pool.reach > group.stored:
            blocks = min(2 * group.pool.reach, group.pool.num_blocks)
            for layer in group.layers:
                if (store := self._stores.get(layer)) is not None:
                    store.grow(blocks)
            group.stored = blocks

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
        self.paths.update(step.paths)
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

    def why_no_run(self) -> str | None:
        """Why rows of this cache cannot take many steps at once; ``None``: they can."""
        if self.quantization is not None:
            return f"K/V kept as {self.quantization}"
        if self.stream is not None:
            return "a cache with a window"
        if not self.preallocated:
            return "a cache whose memory grows"
        if self.keeps_states and isinstance(self._checkpoint, int):
            return f"states that are saved every {self._checkpoint} tokens"
        return None if self.groups else "a model without K/V"

    def begin_run(self, rows: Sequence[int], tokens: Sequence[int], steps: int) -> Run:
        """Take room for many steps of one token each of some rows; :meth:`Run.finish` ends them.

        Args:
            rows: [R] places in :attr:`rows`, each once.
            tokens: [R] the first token that each forwards.
            steps: how many, see :func:`~decodekit.cache.runs.most_steps`.

        Raises:
            Refused: this cache has none, see :meth:`why_no_run`.
            OutOfBlocks: there is no room for all of it; nothing was taken.
        """
        self._check_idle("begin_run")
        if (reason := self.why_no_run()) is not None:
            raise Refused(f"{reason} cannot take many steps at once; begin them one by one")
        self._run = Run(self, [self.rows[row] for row in rows], tokens, steps)
        return self._run

    def end_run(self, run: Run, tokens: Sequence[Sequence[int]]) -> None:
        """What :meth:`Run.finish` does, with the tokens that each row keeps; those without any stay as they were."""
        stale = {id(row.state.batch): row.state.batch for row in run.rows if row.state is not None}
        places = [place for place, own in enumerate(tokens) if own]
        try:
            if places:
                states = None if run.frame is None else run.frame.states(places)
                self._book.advance([run.rows[place] for place in places], [tokens[place] for place in places], states)
            for number, group in enumerate(self.groups):
                for row in run.rows:
                    group.pool.truncate(row.tables[number], row.length)
        finally:
            self._run = None
        self._book.tidy(run.rows, list(stale.values()))
        for number, group in enumerate(self.groups):
            self._seal(number, group, run.rows)
        self._book.on_idle()

    def forget_captured(self) -> None:
        """Let go of all graphs, which know K/V and states by their addresses."""
        self.captured.clear()
        self.lent.clear()
        self.frame_states.clear()

    def settle_copies(self, group: Group, copies: Sequence[Copy]) -> None:
        """Have room for all blocks that were handed out, and copy those that rows no longer share."""
        self._make_room(group)
        self._copy(group, copies)

    def _check_idle(self, operation: str) -> None:
        if self._run is not None:
            raise InputError(f"{operation} inside a run; finish it first")
        if self._step is not None and self._step.explicit:
            raise InputError(f"{operation} inside a step; commit or abort it first")
        self._settle()

    def _rearrange(self, parents: list[int]) -> None:
        self._check_idle("reordering")
        if self._book.rows:
            self._book.fork(parents)

    @property
    def keeps_states(self) -> bool:
        """Whether layers keep recurrent states, which cannot go back by themselves."""
        return bool(self._state_layers)

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
        group = self.groups[number]
        if self.quantization is not None:
            return QuantizedStore(group.stored, group.pool.block_size, keys, values, self.quantization)
        return FullStore(group.stored, group.pool.block_size, keys, values, self._dtype)


def _is_new(step: Step, layer: int, written: bool, asks: str) -> bool:
    """Whether a forward that reaches ``layer`` is another than that of the step: layers come in order, each once."""
    return (layer in step.written) if written else layer < step.last or (layer, asks) in step.asked


def _settle_idle(groups: Sequence[Group], stores: Mapping[int, KVStore]) -> None:
    """Let go of what was gathered of rows that are no more, and tell the stores which blocks no row has.

    Those blocks that prompts can still hit are full, whatever their rows awaited.
    """
    for group in groups:
        group.rectangle.settle()
        if held := [stores[layer] for layer in group.layers if layer in stores]:
            free, cached = (
                torch.tensor([block for block in blocks if block < group.stored], dtype=torch.int64)
                for blocks in group.pool.idle()
            )
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


def _check_heads(config: Any) -> int:
    """Query heads a K/V head; 1 where the config does not say."""
    heads, kv_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads and heads % kv_heads:
        raise Refused(
            f"{heads} query heads cannot share {kv_heads} K/V heads; the first must be a multiple of the second"
        )
    return heads // kv_heads if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads else 1
