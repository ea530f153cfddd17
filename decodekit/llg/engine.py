"""llguidance as the engine of context-free grammars: Lark text in, masks out.

https://github.com/guidance-ai/llguidance: an Earley parser over a lexer of regex derivatives, walked over a trie of the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache, cached_property, lru_cache
from typing import Any, Self

import llguidance
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from torch import Tensor

from decodekit.core.constraint import CompiledConstraint, ConstraintState, is_legal, mask_tokens, mask_words
from decodekit.core.errors import InputError, RowError, UnsupportedConstraint
from decodekit.core.vocabulary import Vocabulary
from decodekit.llg.ends import CLOSING, JSON_CLOSING, Scan, closed_end, json_end, known_end, searched_end, words_of

MAX_GRAMMAR = 8 * 2**20
"""Characters of a grammar's text: longer ones are refused before the engine reads them."""
_LIMITS = LLParserLimits(verbose_errors=False)


class CompiledGrammar(CompiledConstraint):
    """Masks for the language of a grammar.

    Args:
        lark: a grammar in llguidance's Lark, with the rule ``start``.
        vocabulary: of the model.
        unsupported: the keywords of the source that the grammar leaves out.
        names: where the texts are JSON, the names that its objects may need, the required first.
        ending: bytes that some texts end with, from any of its places on; tried before an end is searched for.

    Raises:
        UnsupportedConstraint: the grammar is beyond the engine's limits.
        InputError: it has an error, or the vocabulary has no EOS to end a text with.
    """

    def __init__(
        self,
        lark: str,
        vocabulary: Vocabulary,
        unsupported: Iterable[str] = (),
        names: tuple[str, ...] | None = None,
        ending: bytes = b"",
    ) -> None:
        self.vocabulary = vocabulary
        self.names, self.ending = names, ending
        self.unsupported = tuple(unsupported)
        self.exact = not self.unsupported
        lark = _spaced(lark) if vocabulary.drops_first_space else lark
        self._matcher = _matcher(engine_tokenizer(vocabulary), lark)
        if _is_dead(self._matcher.deep_copy()):
            raise InputError("no text satisfies this grammar")
        self.closing = _closing_tokens(vocabulary, CLOSING if names is None else JSON_CLOSING)
        self._lark = lark
        self._over_bytes: LLMatcher | None = None

    @cached_property
    def words(self) -> tuple[bytes, ...]:
        """Words that may be needed to end a text."""
        return words_of(self._lark)

    def start(self) -> GrammarState:
        """A fresh state before the first token."""
        return GrammarState(self, self._matcher.deep_copy(), [])

    def over_bytes(self) -> LLMatcher:
        """The start of a text, to go on byte by byte, which is quicker than by tokens."""
        if self._over_bytes is None:
            self._over_bytes = _matcher(_bytes_tokenizer(), self._lark)
        return self._over_bytes.deep_copy()

    def fewest_tokens(self, text: bytes) -> list[int | None]:
        """How many tokens spell these bytes at least, from each place on; ``None`` where none do."""
        ids, lengths = _spellings(self.vocabulary)
        fewest: list[int | None] = [0] * (len(text) + 1)
        for start in reversed(range(len(text))):
            ends = [start + length for length in (1, *lengths.get(text[start : start + 2], ()))]
            after = [
                count
                for end in ends
                if end <= len(text) and text[start:end] in ids and (count := fewest[end]) is not None
            ]
            fewest[start] = min(after) + 1 if after else None
        return fewest


