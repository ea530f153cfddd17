"""A model over a paged cache: rows of any lengths and branches come, are fed, fork, step aside and leave at any time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import override

from decodekit.cache.paged import PagedCache
from decodekit.cache.preempt import Suspended
from decodekit.cache.prefix import Prompt
from decodekit.cache.runs import Run
from decodekit.core.types import BranchOutputs
from decodekit.runtime.places import PlacedSession
from decodekit.runtime.session import Ids
from decodekit.runtime.shelf import give_back


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


class PagedSession(PlacedSession):
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
        super().__init__(model, cache, layers)
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
        return self._end_feed(rows, fed, self._forward_all(fed.tokens, fed.last, fed.hidden))

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
        lasts = {place: wanted[key.row] for place, key in zip(again, keys, strict=True)}
        if (outputs := self._replay(again, lasts)) is None:
            if all(len(ids) == 1 for ids in again.values()):
                outputs = self._keep(self._run(list(again), list(again.values())), "main")
            else:
                outputs = BranchOutputs.concatenate(self._forward_all(again, lasts, {}))
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
        outputs = self._forward_all({**again, **fed.tokens}, {**lasts, **fed.last}, fed.hidden)
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

    def lengths(self, rows: Sequence[int]) -> list[int]:
        """Tokens that each branch of these rows has in the cache."""
        place_of = self._places()
        return [self._cache.rows[place_of[key]].length for key in self._keys(rows)]

    def is_settled(self, rows: Sequence[int]) -> bool:
        """Whether these rows do not go back now, and their next tokens are all that is to be forwarded for them."""
        returns = self._recording and self._cache.keeps_states
        return not returns and not any(key in self._again for key in self._keys(rows))

    def begin_run(self, rows: Sequence[int], tokens: Ids, steps: int) -> Run:
        """Begin many steps of one token each of rows, [R], which have the same branches, with the first token of each.

        Raises:
            OutOfBlocks: there is no room for all of it; nothing was taken.
        """
        place_of, fed = self._places(), dict(zip(rows, tokens, strict=True))
        keys = self._keys(rows)
        return self._cache.begin_run([place_of[key] for key in keys], [fed[key.row] for key in keys], steps)

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
        if self._recording:
            self.rollback({})

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
