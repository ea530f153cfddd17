"""An automaton as a compiled constraint: masks over the tokens of a vocabulary, kept by state."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import takewhile
from threading import RLock
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decodekit.core.constraint import CompiledConstraint, ConstraintState, mask_words
from decodekit.core.errors import InputError, RowError
from decodekit.core.vocabulary import Vocabulary
from decodekit.fsm.automaton import DEAD, Automaton, Dfa
from decodekit.fsm.trie import Ints, TokenTrie

_KEPT_BYTES = 64 * 2**20
_MOST_FORCED = 512
_NO_LIMIT = 1 << 60


class Place(NamedTuple):
    """A state of the automaton, and whether the output begins here. ``DEAD`` stands for the end, after an EOS."""

    state: int
    first: bool


class CompiledAutomaton(CompiledConstraint):
    """Exact masks for the language of an automaton; safe to use from several threads.

    Raises:
        InputError: no text belongs to the language.
    """

    counts_exactly = True

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        first, trie = _tries(vocabulary)
        self._dfa = Dfa(automaton, trie.spelt)
        self._others = trie.merged(self._dfa.byte_class)
        self._first = self._others if first is trie else first.merged(self._dfa.byte_class)
        self._lock = RLock()
        self._longest, self._spells_all = trie.longest, trie.spells_all
        self._eos = np.zeros(vocabulary.width, dtype=bool)
        self._eos[[token for token in vocabulary.eos_ids if token < vocabulary.width]] = True
        self._masks: dict[Place, Tensor] = {}
        self._most_masks = _KEPT_BYTES // (4 * mask_words(vocabulary.width))
        self._reached: dict[Place, list[Place]] = {}
        self._forced: dict[Place, list[int]] = {}
        self._distance: dict[Place, int] = {}
        self._straight: dict[int, bool] = {}
        self._roomy: dict[Place, int] = {}  # the limit from which on every legal token leaves time to end
        start = self.start()._places[0]
        if not (self._dfa.is_live(start.state) and self._can_end(start)):
            raise InputError("no text that the tokenizer can spell satisfies this constraint; relax one of its parts")

    def start(self) -> FsmState:
        """A fresh state before the first token."""
        return FsmState(self, [Place(Dfa.start, self.vocabulary.drops_first_space)])

    @contextmanager
    def _exploring(self) -> Iterator[None]:
        """Only one thread at a time adds states, and only so many at once."""
        with self._lock:
            self._dfa.refill()
            yield

    def accepts(self, place: Place) -> bool:
        """Whether the text may end here."""
        return place.state == DEAD or self._dfa.accepting[place.state]

    def mask(self, place: Place) -> Tensor:
        """[ceil(V/32)] int32, shared: the legal tokens."""
        if (mask := self._masks.get(place)) is None:
            with self._exploring():
                after = self._after_each(place)
                if not self._spells_all:
                    after = self._kept(after, lambda state: self._can_end(Place(state, False)))
                legal = after != DEAD
                if self.accepts(place):
                    legal |= self._eos
                mask = _packed(legal)
                while len(self._masks) >= self._most_masks:
                    del self._masks[next(iter(self._masks))]
                self._masks[place] = mask
        return mask

    def mask_within(self, place: Place, limit: int) -> Tensor:
        """[ceil(V/32)] int32: the legal tokens after which the text can end within ``limit`` tokens, these included."""
        if limit >= self._roomy.get(place, _NO_LIMIT):
            return self.mask(place)
        with self._exploring():
            after = self._after_each(place)
            enough = {state: self.enough(Place(state, False), limit - 1) for state in _distinct(after)}
            legal = self._kept(after, lambda state: enough[state] is not None) != DEAD
            if None not in enough.values():
                self._roomy[place] = 1 + max((each or 0 for each in enough.values()), default=0)
            return _packed(legal | self._eos if self.accepts(place) else legal)

    def after(self, place: Place, token: int) -> Place | None:
        """The place after a token; ``None`` if it is not legal."""
        if not 0 <= token < self.vocabulary.width:
            return None
        if self._eos[token]:
            return Place(DEAD, False) if self.accepts(place) else None
        text = (self.vocabulary.first_tokens if place.first else self.vocabulary.tokens)[token]
        if text is None:
            return None
        with self._exploring():
            after = Place(self._read(place.state, text), False)
            return after if self._dfa.is_live(after.state) and self._can_end(after) else None

    def enough(self, place: Place, limit: int) -> int | None:
        """Some number of tokens, at most ``limit``, within which the text can end; ``None`` if there is none.

        Where every byte is a token, bytes will do, which are counted sooner than the fewest tokens.
        """
        least = self._dfa.least[place.state]
        return least if least <= limit and self._is_straight(place.state) else self.distance(place, limit)

    def _is_straight(self, state: int) -> bool:
        """Whether as many tokens as there are bytes at least until the text may end are known to end it."""
        if not (self._spells_all and self._dfa.trim):
            return False
        passed = list[int]()
        while (straight := self._straight.get(state)) is None:
            passed.append(state)
            ahead = (self._dfa.step_class(state, column) for column in range(self._dfa.table.shape[1]))
            nearer = (own for own in ahead if own != DEAD and self._dfa.least[own] < self._dfa.least[state])
            if self._dfa.accepting[state] or (after := next(nearer, None)) is None:
                straight = self._dfa.accepting[state]
                break
            state = after
        self._straight |= dict.fromkeys(passed, straight)
        return straight

    def distance(self, place: Place, limit: int) -> int | None:
        """The fewest tokens after which the text may end; ``None`` if more than ``limit``.

        A* over the places that tokens lead to, guided by the bytes that the rest takes at least.
        """
        if (known := self._distance.get(place)) is not None:
            return known if known <= limit else None
        with self._exploring():
            best = {place: 0}
            queue = [(self._at_least(place), 0, place)] if self._at_least(place) <= limit else []
            while queue:
                _, taken, here = heapq.heappop(queue)
                taken = -taken  # of equally promising places, the farthest first
                if self.accepts(here):
                    self._distance[place] = taken
                    return taken
                for ahead in self._next_places(here) if taken == best[here] else ():
                    estimate = taken + 1 + self._at_least(ahead)
                    if estimate <= limit and taken + 1 < best.get(ahead, limit + 1):
                        best[ahead] = taken + 1
                        heapq.heappush(queue, (estimate, -taken - 1, ahead))
            if limit == _NO_LIMIT:
                self._distance[place] = _NO_LIMIT + 1
            return None

    def forced_tokens(self, place: Place) -> list[int]:
        """The tokens that every legal text goes on with, if it is cut as the tokenizer cuts it."""
        if (forced := self._forced.get(place)) is None:
            with self._exploring():
                forced = self._forced[place] = self._forced_tokens(place)
        return list(forced)

    def _forced_tokens(self, place: Place) -> list[int]:
        forced = bytearray()
        state = place.state
        while len(forced) < _MOST_FORCED and (byte := self._only_byte(state)) is not None:
            forced.append(byte)
            state = self._dfa.step(state, byte)
        if not forced or forced[0] & 0xC0 == 0x80:
            return []  # nothing, or the rest of a character, which no text can be cut into
        try:
            text = forced.decode(errors="ignore")  # the last character may be forced in part only
            tokens = list(self.vocabulary.encode(text, first=place.first))
            state = self._read(place.state, text.encode())
            for cut in self._crossed(text, state):
                before = self.vocabulary.encode(text[:cut], first=place.first)
                same = (ours == theirs for ours, theirs in zip(tokens, before, strict=False))
                tokens = tokens[: sum(takewhile(bool, same))]
        except InputError:
            return []
        return tokens

    def _crossed(self, text: str, state: int) -> list[int]:
        """Where a forced text may be cut otherwise: where a token may begin that goes on beyond its end, at ``state``."""
        trie = _tries(self.vocabulary)[1]
        # Tokenizers split white space by what stands behind it, without a token that shows it.
        found = [len(text.rstrip())]
        for cut in range(found[0]):
            rest = text[cut:].encode()
            starts = [rest[skipped:] for skipped in range(len(text[cut].encode()))]
            nodes = [node for start in starts if (node := trie.find(start)) is not None]
            if any(self._kept(trie.walk(self._dfa, state, node), self._dfa.is_live).any() for node in nodes):
                found.append(cut)
        return found

    def _only_byte(self, state: int) -> int | None:
        """The byte that every text must go on with from here; ``None`` if there are several, or none is needed."""
        if state == DEAD or self._dfa.accepting[state]:
            return None
        found = None
        for column, byte in enumerate(self._dfa.only_bytes):
            if self._dfa.is_live(self._dfa.step_class(state, column)):
                if found is not None or byte is None:
                    return None
                found = byte
        return found

    def _next_places(self, place: Place) -> list[Place]:
        """The places that one token leads to."""
        if (places := self._reached.get(place)) is None:
            states = self._trie(place).reached(self._dfa, place.state)
            places = [Place(state, False) for state in states if self._dfa.trim or self._dfa.is_live(state)]
            self._reached[place] = places
        return places

    def _after_each(self, place: Place) -> Ints:
        """[V] the state after each token; ``DEAD`` for those that are not legal, EOS among them."""
        after = self._trie(place).walk(self._dfa, place.state)
        return after if self._dfa.trim else self._kept(after, self._dfa.is_live)

    def _trie(self, place: Place) -> TokenTrie:
        return self._first if place.first else self._others

    def _kept(self, states: Ints, keeps: Callable[[int], bool]) -> Ints:
        """``states`` with ``DEAD`` for those that are not to be kept."""
        kept = np.zeros(len(self._dfa), dtype=bool)
        for state in _distinct(states):
            kept[state] = keeps(state)
        return np.where(kept[states], states, DEAD)

    def _can_end(self, place: Place) -> bool:
        """Whether the tokens can spell a completion of a live state: any can, if each byte is a token."""
        return self._spells_all or self.distance(place, _NO_LIMIT) is not None

    def _read(self, state: int, text: bytes) -> int:
        for byte in text:
            state = self._dfa.step(state, byte)
        return state

    def _at_least(self, place: Place) -> int:
        """A lower bound of the tokens until the text may end."""
        return -(-self._dfa.least[place.state] // self._longest)


class FsmState(ConstraintState):
    """One row's place in an automaton: the places after each token so far."""

    def __init__(self, compiled: CompiledAutomaton, places: list[Place]) -> None:
        self._compiled = compiled
        self._places = places

    def mask(self, out: Tensor, row: int) -> None:
        out[row] = self._compiled.mask(self._places[-1])

    def mask_within(self, out: Tensor, row: int, limit: int) -> None:
        out[row] = self._compiled.mask_within(self._places[-1], limit)

    def advance(self, token: int) -> None:
        if (place := self._compiled.after(self._places[-1], token)) is None:
            raise RowError(f"token {token} is not legal after {len(self._places) - 1} tokens of this constraint")
        self._places.append(place)

    def rollback(self, count: int) -> None:
        if not 0 <= count < len(self._places):
            raise InputError(f"cannot take back {count} tokens of {len(self._places) - 1}")
        del self._places[len(self._places) - count :]

    def fork(self) -> Self:
        return type(self)(self._compiled, self._places.copy())

    def forced_tokens(self) -> list[int]:
        return self._compiled.forced_tokens(self._places[-1])

    def is_accepting(self) -> bool:
        return self._compiled.accepts(self._places[-1])

    def ends_within(self, limit: int) -> bool:
        return self._compiled.enough(self._places[-1], limit) is not None

    def min_tokens_to_accept(self, limit: int) -> int | None:
        return self._compiled.distance(self._places[-1], limit)


@lru_cache(maxsize=8)
def _tries(vocabulary: Vocabulary) -> tuple[TokenTrie, TokenTrie]:
    """The tokens that begin an output, and those anywhere else."""
    trie = TokenTrie(vocabulary.tokens)
    return (TokenTrie(vocabulary.first_tokens) if vocabulary.drops_first_space else trie), trie


def _distinct(states: Ints) -> list[int]:
    """The states that occur, ``DEAD`` left out."""
    return (1 + np.flatnonzero(np.bincount(states)[1:])).tolist()


def _packed(legal: NDArray[np.bool_]) -> Tensor:
    """[V] truth values as [ceil(V/32)] int32 words."""
    words = np.zeros(4 * mask_words(len(legal)), dtype=np.uint8)
    packed = np.packbits(legal, bitorder="little")
    words[: len(packed)] = packed
    return torch.from_numpy(words.view("<i4"))
