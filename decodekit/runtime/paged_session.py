"""A model over a paged cache: rows of any lengths and branches come, are fed, fork, step aside and leave at any time."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from decodekit.cache.attention import check_config
from decodekit.cache.paged import PagedCache
from decodekit.cache.preempt import Suspended
from decodekit.cache.prefix import Prompt
from decodekit.cache.runs import Frame, Run
from decodekit.core.errors import Refused
from decodekit.core.heads import UnreadOutputs
from decodekit.core.shared import PerModel
from decodekit.core.types import BranchOutputs
from decodekit.kernels import triton_runs
from decodekit.runtime.forward import FEW, RaggedForward
from decodekit.runtime.fused import fused
from decodekit.runtime.session import Ids, Session
from decodekit.runtime.shelf import give_back

_PADS = (32, 1024)
"""Pads that cost as much as another forward, on a CPU and on a GPU."""


class _Masks:
    """What is known of the masks that transformers makes for a model.

    Attributes:
        causal: attention has seen some for several tokens a row, and they are as it has them; packed rows have none.
    """

    causal = False


_MASKS: PerModel[_Masks] = PerModel(_Masks)


class Key(NamedTuple):
    """Which branch of which row owns a place in the cache."""

    branch: str
    row: int


@dataclass(eq=False)
class _Filling:
    """A prompt that is not through yet, computed once for all who have it.

    Attributes:
        rest: its tokens that are to be forwarded.
        keys: whose it is; the first has the place in the cache.
        hidden: kept layers over what was forwarded; ``None`` where nobody reads them.
    """

    rest: list[int]
    keys: list[Key]
    hidden: dict[int, Tensor] | None


class _Fed(NamedTuple):
    """What a forward takes of prompts.

    Attributes:
        chosen: the prompts, and how many of their tokens.
        tokens: a place in the cache, these tokens.
        last: a place, 1 where its prompt is through with them, else 0.
        hidden: a place, where its kept layers go, if anybody reads them.
    """

    chosen: list[tuple[_Filling, int]]
    tokens: dict[int, list[int]]
    last: dict[int, int]
    hidden: dict[int, dict[int, Tensor]]


@dataclass(frozen=True)
class Aside:
    """A row that was put aside; :meth:`PagedSession.resume` brings it back.

    Attributes:
        parts: a branch, its K/V and states.
        again: a branch, tokens to forward before its next ones.
    """

    parts: Mapping[str, Suspended]
    again: Mapping[str, list[int]] = field(default_factory=dict)


class PagedSession(Session):
    """Branches over one paged cache: rows and branches in one forward, equal prompts that come together prefilled once.

    Args:
        model: the model.
        cache: its cache; rows that are in it are given up.
        layers: hidden layers of the ``main`` branch to keep.
        rollbacks: rows will be rolled back: every step is followed by :meth:`rollback`.

    Attributes:
        rollbacks: the same; may change until the first row is fed.
    """

    def __init__(self, model: Any, cache: PagedCache, *, layers: tuple[int, ...] = (), rollbacks: bool = False) -> None:
        self._cache = cache
        super().__init__(model, layers)
        self._reads = self._reads_blocks()
        self._masks = _MASKS.of(model)
        # Rows that share blocks with others: gathering would copy these for each of them.
        self._sharing: set[int] = set()
        # Which (branch, row) each row of the cache belongs to.
        self._order: list[Key] = []
        # The branches of each row, and all their names in the order in which they came.
        self._branches: dict[int, tuple[str, ...]] = {}
        self._names: dict[str, None] = {}
        self._expected: dict[Key, Ids] = {}
        self._reads_prompt: set[int] = set()
        self._filling: list[_Filling] = []
        self._first: dict[Key, BranchOutputs] = {}
        # Tokens that a rollback went back over, to be forwarded before the next ones.
        self._again: dict[Key, list[int]] = {}
        # What an interrupted call may have left.
        cache.abort()
        cache.release(range(len(cache.rows)))
        cache.deactivate_past_recording()
        self._recording, self.rollbacks = False, rollbacks

    @property
    @override
    def cache(self) -> PagedCache:
        return self._cache

    @override
    def keep_layers(self, layers: tuple[int, ...]) -> None:
        super().keep_layers(layers)
        self._forward = RaggedForward(self.model, self._cache, hidden_states=bool(layers))

    def record(self, rollbacks: bool) -> None:
        """Whether steps from now on are followed by :meth:`rollback`."""
        if rollbacks != self._recording:
            change = self._cache.activate_past_recording if rollbacks else self._cache.deactivate_past_recording
            change()
            self._recording = rollbacks

    def expect(self, row: int, prompts: Mapping[str, Ids], *, keep_prompt: bool = False) -> None:
        """A row more: the prompt of each of its branches.

        Args:
            row: its number.
            prompts: a branch, its prompt without pads.
            keep_prompt: keep the hidden layers of its main branch over the whole prompt, as ``prompt_hidden``.
        """
        self._branches[row] = tuple(prompts)
        self._names |= dict.fromkeys(prompts)
        self._expected |= {Key(name, row): tuple(prompt) for name, prompt in prompts.items()}
        if keep_prompt:
            self._reads_prompt.add(row)

    @override
    def branches(self, row: int) -> tuple[str, ...]:
        return self._branches.get(row, ())

    def open(self, rows: Sequence[int]) -> None:
        """Give expected rows a place in the cache, with as much of their prompts as the prefix cache has."""
        keys = [key for key in self._keys(rows) if key in self._expected]
        sharing: dict[tuple[Ids, bool], list[Key]] = {}
        for key in keys:
            sharing.setdefault((self._expected[key], key.row in self._reads_prompt), []).append(key)
        # A prompt whose hidden states are read is computed whole: a key of its own shares no block with others.
        opened = [Prompt(prompt, extra=object()) if whole else Prompt(prompt) for prompt, whole in sharing]
        places = self._cache.open(opened)
        for place, ((prompt, whole), own) in zip(places, sharing.items(), strict=True):
            rest = list(prompt[self._cache.rows[place].length :])
            self._order.append(own[0])
            self.forwarded[own[0].row] += len(rest)
            self._filling.append(_Filling(rest, own, {} if whole else None))
        for key in keys:
            del self._expected[key]

    @override
    def feed(self, rows: Sequence[int], budget: int | None = None) -> set[int]:
        fed = self._begin_feed(rows, budget)
        return self._end_feed(rows, fed, self._advance(fed.tokens, fed.last, fed.hidden))

    def _begin_feed(self, rows: Sequence[int], budget: int | None) -> _Fed:
        """Which tokens of the prompts of rows, opened if they are not yet, are to be forwarded."""
        if self.rollbacks:
            self.record(True)  # not before: only what has begun is closed
        self.open(rows)
        place_of = self._places()
        chosen = self._chunks(rows, budget)
        places = [place_of[own.keys[0]] for own, _ in chosen]
        return _Fed(
            chosen,
            {place: own.rest[:count] for place, (own, count) in zip(places, chosen, strict=True)},
            {place: int(count == len(own.rest)) for place, (own, count) in zip(places, chosen, strict=True)},
            {place: own.hidden for place, (own, _) in zip(places, chosen, strict=True) if own.hidden is not None},
        )

    def _end_feed(self, rows: Sequence[int], fed: _Fed, outputs: Sequence[BranchOutputs]) -> set[int]:
        """These tokens were forwarded, with the outputs of the prompts that are through; those of the rows whose are."""
        following = iter(outputs)
        for (own, count), through in zip(fed.chosen, fed.last.values(), strict=True):
            del own.rest[:count]
            if through:
                self._through(own, next(following))
        waiting = {key.row for own in self._filling for key in own.keys}
        return set(rows) - waiting

    def _through(self, own: _Filling, outputs: BranchOutputs) -> None:
        """A prompt was forwarded: those who share it become forks."""
        self._filling.remove(own)
        self._first |= dict.fromkeys(own.keys, outputs)
        if own.hidden is not None:
            self.prompt_hidden |= {key.row: own.hidden for key in own.keys if key.branch == "main"}
        if len(own.keys) > 1:
            place = self._order.index(own.keys[0])
            self._cache.fork([*range(len(self._order)), *[place] * (len(own.keys) - 1)])
            self._order += own.keys[1:]
            self._sharing |= {key.row for key in own.keys}

    def _chunks(self, rows: Sequence[int], budget: int | None) -> list[tuple[_Filling, int]]:
        """Which prompts to go on with, and by how many tokens."""
        rank = {row: place for place, row in enumerate(rows)}
        asked = [own for own in self._filling if any(key.row in rank for key in own.keys)]
        if budget is None:
            return [(own, len(own.rest)) for own in asked]
        chunks = []
        for own in sorted(asked, key=lambda own: min(rank.get(key.row, len(rank)) for key in own.keys)):
            if budget < 1:
                break
            # A model that loses its states between forwards of several tokens is given all at once.
            count = min(len(own.rest), budget) if self._cache.continues else len(own.rest)
            chunks.append((own, count))
            budget -= count
        return chunks

    @override
    def first(self, rows: Sequence[int]) -> dict[str, BranchOutputs]:
        own: dict[str, list[BranchOutputs]] = {}
        for key in self._keys(rows):
            own.setdefault(key.branch, []).append(self._first.pop(key))
        return {name: BranchOutputs.concatenate(parts) for name, parts in own.items()}

    @override
    def step(self, rows: Sequence[int], tokens: Sequence[Ids], last: Ids) -> dict[str, BranchOutputs]:
        keys = self._keys(rows)
        if not keys:
            return {}
        again = self._next(keys, dict(zip(rows, tokens, strict=True)))
        wanted = dict(zip(rows, last, strict=True))
        if all(len(ids) == 1 for ids in again.values()):
            outputs = self._keep(self._run(list(again), list(again.values())), "main")
        else:
            lasts = {place: wanted[key.row] for place, key in zip(again, keys, strict=True)}
            outputs = BranchOutputs.concatenate(self._advance(again, lasts, {}))
        return self._by_branch(keys, wanted, outputs)

    @override
    def advance(
        self, rows: Sequence[int], tokens: Sequence[Ids], last: Ids, feeding: Sequence[int], budget: int | None
    ) -> tuple[dict[str, BranchOutputs], set[int]]:
        keys = self._keys(rows)
        if not (keys and feeding and self._packs()):
            return super().advance(rows, tokens, last, feeding, budget)
        fed = self._begin_feed(feeding, budget)
        again = self._next(keys, dict(zip(rows, tokens, strict=True)))
        wanted = dict(zip(rows, last, strict=True))
        lasts = {place: wanted[key.row] for place, key in zip(again, keys, strict=True)}
        outputs = self._advance({**again, **fed.tokens}, {**lasts, **fed.last}, fed.hidden)
        stepped = self._by_branch(keys, wanted, BranchOutputs.concatenate(outputs[: len(keys)]))
        return stepped, self._end_feed(feeding, fed, outputs[len(keys) :])

    def _next(self, keys: Sequence[Key], fed: Mapping[int, Ids]) -> dict[int, list[int]]:
        """The tokens that the places of keys forward next, of a row and what is to be forwarded before: counted as such."""
        place_of = self._places()
        again = {place_of[key]: [*self._again.pop(key, ()), *fed[key.row]] for key in keys}
        for key in keys:
            self.forwarded[key.row] += len(again[place_of[key]])
        return again

    @staticmethod
    def _by_branch(keys: Sequence[Key], wanted: Mapping[int, int], outputs: BranchOutputs) -> dict[str, BranchOutputs]:
        counts: dict[str, int] = {}
        for key in keys:
            counts[key.branch] = counts.get(key.branch, 0) + wanted[key.row]
        parts, start = {}, 0
        for name, count in counts.items():
            parts[name] = outputs.span(start, start + count)
            start += count
        return parts

    @override
    def rollback(self, drop: Mapping[int, int]) -> None:
        counts = [drop.get(key.row, 0) for key in self._order]
        known = [[*row.tokens] if count else [] for row, count in zip(self._cache.rows, counts, strict=True)]
        for key, ids, count, again in zip(self._order, known, counts, self._cache.rollback(counts), strict=True):
            if again:
                # Its states went back further than was asked for: these are forwarded with the next tokens.
                end = len(ids) - count
                self._again[key] = [*ids[end - again : end], *self._again.get(key, ())]

    @override
    def rearrange(self, forks: Mapping[int, int], gone: Collection[int]) -> None:
        if not forks and not gone:
            return
        place_of = self._places()
        source = {key: key for key in self._order if key.row not in gone}
        source |= self._inherit(gone)
        source |= {Key(name, row): Key(name, parent) for row, parent in forks.items() for name in self.branches(parent)}
        self._cache.fork([place_of[parent] for parent in source.values()])
        self._order = list(source)
        self._again = {key: self._again[parent] for key, parent in source.items() if parent in self._again}
        self._branches |= {row: self.branches(parent) for row, parent in forks.items()}
        for row in set(gone) - forks.keys():
            self._forget(row)
        if len(forks) > len(set(forks.values())):
            self._sharing |= {*forks, *forks.values()} - set(gone)

    def _inherit(self, gone: Collection[int]) -> dict[Key, Key]:
        """Who takes over prompts that are half forwarded for rows that are over: a key, the one before it."""
        heirs = {}
        for own in [*self._filling]:
            before, own.keys = own.keys[0], [key for key in own.keys if key.row not in gone]
            if not own.keys:
                self._filling.remove(own)
            elif own.keys[0] != before:
                heirs[own.keys[0]] = before
        return heirs

    def _forget(self, row: int) -> None:
        for name in self._branches.pop(row, ()):
            self._expected.pop(Key(name, row), None)
            self._first.pop(Key(name, row), None)
        self._reads_prompt.discard(row)
        self._sharing.discard(row)
        self.prompt_hidden.pop(row, None)

    def suspend(self, row: int) -> Aside:
        """Put a row aside whose prompts are through: its K/V and states go to the host, its blocks to others."""
        keys = [Key(name, row) for name in self.branches(row)]
        parts = {}
        for key in keys:
            place = self._order.index(key)
            parts[key.branch] = self._cache.suspend(place)
            del self._order[place]
        again = {key.branch: self._again.pop(key) for key in keys if key in self._again}
        self._forget(row)
        return Aside(parts, again)

    def resume(self, row: int, aside: Aside) -> bool:
        """Bring a row back, bit for bit as it was; ``False`` where there is no room for it, and nothing changed."""
        parts = aside.parts.values()
        for group, *contents in zip(self._cache.groups, *(part.contents for part in parts), strict=True):
            if not group.pool.can_allocate(sum(map(len, contents))):
                return False
        for part in parts:
            self._cache.resume(part)
        self._order += [Key(name, row) for name in aside.parts]
        if aside.parts:  # a row that has no branch here stays unknown
            self._branches[row] = tuple(aside.parts)
        self._again |= {Key(name, row): [*ids] for name, ids in aside.again.items()}
        return True

    def missing(self, rows: Sequence[int], feeding: Sequence[int] = (), budget: int = 0) -> int:
        """How many blocks are missing for one more token of ``rows`` and the next ``budget`` of those that are fed.

        Less than 0 where some are left.
        """
        place_of = self._places()
        counts = {place_of[key]: 1 + len(self._again.get(key, ())) for key in self._keys(rows)}
        counts |= {place_of[own.keys[0]]: count for own, count in self._chunks(feeding, budget)}
        return self._cache.missing(counts)

    def blocks(self, rows: Sequence[int]) -> list[int]:
        """How many different blocks of each cache group these rows name together."""
        places = self._places()
        held = [self._cache.rows[places[key]] for key in self._keys(rows) if key in places]
        return [
            len({block for row in held for block in row.tables[number].blocks if block is not None})
            for number in range(len(self._cache.groups))
        ]

    def clear(self) -> None:
        """Let go of all rows, also after an interrupt left them half changed."""
        self._cache.abort()
        self._cache.release(range(len(self._cache.rows)))
        for kept in (self._order, self._branches, self._expected, self._filling, self._first, self._again):
            kept.clear()
        self._reads_prompt.clear()
        self._sharing.clear()
        self.prompt_hidden.clear()

    @override
    @contextmanager
    def optimized(self) -> Iterator[None]:
        with super().optimized(), fused(self.model):
            yield

    def why_no_run(self) -> str | None:
        """Why its rows cannot take many steps at once; ``None``: they can."""
        if len({own.device for own in self.model.parameters()}) > 1:
            return "weights on several devices"
        reads = self._reads and triton_runs(self.model.device)
        return self._cache.why_no_run() if reads else "rows that are gathered"

    def lengths(self, rows: Sequence[int]) -> list[int]:
        """Tokens that each branch of these rows has in the cache."""
        place_of = self._places()
        return [self._cache.rows[place_of[key]].length for key in self._keys(rows)]

    @property
    def keeps_states(self) -> bool:
        """Whether rows have states, so that a run of theirs must not go further than they do."""
        return self._cache.keeps_states

    def is_settled(self, rows: Sequence[int]) -> bool:
        """Whether these rows do not go back now, and their next tokens are all that is to be forwarded for them."""
        return not self._recording and not any(key in self._again for key in self._keys(rows))

    def begin_run(self, rows: Sequence[int], tokens: Ids, steps: int) -> Run:
        """Begin many steps of one token each of rows, [R], which have the same branches, with the first token of each.

        Raises:
            OutOfBlocks: there is no room for all of it; nothing was taken.
        """
        place_of, fed = self._places(), dict(zip(rows, tokens, strict=True))
        keys = self._keys(rows)
        return self._cache.begin_run([place_of[key] for key in keys], [fed[key.row] for key in keys], steps)

    def framed(self, frame: Frame) -> BranchOutputs:
        """The outputs of the tokens in a frame, of all branches."""
        if self._readout is None or not self._head_checked or not self._forward.headless:
            return self._keep(self._forward.framed(frame), "main")
        raw = self._forward.framed(frame, head=False)
        hidden = {layer: raw.hidden_states[layer].flatten(0, 1) for layer in self.layers}
        return UnreadOutputs(raw.hidden_states[-1].flatten(0, 1), hidden, self._readout)

    def run_branches(self, rows: Sequence[int]) -> tuple[str, ...]:
        """The branches of a run of these rows, in the order in which its frame has them, each with all rows."""
        return tuple(dict.fromkeys(key.branch for key in self._keys(rows)))

    def end_run(self, run: Run, tokens: Mapping[int, Ids]) -> None:
        """End a run: a row, the tokens that it forwarded and keeps."""
        owners = [key.row for key in self._keys([*tokens])]
        for row in owners:
            self.forwarded[row] += len(tokens[row])
        kept = run.finish([tokens[row] for row in owners])
        for key, keeps in zip(self._keys([*tokens]), kept, strict=True):
            if not keeps and tokens[key.row]:
                self._again[key] = [*tokens[key.row]]

    @override
    def close(self) -> None:
        self.clear()
        self.record(False)
        give_back(self.model, self._cache)

    def _places(self) -> dict[Key, int]:
        return {key: place for place, key in enumerate(self._order)}

    def _keys(self, rows: Sequence[int]) -> list[Key]:
        """The places of these rows: all of one branch, then those of the next."""
        if len(self._names) == 1:
            [name] = self._names
            return [Key(name, row) for row in rows if row in self._branches]
        return [Key(name, row) for name in self._names for row in rows if name in self.branches(row)]

    def _in_place(self, longest: int) -> bool:
        """Whether attention reads the blocks where they are, of rows with at most so many new tokens."""
        on_gpu = triton_runs(self.model.device)
        if self._cache.quantization is not None:
            # With many queries it costs less to dequantize the blocks once for all of them.
            return self._reads and on_gpu and longest <= FEW
        return self._reads and bool(on_gpu or self._sharing)

    def _packs(self) -> bool:
        """Whether rows with different numbers of new tokens are forwarded without pads."""
        alone = self._cache.quantization is not None or self._cache.keeps_states
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

    def _advance(
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
            self._check_head(outputs)
            return outputs, [place * max(counts) for place in places], [place * width for place in places]
        ends = [*itertools.accumulate(counts)]
        kept = torch.tensor(
            [place for end, count in zip(ends, wanted, strict=True) for place in range(end - count, end)],
            dtype=torch.long,
            device=self.model.device,
        )
        try:
            raw = self._forward.packed(group, tokens, kept)
        except Refused:
            self._reads = False
            return None
        outputs = self._keep(raw, "main", kept=kept)
        if wanted[-1]:
            self._check_head(outputs)
        return outputs, ends, [*itertools.accumulate(wanted)]

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