class GrammarState(ConstraintState):
    """One row's place in a grammar."""

    def __init__(
        self,
        compiled: CompiledGrammar,
        matcher: LLMatcher,
        taken: list[int],
        ended: int = 0,
        bytewise: _Bytewise | None = None,
        ends: list[bytes | None] | None = None,
    ) -> None:
        self._compiled = compiled
        self._matcher = matcher
        self._taken = taken
        self._ended = ended
        self._bytewise = bytewise
        self._ends: list[bytes | None] = [None] if ends is None else ends  # found before, after each token
        self._found: tuple[bytes | None] | None = None  # by a search from here

    def mask(self, out: Tensor, row: int) -> None:  # noqa: D102
        vocabulary = self._compiled.vocabulary
        words = out[row]
        if self._ended or self._matcher.is_stopped():
            words.copy_(_mask_of(vocabulary.eos_ids, len(words)))
            return
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), 4 * mask_words(vocabulary.width))
        if self._matcher.is_error():
            raise RowError(f"the grammar's mask cannot be computed: {_reason(self._matcher.get_error())}")

    def advance(self, token: int) -> None:  # noqa: D102
        if token in self._compiled.vocabulary.eos_ids:
            if not self.is_accepting():
                raise RowError(f"token {token} ends the text where the grammar does not allow an end")
            self._ended += 1
            self._found = None
        elif self._ended or not self._takes(token):
            raise RowError(f"token {token} is not legal here")
        else:
            self._taken.append(token)
            self._found = None
            end, piece = self._ends[-1], self._compiled.vocabulary.tokens[token]
            self._ends.append(end[len(piece) :] if end and piece and end.startswith(piece) else None)

    def _takes(self, token: int) -> bool:
        # The engine must not see what it would not survive: ids of special tokens and beyond the vocabulary.
        tokens = self._compiled.vocabulary.tokens
        known = 0 <= token < len(tokens) and tokens[token] is not None
        return known and self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:  # noqa: D102
        if count > len(self._taken) + self._ended:
            raise ValueError(f"{count} tokens cannot be taken back: {len(self._taken) + self._ended} were taken")
        ends = min(count, self._ended)
        self._ended -= ends
        self._found = None
        if back := count - ends:
            self._matcher.rollback(back)
            del self._taken[-back:], self._ends[-back:]
            if self._bytewise is not None:
                self._bytewise.rollback(len(self._taken))

    def fork(self) -> Self:  # noqa: D102
        bytewise = None if self._bytewise is None else self._bytewise.fork()
        return type(self)(
            self._compiled, self._matcher.deep_copy(), self._taken[:], self._ended, bytewise, self._ends[:]
        )

    def forced_tokens(self) -> list[int]:  # noqa: D102
        if self._ended or self._matcher.is_stopped():
            return []
        forced = self._matcher.compute_ff_bytes()
        if not forced:
            return []
        tokens, _ = engine_tokenizer(self._compiled.vocabulary).tokenize_partial(forced)
        return list(tokens)

    def is_accepting(self) -> bool:  # noqa: D102
        return bool(self._ended) or self._matcher.is_accepting()

    def min_tokens_to_accept(self, limit: int) -> int | None:
        """As the protocol says, found by a bounded search: an upper bound where there are many ways to go on."""
        return self._end_within(limit)[1]

    def shortest_end(self) -> bytes | None:
        """Few bytes after which the text may end; ``None`` where a bounded search finds none.

        See ``decodekit.llg.ends``.
        """
        if self._found is None:
            self._found = (self._searched_end(),)
        return self._found[0]

    def _searched_end(self) -> bytes | None:
        if self.is_accepting():
            return b""
        here = self._over_bytes()
        if self._compiled.names is not None:
            end = json_end(here.matcher, here.scan, self._compiled.names)
            if end is not None:
                return end
        known = known_end(here.matcher, self._compiled.ending)
        if known is None:
            known = searched_end(here.matcher, LLMatcher.is_accepting)
        if known is None and (words := self._compiled.words):
            known = closed_end(here.matcher, words)
        return known

    def _end_within(self, limit: int) -> tuple[bytes | None, int | None]:
        """An end of at most ``limit`` tokens, and how many it takes."""
        # Should the search find a longer end than it did before, what is left of that one still leads to an end.
        for end in (self.shortest_end(), self._ends[-1]):
            if end is not None and (needed := self._compiled.fewest_tokens(end)[0]) is not None and needed <= limit:
                self._ends[-1] = end
                return end, needed
        return None, None

    def _over_bytes(self) -> _Bytewise:
        if self._bytewise is None:
            self._bytewise = _Bytewise(self._compiled.over_bytes(), json=self._compiled.names is not None)
        tokens = self._compiled.vocabulary.tokens
        self._bytewise.follow([tokens[token] or b"" for token in self._taken[self._bytewise.read :]])
        return self._bytewise

    def mask_within(self, out: Tensor, row: int, limit: int) -> None:
        """As the protocol says, near the limit: of the legal tokens, those for which an end is found in time.

        Far from it (four times the tokens that an end takes now, and 64 more) every legal token is taken to leave time enough,
        and so it is where no end is found at all.
        """
        self.mask(out, row)
        end, needed = self._end_within(limit)
        if needed is None and self.shortest_end() is None:
            return  # behind every token would be another search, as long as this one and as little use
        if needed is not None and limit >= 4 * needed + 64:
            return
        compiled, legal = self._compiled, out[row]
        ids, _ = _spellings(compiled.vocabulary)
        kept = [token for token in compiled.vocabulary.eos_ids if is_legal(legal, token)]
        kept += [token for token in mask_tokens(legal & compiled.closing) if self._ends_within(token, limit - 1)]
        for length, after in enumerate(compiled.fewest_tokens(end or b"")[1:], start=1):
            if end and after is not None and after < limit:
                kept += [token for token in ids.get(end[:length], ()) if is_legal(legal, token)]
        out[row] = _mask_of(kept, out.shape[1])

    def _ends_within(self, token: int, limit: int) -> bool:
        ahead = self.fork()
        ahead.advance(token)
        return ahead.min_tokens_to_accept(limit) is not None


