"""llguidance as the engine of context-free grammars: Lark text in, masks out.

https://github.com/guidance-ai/llguidance: an Earley parser over a lexer of regex derivatives, walked over a trie of the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any, Self

import llguidance
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from torch import Tensor

from decodekit.core.constraint import CompiledConstraint, ConstraintState, mask_tokens, mask_words
from decodekit.core.errors import InputError, RowError, UnsupportedConstraint
from decodekit.core.vocabulary import Vocabulary

MAX_GRAMMAR = 8 * 2**20
"""Characters of a grammar's text: longer ones are refused before the engine reads them."""
_SEARCHED = 600
"""States that one search for an end may visit."""
_CLOSING = frozenset(b'"}]{[(),:;<>/ \n0123456789')
_LIMITS = LLParserLimits(verbose_errors=False)


class CompiledGrammar(CompiledConstraint):
    """Masks for the language of a grammar.

    Args:
        lark: a grammar in llguidance's Lark, with the rule ``start``.
        vocabulary: of the model.
        unsupported: the keywords of the source that the grammar leaves out.

    Raises:
        UnsupportedConstraint: the grammar is beyond the engine's limits.
        InputError: it has an error, or the vocabulary has no EOS to end a text with.
    """

    def __init__(self, lark: str, vocabulary: Vocabulary, unsupported: Iterable[str] = ()) -> None:
        self.vocabulary = vocabulary
        self.unsupported = tuple(unsupported)
        self.exact = not self.unsupported
        self._matcher = _matcher(_tokenizer(vocabulary), _spaced(lark) if vocabulary.drops_first_space else lark)
        if not any(self._matcher.compute_bitmask()):
            raise InputError("no text satisfies this grammar")
        self.closing = _closing_tokens(vocabulary)

    def start(self) -> GrammarState:
        """A fresh state before the first token."""
        return GrammarState(self, self._matcher.deep_copy())


