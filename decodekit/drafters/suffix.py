"""Propose what most often followed the longest suffix that occurred before, in this request or in earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from operator import itemgetter
from threading import Lock
from typing import ClassVar, Literal

from pydantic import Field

from decodekit.core.drafts import DOUBT, Draft, DraftHost, DraftRow, DraftState, confidence
from decodekit.core.protocols import Drafter
from decodekit.core.shared import PerModel

BETWEEN = -1
"""Stands between the texts of one automaton; no text holds it."""

DOUBT_EARLIER = 10.0
"""As ``DOUBT``, of what followed in texts of earlier requests; fitted as it is."""

MOST_COUNTED = 64
"""Suffixes of a token whose counts are kept up, longest first, so that no text makes a step long."""

MOST_READ = 4
"""Suffixes whose followers are looked at for one token, longest first."""

MOST_FOLLOWERS = 64
"""Followers of a shorter suffix above which it says too little to be read."""

CANDIDATES = 3
"""Followers of a suffix, most frequent first, that may be drafted."""


class Suffix(Drafter):
    """Suffix automata over the text of a row and over earlier requests of the same model.

    Oliaro et al., 2024, arXiv:2411.04975: what followed the longest suffix of the text that occurred before, in it or in
    others. Where it says little, shorter suffixes say the rest (interpolated, as Jelinek and Mercer, 1980); the likeliest token
    of any text is drafted, and all texts follow it. Helps wherever texts repeat themselves or each other: agents, templates,
    lists, retrieval. What earlier requests held shows in seconds, never in tokens: share a model between people who must not
    learn even that with ``max_cached_tokens: 0``.

    Cost: amortised O(1) a token; about 0.5 kB a token remembered; no model.
    """

    cost: ClassVar[str] = "O(1) a token"

    kind: Literal["suffix"] = "suffix"
    max_tokens: int = Field(10, ge=1, le=256, description="most tokens of a draft")
    max_cached_tokens: int = Field(
        1 << 17, ge=0, description="most tokens of earlier requests that are remembered for a model"
    )

    def start(self, host: DraftHost) -> DraftState:
        """An automaton a row, beside that of earlier requests."""
        return _Suffixes(
            _CORPORA.of(host.model, self.max_cached_tokens) if self.max_cached_tokens else Corpus(),
            self.max_cached_tokens,
        )


class Automaton:
    """The suffix automaton of a text that grows (Blumer et al., 1985), with counts.

    A state is a set of substrings that end at the same places; state 0 is the empty one.

    Attributes:
        size: tokens it holds.
        last: the state of the whole text.
    """

    def __init__(self) -> None:
        self.size = 0
        self.last = 0
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._recent = [0]

    def extend(self, token: int) -> None:
        """Append a token."""
        new, before = self._add({}, self._length[self.last] + 1, 0), self.last
        while before >= 0 and token not in self._next[before]:
            self._next[before][token] = new
            before = self._link[before]
        self._link[new] = 0 if before < 0 else self._split(before, token)
        self.last, self.size = new, self.size + 1
        state = new
        for _ in range(MOST_COUNTED):
            if state <= 0:
                break
            self._count[state] += 1
            self._recent[state] = self.size
            state = self._link[state]

    def _split(self, before: int, token: int) -> int:
        """The state of exactly the substrings that end with ``token`` after those of ``before``."""
        found = self._next[before][token]
        if self._length[before] + 1 == self._length[found]:
            return found
        clone = self._add({**self._next[found]}, self._length[before] + 1, self._count[found])
        self._link[clone], self._recent[clone] = self._link[found], self._recent[found]
        self._link[found] = clone
        while before >= 0 and self._next[before].get(token) == found:
            self._next[before][token] = clone
            before = self._link[before]
        return clone

    def _add(self, following: dict[int, int], length: int, count: int) -> int:
        self._next.append(following)
        self._link.append(-1)
        self._length.append(length)
        self._count.append(count)
        self._recent.append(self.size)
        return len(self._next) - 1

    def repeated(self) -> tuple[int, int]:
        """The longest suffix of the text that also occurs earlier in it: its state and length."""
        state = max(0, self._link[self.last])
        return state, self._length[state]

    def walk(self, state: int, match: int, token: int) -> tuple[int, int]:
        """From the longest suffix of another text that occurs here, to that of the text with one token more."""
        state = self._holding(state, match)
        while state and token not in self._next[state]:
            state = self._link[state]
            match = self._length[state]
        following = self._next[state].get(token)
        return (0, 0) if following is None else (following, match + 1)

    def chances(self, state: int, match: int, doubt: float) -> dict[int, float]:
        """How likely tokens are to come next; those of the longest suffix first, its most frequent and latest before others.

        Args:
            state: of a suffix of another text, or of this one's before its end.
            match: its tokens, at least one.
            doubt: as of :func:`decodekit.core.drafts.confidence`.
        """
        state = self._holding(state, match)
        suffixes = [(state, match)]
        while (
            len(suffixes) < MOST_READ and (state := self._link[state]) > 0 and len(self._next[state]) <= MOST_FOLLOWERS
        ):
            suffixes.append((state, self._length[state]))
        known = dict[int, float]()
        for state, length in reversed(suffixes):
            following = self._next[state]
            counts = {token: self._count[after] for token, after in following.items()}
            total = sum(counts.values())
            # What this suffix leaves open, the next shorter one says.
            rest = 1 - confidence(length, total, total, doubt)
            frequent = nlargest(CANDIDATES, counts, key=lambda token: (counts[token], self._recent[following[token]]))
            known = {
                token: confidence(length, counts.get(token, 0), total, doubt) + rest * known.get(token, 0.0)
                for token in dict.fromkeys([*frequent, *known])
            }
        known.pop(BETWEEN, None)
        return known

    def _holding(self, state: int, match: int) -> int:
        """The state that now has a suffix of so many tokens, which this one had before states were split."""
        while state and self._length[self._link[state]] >= match:
            state = self._link[state]
        return state


class Corpus:
    """Automata over earlier texts: one that grows, and the one before it, so that what is old is forgotten by halves."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.automata: list[Automaton] = [Automaton()]

    def add(self, text: Sequence[int], memory: int) -> None:
        """Remember a text."""
        with self.lock:
            if self.automata[-1].size + len(text) > memory // 2:
                self.automata = [self.automata[-1], Automaton()]
            for token in text[-(memory // 2) :]:
                self.automata[-1].extend(token)
            self.automata[-1].extend(BETWEEN)


_CORPORA: PerModel[Corpus] = PerModel(Corpus)


class _Suffixes(DraftState):
    def __init__(self, corpus: Corpus, memory: int) -> None:
        self._corpus, self._memory = corpus, memory
        self._rows: dict[int, _Row] = {}

    def propose(self, rows: Sequence[DraftRow], budgets: Sequence[int]) -> Sequence[Draft]:
        drafts = []
        for row, budget in zip(rows, budgets, strict=True):
            known = self._rows.setdefault(row.row, _Row())
            with self._corpus.lock:
                known.read(row, self._corpus.automata)
                drafts.append(known.draft(budget))
        return drafts

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            if (known := self._rows.pop(row, None)) is not None and self._memory:
                assert known.row is not None
                self._corpus.add(known.row.ids, self._memory)  # also what came after it was read last

    def close(self) -> None:
        self.release([*self._rows])


class _Row:
    """One text: its own automaton, and where it stands in those of earlier texts."""

    def __init__(self) -> None:
        self.row: DraftRow | None = None
        self._read = 0
        self._own = Automaton()
        self._places: dict[Automaton, tuple[int, int]] = {}

    def read(self, row: DraftRow, earlier: Sequence[Automaton]) -> None:
        """The text has grown to this."""
        new = row.ids[self._read :]
        self._places = {own: self._places.get(own, (0, 0)) for own in earlier}
        for token in new:
            self._own.extend(token)
        for own in self._places:
            for token in new:
                self._places[own] = own.walk(*self._places[own], token)
        self.row, self._read = row, self._read + len(new)

    def draft(self, budget: int) -> Draft:
        """The likeliest token of its own past or of an earlier text, again and again; its own comes first among equals."""
        places = [(self._own, *self._own.repeated(), DOUBT)]
        places += [(own, *place, DOUBT_EARLIER) for own, place in self._places.items()]
        tokens, likely = list[int](), list[float]()
        while len(tokens) < budget:
            chances = [
                chance
                for own, state, match, doubt in places
                if match
                for chance in own.chances(state, match, doubt).items()
            ]
            if not chances:
                break
            token, chance = max(chances, key=itemgetter(1))
            tokens.append(token)
            likely.append(chance)
            places = [(own, *own.walk(state, match, token), doubt) for own, state, match, doubt in places]
        return Draft(tokens, confidence=likely)