class _Bytewise:
    """The place over bytes, which follows that over tokens when it is asked.

    Args:
        matcher: at the start of the text.
        json: the text is JSON.
    """

    def __init__(self, matcher: LLMatcher, *, json: bool) -> None:
        self.matcher = matcher
        self._lengths: list[int] = []
        self._scans = [Scan()]
        self._json = json

    @property
    def read(self) -> int:
        """The tokens that were read."""
        return len(self._lengths)

    @property
    def scan(self) -> Scan:
        """The place in a JSON text."""
        return self._scans[-1]

    def follow(self, pieces: Iterable[bytes]) -> None:
        """Read the bytes of further tokens."""
        for piece in pieces:
            self.matcher.consume_tokens(list(piece))
            self._lengths.append(len(piece))
            self._scans.append(self.scan.read(piece) if self._json else self.scan)

    def rollback(self, read: int) -> None:
        """Back to where so many tokens were read, or fewer."""
        if back := sum(self._lengths[read:]):
            self.matcher.rollback(back)
        del self._lengths[read:], self._scans[read + 1 :]

    def fork(self) -> Self:
        """A copy that goes its own way."""
        copy = type(self)(self.matcher.deep_copy(), json=self._json)
        copy._lengths, copy._scans = self._lengths[:], self._scans[:]
        return copy


@lru_cache(maxsize=4096)
def is_empty(terminal: str) -> bool:
    """Whether a terminal, in the syntax of a grammar's right side, matches no text.

    Raises:
        UnsupportedConstraint: it is beyond the engine's limits.
    """
    return _is_dead(_matcher(_bytes_tokenizer(), f"start: T\nT: {terminal}\n"))


def _is_dead(matcher: LLMatcher) -> bool:
    """Whether no text goes on from here, which leaves the matcher in error."""
    return not any(matcher.compute_bitmask()) or matcher.is_error()


def _matcher(tokenizer: LLTokenizer, lark: str) -> LLMatcher:
    if len(lark) > MAX_GRAMMAR:
        raise UnsupportedConstraint(f"a grammar of {len(lark)} characters is more than {MAX_GRAMMAR}", ["grammar"])
    if bad := re.search("[\ud800-\udfff]", lark):
        raise InputError(f"the grammar holds half of a surrogate pair, {bad.group()!r}; write the character itself")
    # With forcing, of the tokens that spell forced bytes only the one that the tokenizer would cut is legal.
    options = "" if tokenizer is _bytes_tokenizer() else '%llguidance {"no_forcing": true}\n'
    grammar = LLMatcher.grammar_from_lark(options + lark)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        reason = _reason(matcher.get_error())
        if re.search(r"too (large|big|complex|many)|limit|fuel|exceed", reason):
            raise UnsupportedConstraint(f"the grammar is more than the engine can hold: {reason}", ["grammar"])
        raise InputError(f"the grammar has an error: {reason}")
    return matcher


def _reason(message: str) -> str:
    """The first line of an error of the engine, cut to fit in a line."""
    return message.strip().split("\n")[0][:200]


def _spaced(lark: str) -> str:
    """The same language with a space before it or none, for decoders that drop the first."""
    return "start: DK_SPACE? dk_start\nDK_SPACE: / /\n" + re.sub(r"(?m)^start(?=\s*:)", "dk_start", lark, count=1)


class _Tokens:
    """What llguidance asks of a tokenizer, answered from a vocabulary."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.special_token_ids = [index for index, token in enumerate(vocabulary.tokens) if token is None]
        self.tokens = [token or f"<|{index}|>".encode() for index, token in enumerate(vocabulary.tokens)]
        self._vocabulary = vocabulary

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("the tokenizer takes text")
        return list(self._vocabulary.encode(text))


class _Bytes:
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<|end|>")

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def _bytes_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


@lru_cache(maxsize=8)
def engine_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """The vocabulary as llguidance has it, made once.

    Raises:
        InputError: it has no EOS.
    """
    eos = [token for token in vocabulary.eos_ids if token < vocabulary.width]
    if not eos:
        raise InputError("a constraint needs an EOS among the model's tokens to end a text with; give eos_token_id")
    return LLTokenizer(
        TokenizerWrapper(_Tokens(vocabulary)),
        n_vocab=vocabulary.width,
        eos_token=eos,
        slices=llguidance.LLTokenizer.json_slices(),
    )


@lru_cache(maxsize=8)
def _spellings(vocabulary: Vocabulary) -> tuple[dict[bytes, list[int]], dict[bytes, set[int]]]:
    """The tokens by what they spell, and the lengths that there are above one byte, by the first two bytes."""
    ids: dict[bytes, list[int]] = {}
    lengths: dict[bytes, set[int]] = {}
    for index, token in enumerate(vocabulary.tokens):
        if token is not None:
            ids.setdefault(token, []).append(index)
            if len(token) > 1:
                lengths.setdefault(token[:2], set()).add(len(token))
    return ids, lengths


@lru_cache(maxsize=8)
def _closing_tokens(vocabulary: Vocabulary, signs: frozenset[int]) -> Tensor:
    """[ceil(V/32)] int32, the tokens made only of these signs."""
    closing = [index for index, token in enumerate(vocabulary.tokens) if token is not None and signs.issuperset(token)]
    return _mask_of(closing, mask_words(vocabulary.width))


def _mask_of(tokens: Iterable[int], words: int) -> Tensor:
    """[words] int32 with the bits of these tokens."""
    mask = torch.zeros(words, dtype=torch.int64)
    for token in tokens:
        mask[token // 32] |= 1 << token % 32
    return mask.to(torch.int32)
