"""A transformers Cache whose K/V lie in blocks: rows of any length, forks without copies, rollback, prefix reuse.

It is used in one of two ways:

- under ``model.generate`` or ``model(...)`` alone, as any transformers Cache: rows are rectangular, pads are stored;
- by a loop that names its rows: ``open`` prompts, ``begin`` a step, forward, ``commit``. Rows have any lengths and pads are
  never stored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from decodekit.cache import preempt, transfer
from decodekit.cache.gathered import GatheredCache
from decodekit.cache.prefix import Prompt
from decodekit.cache.rows import Row, Snapshot
from decodekit.cache.steps import Step
from decodekit.core.errors import InputError, Refused


class PagedCache(GatheredCache):
    """K/V in blocks and recurrent states by row, for all layers of one model.

    Args:
        config: the model's.
        num_blocks: blocks of each cache group: the layers with full attention, and those of each size of window.
        block_size: tokens a block, 1 to 256.
        device: where masks and positions are made; K/V and states stay where the model computes them.
        dtype: of stored K/V; ``None`` keeps the model's.
        quantization: of full blocks, after KIVI: ``int8``, ``fp8``, ``int4`` or ``int2``; ``None`` keeps all as it is. Blocks
            that are still being filled, or that a rollback may reach, have full precision, and states always.
        prefix_cache: let later prompts reuse the blocks of earlier ones that begin alike.
        salt: of prompts that have none; prompts of different salts share nothing.
        checkpoint: where the states of recurrent layers are saved, without which no prompt of such a model can be
            reused: at the last block boundary of a ``"prompt"``, every so many tokens, or nowhere (``None``).
        max_checkpoints: most states saved on the device.
        host_bytes: host memory (pinned, if they are on CUDA) for blocks and states that are evicted, from which later prompts
            still hit them; 0 for none.
        keep_gathered: keep what attention is given from step to step while the same rows grow together, instead of gathering
            it again; it takes the rows' K/V once more, each row as wide as the longest. Never for quantized blocks or streams.
        sinks: first tokens of a row that full attention keeps beside ``window``; 4 is usual, with 0 most models break down.
        window: last tokens that full attention keeps, the newest included, for streams of any length (see
            :mod:`decodekit.cache.streaming`); layers with a window of their own keep it. ``None`` keeps all.
        preallocate: have memory for all blocks from the start, at one place for good, as captured graphs need it.

    Attributes:
        groups: the cache groups.

    Raises:
        Refused: transformers' Cache does not hold what this model keeps, its K/V heads do not divide its query heads, it has no
            K/V to quantize, or its positions cannot be moved, as a window needs it.
        InputError: a number is out of range, the quantization is not known, a dtype is given beside it, or sinks without a
            window.
    """

    def open(self, prompts: Sequence[Prompt | Sequence[int]]) -> list[int]:
        """Append a row a prompt, with as many of its tokens as the prefix cache has (``rows[i].num_cached``).

        Returns:
            their places in :attr:`rows`.

        Raises:
            InputError: the cache holds rows of a forward that did not name them.
        """
        self._check_idle("open")
        self._use_names(True)
        start = len(self.rows)
        self._book.open([self._prompt(prompt) for prompt in prompts])
        return list(range(start, len(self.rows)))

    @property
    def continues(self) -> bool:
        """Whether several tokens can follow others in one step: some models' own code loses its state then."""
        return self._continues

    def max_query(self, row: int, count: int) -> int:
        """How many of a row's next ``count`` tokens to forward in one step.

        Fewer where its states are to be saved, and only one after others where a model's own code loses its state. As many
        as a window and its sinks hold, then one by one: each of them drops another token, and masks cannot tell.
        """
        length = self.rows[row].length
        if length and not self._continues:
            return min(count, 1)
        if self.stream is not None:
            count = min(count, max(self.stream.capacity - length, 1))
        place = self._book.next_checkpoint(self.rows[row])
        return count if place is None else min(count, place - length)

    def together(self, counts: Mapping[int, int]) -> list[int]:
        """Which of these rows, with so many tokens each, can share a step; the first is among them.

        All of them, padded, unless a recurrent layer would take pads for tokens, or a window drops some.
        """
        first = next(iter(counts.values()))
        ragged = not self._state_layers and not any(self._drops(self.rows[row], count) for row, count in counts.items())
        return [row for row, count in counts.items() if count == first or ragged]

    def begin(
        self,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        *,
        attention_mask: Tensor | None = None,
        direct: bool = False,
        packed: bool = False,
    ) -> Step:
        """Begin a forward of the next tokens of some rows; :meth:`commit` or :meth:`abort` ends it.

        Args:
            rows: [R] places in :attr:`rows`, each once.
            tokens: [R] the ids of each row; as many in each where the model has recurrent layers. Shorter ones are padded on
                the left, and their pads are not stored.
            attention_mask: a mask of the caller's own, checked for its length.
            direct: the model's attention is :mod:`decodekit.cache.attention`'s and is given the step: it reads the blocks
                itself, and what many rows share once.
            packed: of a direct step, whose model is given the new tokens of all rows after each other as one row, [1, N], with
                the step's ``position_ids`` and no mask: nothing is padded.

        Raises:
            OutOfBlocks: there is no room for all of it; nothing was taken.
            InputError: a row or a number of tokens is wrong, rows cannot be packed, or the last step has not ended.
        """
        self._check_idle("begin")
        counts = [len(ids) for ids in tokens]
        ragged = len(set(counts)) > 1
        if len(rows) != len(tokens) or not counts or 0 in counts or len(set(rows)) != len(rows):
            raise InputError(
                f"begin got rows {list(rows)} with {counts} tokens; give different rows, each with at least 1 token"
            )
        if ragged and self._state_layers:
            raise InputError(
                f"begin got rows with {counts} tokens; a recurrent layer would take the pads of the shorter for tokens: give "
                "rows with the same number of tokens (max_query and together tell)"
            )
        if wrong := [row for row in rows if not 0 <= row < len(self.rows)]:
            raise InputError(f"rows {wrong} are not open; the cache has {len(self.rows)} rows")
        query_length = max(counts)
        chosen = [self.rows[row] for row in rows]
        if query_length > 1 and not self._continues and any(row.length for row in chosen):
            raise InputError(
                f"a step of {query_length} tokens after {[row.length for row in chosen]}: this model's forward of several "
                "tokens forgets its recurrent state; forward one token a step (max_query tells)"
            )
        if query_length > 1 and any(self._drops(row, count) for row, count in zip(chosen, counts, strict=True)):
            most = self.stream.capacity if self.stream is not None else 0
            raise InputError(
                f"a step of {counts} tokens after {[row.length for row in chosen]}: of more than the {most} that sinks and "
                "window hold, each query sees others; forward one token a step (max_query tells)"
            )
        if direct and self.stream is not None:
            raise Refused(
                "attention that reads blocks in place does not move keys, as a cache with a window has to; gather"
            )
        if attention_mask is not None:
            self._check_mask(attention_mask, self.shown([row.length for row in chosen]), query_length)
        if packed and (not direct or self._state_layers):
            raise InputError(
                "rows can be packed where attention reads blocks (direct=True) and no layer keeps states, which would run on "
                "from one row into the next"
            )
        step = self._step = Step(self, chosen, [list(ids) for ids in tokens], direct=direct, packed=packed)
        try:
            self._reserve(step, query_length)
            step.load(self.layers)
        except BaseException:
            self._undo(step)
            raise
        return step

    def commit(self) -> None:
        """The forward of the step that was begun is over: its tokens are part of the rows, full blocks can be reused.

        Raises:
            InputError: no step was begun, or the model did not write all of its layers; abort it then.
            Refused: a layer of a direct step did not read its blocks, so that it saw the new tokens only; abort it then.
        """
        if self._step is None or not self._step.explicit:
            raise InputError("commit without a step; begin one, and forward its tokens")
        if missing := self._missing(self._step):
            raise InputError(
                f"layers {missing} were not forwarded in this step; commit after the model has run, or abort"
            )
        if self._step.direct and (unread := sorted(self._step.written - self._step.read)):
            raise Refused(
                f"layers {unread} did not read the blocks of their step: this model does not hand it down; gather"
            )
        self._finish(self._step)

    def abort(self) -> None:
        """Take the step or run back that was begun: blocks, K/V and states are as before. Without one, do nothing."""
        if self._step is not None:
            self._undo(self._step)
        if (run := self._run) is not None:
            self._run = None
            run.abort()

    def fork(self, parents: Sequence[int]) -> None:
        """The rows become these, in this order: a row named twice is shared, a row not named is released.

        No block is copied before rows that share it diverge; the last of them writes into it without a copy.
        """
        self._check_idle("fork")
        self._book.fork(parents)

    def release(self, rows: Iterable[int]) -> None:
        """These rows are over; those behind them move up."""
        gone = set(rows)
        if wrong := [row for row in gone if not 0 <= row < len(self.rows)]:
            raise InputError(f"rows {wrong} are not open; the cache has {len(self.rows)} rows")
        self.fork([row for row in range(len(self.rows)) if row not in gone])

    def rollback(self, drop: Sequence[int]) -> list[int]:
        """Drop the last tokens of each row.

        K/V are exact at any length. A recurrent state is only there for the ends of steps since the last rollback (while
        :meth:`activate_past_recording` holds) and for checkpoints, and a sliding window only goes back as far as was kept: a
        row then goes back further, and the tokens up to the target have to be forwarded again.

        Args:
            drop: [R] how many of each row.

        Returns:
            [R] how many of the remaining tokens of each row to forward again; the row ends before them.

        Raises:
            Refused: tokens are to be forwarded again that nobody named; nothing was dropped.
        """
        self._check_idle("rollback")
        return self._book.rollback(drop)

    def snapshot(self) -> Snapshot:
        """All rows as they are now; holds their blocks until it is released."""
        self._check_idle("snapshot")
        return Snapshot(self._book)

    def restore(self, snapshot: Snapshot) -> None:
        """The rows of a snapshot take the place of those that are there."""
        self._check_idle("restore")
        self._book.replace(snapshot.rows)

    def suspend(self, row: int) -> preempt.Suspended:
        """Put a row aside: its K/V and states go to the host, its blocks to others; those behind it move up.

        Beside ``host_bytes``, since nothing may push it out.

        Args:
            row: its place in :attr:`rows`.

        Returns:
            what :meth:`resume` takes; whoever lets go of it gives the row up.
        """
        self._check_idle("suspend")
        self._check_row(row)
        suspended = preempt.suspend(self, row)
        self._suspended.add(suspended)
        return suspended

    def resume(self, suspended: preempt.Suspended) -> int:
        """Append a row that was put aside, bit for bit as it was; once.

        Returns:
            its place in :attr:`rows`.

        Raises:
            OutOfBlocks: there is no room for it; it stays aside, and nothing changed.
            InputError: it was resumed already, or the cache is another, or was reset.
        """
        self._check_idle("resume")
        return preempt.resume(self, suspended)

    def export(self, row: int, path: Path | str | None = None) -> bytes:
        """One sequence as a safetensors file for :meth:`load`, in this cache or another of the same model.

        It holds the tokens, the K/V that the next token sees ([T, H, D] a layer, in the model's dtype), the recurrent states,
        and in plain text the prompt's salt and keys.

        Args:
            row: its place in :attr:`rows`.
            path: also write it there, whole or not at all.

        Raises:
            InputError: there is no such row, or a key of its prompt is not made of str, bytes, int, bool, None and tuples.
            Refused: nobody named the row's tokens, or a window has dropped some.
        """
        self._check_idle("export")
        self._check_row(row)
        blob = transfer.dump(self, row)
        if path is not None:
            partial = Path(f"{path}.partial")
            partial.write_bytes(blob)
            partial.replace(path)
        return blob

    def load(self, blob: bytes | Path | str) -> int:
        """Append a sequence that :meth:`export` wrote; it goes on as it would have there, and later prompts hit its blocks.

        A checksum tells damage, not malice: the blocks are hit by all prompts of its salt, so load only what you trust. Not
        checked either: that weights are the same, and that both sides' transformers compute alike (for Mamba 2 with several
        groups, 5.17 and 5.24 do not). An empty cache puts all on its ``device``.

        Args:
            blob: the file, or its path.

        Returns:
            its place in :attr:`rows`.

        Raises:
            InputError: it is not such a file, is damaged, or is of another version or model; nothing changed.
            Refused: the cache has a window.
            OutOfBlocks: there is no room for it; nothing changed.
        """
        self._check_idle("load")
        origin = "the blob" if isinstance(blob, bytes) else str(blob)
        try:
            content = blob if isinstance(blob, bytes) else Path(blob).read_bytes()
        except OSError as error:
            raise InputError(f"{origin} cannot be read ({error.strerror}); give the path of an export") from error
        return transfer.restore(self, content, origin)

    def can_admit(self, prompt: Prompt | Sequence[int], max_new: int) -> bool:
        """Whether a prompt and ``max_new`` more tokens fit beside what is there, if nothing else grows."""
        takes = self.to_admit(prompt, max_new)
        return all(group.pool.can_allocate(count) for group, count in zip(self.groups, takes, strict=True))

    def to_admit(self, prompt: Prompt | Sequence[int], max_new: int) -> list[int]:
        """How many free or evictable blocks of each group a prompt and ``max_new`` more tokens would take now."""
        wanted = self._prompt(prompt)
        if self.stream is None:
            return [group.pool.to_admit(wanted, max_new) for group in self.groups]
        size = self.groups[0].pool.block_size
        most = size * self.stream.blocks(size, self._config)
        kept = replace(wanted, tokens=wanted.tokens[:most])
        rest = min(max_new + len(wanted.tokens), most) - len(kept.tokens)
        return [group.pool.to_admit(kept, rest) for group in self.groups]

    def missing(self, counts: Mapping[int, int]) -> int:
        """How many blocks the group that lacks most has too few for so many more tokens of each of these rows.

        Less than 0 where some are left.
        """
        lacks = []
        for number, group in enumerate(self.groups):
            growing = [(self.rows[row].tables[number], count) for row, count in counts.items()]
            lacks.append(group.pool.needed(growing) - group.pool.free_blocks - group.pool.cached_blocks)
        return max(lacks, default=-sys.maxsize)

    def stats(self) -> dict[str, Any]:
        """Rows, tokens and bytes now; for each group its layers, window, sinks and what :meth:`BlockPool.stats` counts.

        ``gathered_bytes`` are K/V that are in the blocks, too: what attention was given and the next step can add to.
        ``host``: ``blocks`` and ``bytes`` of what was evicted, states included, ``suspended_bytes`` of rows put aside, and
        how many blocks were ``offloaded`` and brought back (``hits``) since the last reset.
        """
        batches = {id(row.state.batch): row.state.batch for row in self.rows if row.state is not None}
        return {
            "rows": len(self.rows),
            "tokens": sum(row.length for row in self.rows),
            "kv_bytes": sum(store.nbytes for store in self._stores.values()),
            "gathered_bytes": sum(group.rectangle.nbytes for group in self.groups),
            "state_bytes": sum(batch.nbytes for batch in batches.values()),
            "checkpoints": len(self._checkpoints),
            "checkpoint_bytes": self._checkpoints.nbytes,
            "host": {
                "blocks": self._host.blocks,
                "bytes": self._host.nbytes,
                "suspended_bytes": sum(suspended.nbytes for suspended in self._suspended),
                **self._host.counts,
            },
            "groups": [
                {"layers": len(group.layers), "window": group.window, "sinks": group.sinks, **group.pool.stats()}
                for group in self.groups
            ],
        }

    def _drops(self, row: Row, count: int) -> bool:
        """Whether a window drops some of a row's tokens while these are forwarded."""
        return self.stream is not None and row.length + count > self.stream.capacity

    def _prompt(self, prompt: Prompt | Sequence[int]) -> Prompt:
        if not isinstance(prompt, Prompt):
            prompt = Prompt(list(prompt))
        return replace(prompt, salt=self._salt) if prompt.salt is None else prompt

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self.rows):
            raise InputError(f"row {row} is not open; the cache has {len(self.rows)} rows")

    def _check_mask(self, mask: Tensor, lengths: Sequence[int], query_length: int) -> None:
        covered = max(lengths) + query_length
        if mask.dim() == 2 and tuple(mask.shape) != (len(lengths), covered):
            cached = {layer: max(lengths) for layer in sorted(self._group_of)}
            raise InputError(
                f"attention_mask is {list(mask.shape)} for input of {[len(lengths), query_length]} after cached lengths "
                f"{cached} (by layer): it must cover cached and new tokens, {[len(lengths), covered]}"
            )