class GrammarState(ConstraintState):
    """One row's place in a grammar."""

    def __init__(self, compiled: CompiledGrammar, matcher: LLMatcher, taken: int = 0, ended: int = 0) -> None:
        self._compiled = compiled
        self._matcher = matcher
        self._taken = taken
        self._ended = ended

    def mask(self, out: Tensor, row: int) -> None:  # noqa: D102
        vocabulary = self._compiled.vocabulary
        words = out[row]
        if self._ended or self._matcher.is_stopped():
            words.zero_()
            for token in vocabulary.eos_ids:
                words[token // 32] |= torch.tensor(1 << token % 32, dtype=torch.int64).to(torch.int32)
            return
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), 4 * mask_words(vocabulary.width))
        if self._matcher.is_error():
            raise RowError(f"the grammar's mask cannot be computed: {_reason(self._matcher.get_error())}")

    def advance(self, token: int) -> None:  # noqa: D102
        if token in self._compiled.vocabulary.eos_ids:
            if not self.is_accepting():
                raise RowError(f"token {token} ends the text where the grammar does not allow an end")
            self._ended += 1
        elif self._ended or not self._takes(token):
            raise RowError(f"token {token} is not legal here")
        else:
            self._taken += 1

    def _takes(self, token: int) -> bool:
        # The engine must not see what it would not survive: ids of special tokens and beyond the vocabulary.
        tokens = self._compiled.vocabulary.tokens
        known = 0 <= token < len(tokens) and tokens[token] is not None
        return known and self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:  # noqa: D102
        if count > self._taken + self._ended:
            raise ValueError(f"{count} tokens cannot be taken back: {self._taken + self._ended} were taken")
        ends = min(count, self._ended)
        self._ended -= ends
        if back := count - ends:
            self._matcher.rollback(back)
            self._taken -= back

    def fork(self) -> Self:  # noqa: D102
        return type(self)(self._compiled, self._matcher.deep_copy(), self._taken, self._ended)

    def forced_tokens(self) -> list[int]:  # noqa: D102
        if self._ended or self._matcher.is_stopped():
            return []
        return list(self._matcher.compute_ff_tokens())

    def is_accepting(self) -> bool:  # noqa: D102
        return bool(self._ended) or self._matcher.is_accepting()

    def min_tokens_to_accept(self, limit: int) -> int | None:
        """As the protocol says, found by a search of forks: an upper bound where there are many ways to go on.

        Of the legal tokens only single bytes, brackets, quotes and the like are tried, and of states with the same mask one.
        """
        if self.is_accepting():
            return 0
        frontier, visited = [self], 0
        for depth in range(1, limit + 1):
            following: dict[bytes, GrammarState] = {}
            for state in frontier:
                for token in state._worth_trying():
                    visited += 1
                    ahead = state.fork()
                    if not ahead._takes(token):
                        continue
                    if ahead._matcher.is_accepting():
                        return depth
                    following.setdefault(ahead._matcher.compute_bitmask(), ahead)
                    if visited > _SEARCHED:
                        return self._forced_end(limit)
            frontier = list(following.values())
        return None

    def _forced_end(self, limit: int) -> int | None:
        """The tokens until the text may end, when closing is preferred to anything else."""
        ahead = self.fork()
        for count in range(1, limit + 1):
            if not any(ahead._takes(token) for token in ahead._worth_trying()):
                return None
            if ahead._matcher.is_accepting():
                return count
        return None

    def _worth_trying(self) -> list[int]:
        if forced := self._matcher.compute_ff_tokens():
            return [forced[0]]
        mask = self._matcher.compute_bitmask()
        return [token for token in self._compiled.closing if mask[token >> 3] >> (token & 7) & 1]

    def mask_within(self, out: Tensor, row: int, limit: int) -> None:
        """As the protocol says, near the limit: of the legal tokens, those worth trying whose end is found in time.

        Far from it (four times the tokens that an end takes now, and 64 more) every legal token is taken to leave time enough.
        """
        self.mask(out, row)
        needed = self.min_tokens_to_accept(limit)
        if needed is not None and limit >= 4 * needed + 64:
            return
        legal = set(mask_tokens(out[row]))
        eos = legal & set(self._compiled.vocabulary.eos_ids)
        in_time = []
        for token in legal.intersection(self._compiled.closing):
            ahead = self.fork()
            if ahead._takes(token) and ahead.min_tokens_to_accept(limit - 1) is not None:
                in_time.append(token)
        words = torch.zeros(out.shape[1], dtype=torch.int64)
        for token in [*eos, *in_time]:
            words[token // 32] |= 1 << token % 32
        out[row] = words.to(torch.int32)


def validated(lark: str) -> None:
    """Check a grammar without a vocabulary.

    Raises:
        UnsupportedConstraint: it is beyond the engine's limits.
        InputError: it has an error.
    """
    _matcher(_bytes_tokenizer(), lark)


@lru_cache(maxsize=4096)
def is_empty(terminal: str) -> bool:
    """Whether a terminal, in the syntax of a grammar's right side, matches no text.

    Raises:
        UnsupportedConstraint: it is beyond the engine's limits.
    """
    return not any(_matcher(_bytes_tokenizer(), f"start: T\nT: {terminal}\n").compute_bitmask())


def _matcher(tokenizer: LLTokenizer, lark: str) -> LLMatcher:
    if len(lark) > MAX_GRAMMAR:
        raise UnsupportedConstraint(f"a grammar of {len(lark)} characters is more than {MAX_GRAMMAR}", ["grammar"])
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=_LIMITS)
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
    tokens = tuple(bytes([byte]) for byte in range(256)) + (b"<|end|>",)

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def _bytes_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


@lru_cache(maxsize=8)
def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
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
def _closing_tokens(vocabulary: Vocabulary) -> tuple[int, ...]:
    """Tokens that are one byte, or only brackets, quotes, digits and the like; those that close first, longest first."""
    found = [
        index
        for index, token in enumerate(vocabulary.tokens)
        if token is not None and index not in vocabulary.eos_ids and (len(token) == 1 or _CLOSING.issuperset(token))
    ]

    def rank(index: int) -> tuple[int, int, bytes]:
        token = vocabulary.tokens[index] or b""
        closes = sum(token.count(byte) for byte in b'"}])')
        opens = sum(token.count(byte) for byte in b"{[(,")
        return (opens - closes, -len(token), token)

    return tuple(sorted(found, key=rank))
