"""One forward over some rows of a cache: begun with room for all its tokens, then committed or taken back."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from decodekit.cache.attention import Layout
from decodekit.cache.blocks import Copy
from decodekit.cache.gather import Group, Slots
from decodekit.cache.quantization import QuantizedStore
from decodekit.cache.rows import Row, RowBook
from decodekit.cache.states import collect, load, working_copy
from decodekit.cache.storage import FullStore
from decodekit.core.errors import Refused
from decodekit.kernels.paged_attention import KV

if TYPE_CHECKING:
    from decodekit.cache.paged import PagedCache


class Step:
    """A forward of q new tokens in each of R rows, whose lengths may differ.

    As a context manager it commits at the end, and takes everything back after an exception::

        with cache.begin(rows, tokens) as step:
            outputs = model(input_ids, attention_mask=step.attention_mask, position_ids=step.position_ids, ...)

    Attributes:
        rows: those that take part.
        tokens: [R] new tokens of each row; ``None`` where nobody named them.
        lengths: [R] tokens each had before; where rows bring different numbers of tokens, less the pads of the row (so that
            it can be negative): a row's new tokens are the last of its q columns.
        counts: [R] new tokens of each row, q of the longest; ``None`` where nobody named them.
        query_length: q; 0 while it is not known.
        written: layers whose K/V were written.
        touched: layers whose states were asked for.
        explicit: whether it was begun by ``begin``, or by a forward that nobody announced.
        direct: whether attention reads the blocks itself, so that nothing is gathered for it.
        packed: whether the new tokens of all rows lie after each other in one row, without pads.
        read: layers whose blocks were read so.
    """

    def __init__(
        self,
        cache: PagedCache,
        rows: Sequence[Row],
        tokens: Sequence[Sequence[int]] | None,
        *,
        opened: bool = False,
        direct: bool = False,
        packed: bool = False,
    ) -> None:
        self._cache, self.tokens = cache, tokens
        self.rows = list(rows)
        # A row with fewer tokens than the others is padded on the left: as if it had been that much shorter before.
        self.counts = [len(ids) for ids in tokens] if tokens is not None else None
        longest = 0 if packed else max(self.counts or [0])
        pads = [0 if packed else longest - count for count in self.counts or [longest] * len(rows)]
        self.lengths = [row.length - own for row, own in zip(rows, pads, strict=True)]
        self._before = [(row.length, row.state, row.final, len(row.tokens), len(row.past)) for row in rows]
        self.explicit, self.opened, self.direct, self.packed = tokens is not None, opened, direct, packed
        self.read: set[int] = set()
        self._paths: set[str] = set()
        self._layouts: dict[int, Layout] = {}
        self.query_length = 0
        self.written: set[int] = set()
        self.touched: set[int] = set()
        self.asked: set[tuple[int, str]] = set()
        self.last = -1
        self.slots: list[Slots] = []
        self._copies: list[list[list[Copy]]] = []

    @property
    def attention_mask(self) -> Tensor | None:
        """[R, T] int64, T the longest row with its new tokens (in a stream, what a query sees): 1 for tokens, 0 for left pads.

        ``None`` for a model without attention: no pad ever reaches a state, and Mamba takes no mask of cached tokens.
        """
        if not self._cache.groups:
            return None
        lengths = self._cache.shown(self.lengths)
        longest = max(lengths)
        columns = torch.arange(longest + self.query_length)
        starts = torch.tensor([longest - length for length in lengths])
        return (columns >= starts.unsqueeze(1)).long().to(self._cache.device)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the tokens that the model is given: [R, q], packed [1, N]."""
        return (1, sum(self.counts or ())) if self.packed else (len(self.rows), self.query_length)

    @property
    def position_ids(self) -> Tensor:
        """Of :attr:`shape`, int64: a row's tokens are numbered from 0, whatever its neighbours; in a stream, within it."""
        if self.packed:
            return torch.cat(self.places()).unsqueeze(0).to(self._cache.device)
        positions = (torch.tensor(self.lengths).unsqueeze(1) + torch.arange(self.query_length)).clamp_(min=0)
        stream = self._cache.stream
        return (positions if stream is None else stream.positions(positions)).to(self._cache.device)

    @property
    def padded(self) -> bool:
        """Whether some row is shorter than another, with its new tokens."""
        return len(set(self.lengths)) > 1

    def layout(self, layer_idx: int) -> Layout:
        """Where the rows' tokens lie in this layer, for attention that reads blocks; one for all layers of a group."""
        number = self._cache.group_of(layer_idx)
        if number not in self._layouts:
            group = self._cache.groups[number]
            width = self.query_length
            counts = torch.tensor(self.counts if self.packed else [width] * len(self.rows))
            self._layouts[number] = Layout(
                block_table=group.block_table([row.tables[number] for row in self.rows]),
                lengths=torch.tensor(self.lengths) + counts,
                query_start=torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
                block_size=group.pool.block_size,
                window=group.window,
            )
        return self._layouts[number]

    def kv(self, layer_idx: int) -> tuple[KV, KV]:
        """This layer's K/V by slot, [S, H, D] and [S, H, Dv], the new tokens' included.

        Raises:
            Refused: attention cannot read them where they are stored.
        """
        self.read.add(layer_idx)
        store = self._cache.store(layer_idx)
        if not isinstance(store, FullStore | QuantizedStore):
            raise Refused(f"a {type(store).__name__} has no K/V that attention can read in place; gather them")
        return store.keys, store.values

    @property
    def paths(self) -> set[str]:
        """What attended to the blocks, see :attr:`Layout.path`."""
        return self._paths | {layout.path for layout in self._layouts.values() if layout.path is not None}

    def replayed(self, paths: set[str]) -> None:
        """A captured forward has written and read all layers.

        Args:
            paths: what attended to the blocks, see :attr:`Layout.path`.
        """
        layers = {layer for group in self._cache.groups for layer in group.layers}
        self.written |= layers
        self.read |= layers
        self._paths = paths

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._cache.abort()
            return
        try:
            self._cache.commit()
        except BaseException:
            self._cache.abort()
            raise

    def reserve(self, groups: Sequence[Group], query_length: int) -> list[list[Copy]]:
        """Make room for ``query_length`` more tokens of each row; :meth:`undo` takes back what was made.

        Returns:
            what the layers of each group have to copy.

        Raises:
            OutOfBlocks: a group has no room for all.
        """
        counts = self.counts or [query_length] * len(self.rows)
        for number, group in enumerate(groups):
            tables = [row.tables[number] for row in self.rows]
            if len(set(counts)) == 1:
                self._copies.append(group.pool.append_together(tables, query_length))
            else:
                self._copies.append([])
                for table, count in zip(tables, counts, strict=True):
                    self._copies[-1].append(group.pool.append(table, count))
            if self.packed:
                self.slots.append(group.new_slots(tables, self.places()))
            else:
                self.slots.append(group.slots(tables, self.lengths, query_length, counts))
            if self.direct:
                group.rectangle.clear()  # it gets none of this step's columns
        self.query_length = query_length
        return [[copy for copied in per_row for copy in copied] for per_row in self._copies]

    def places(self) -> list[Tensor]:
        """The places of each row's new tokens in it."""
        return [
            torch.arange(length, length + count) for length, count in zip(self.lengths, self.counts or (), strict=True)
        ]

    def load(self, layers: Sequence[object]) -> None:
        """Give the recurrent layers a copy of these rows' states."""
        load(layers, working_copy([row.state for row in self.rows]))

    def finish(self, book: RowBook, layers: Sequence[object], *, recurrent: bool) -> None:
        """Make the step part of the rows' history."""
        states = collect(layers, len(self.rows)) if recurrent else None
        tokens = self.tokens if self.tokens is not None else [[0] * self.query_length] * len(self.rows)
        book.advance(self.rows, tokens, states)

    def undo(self, groups: Sequence[Group], layers: Sequence[object]) -> None:
        """Everything as it was before, also when :meth:`reserve` or :meth:`finish` stopped halfway."""
        for row, (length, state, final, tokens, past) in zip(self.rows, self._before, strict=True):
            row.length, row.state, row.final = length, state, final
            del row.tokens[tokens:], row.past[past:]
        load(layers, None)
        for group in groups:
            group.rectangle.clear()
        for number, (group, per_row) in enumerate(zip(groups, self._copies, strict=False)):
            for row, before, copied in zip(self.rows, self._before, per_row, strict=False):
                group.pool.retract(row.tables[number], before[0], copied)
        self._copies, self.slots, self.query_length = [], [], 0
