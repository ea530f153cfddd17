"""What a recipe costs beside plain decoding: how many tokens go through a model for each token of output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from decodekit.core.protocols import SearchStrategy, SequenceStrategy, TokenStrategy
from decodekit.core.random import Stream
from decodekit.core.types import Request
from decodekit.recipe.combinations import innermost
from decodekit.recipe.schema import Recipe


@dataclass(frozen=True)
class Cost:
    """Forwarded tokens a token of output.

    Attributes:
        factors: what is nested, the outermost first, with how many there are of it; none for plain decoding.
        unknown: the strategy whose branches depend on the prompt, which multiply the rest; empty where they are known.
    """

    factors: tuple[tuple[int, str], ...] = ()
    unknown: str = ""

    @property
    def forwarded_tokens(self) -> int:
        """At most, a token of output; the prompt is forwarded once a branch."""
        return math.prod(count for count, _ in self.factors)

    def __str__(self) -> str:
        tokens = self.forwarded_tokens
        parts = [f"{count} {name}" for count, name in self.factors]
        parts += [f"the branches of {self.unknown!r}"] if self.unknown else []
        if not parts:
            return "1 forwarded token a token of output"
        return f"up to {tokens} forwarded tokens a token of output: {' x '.join(parts)}"


def cost_of(recipe: Recipe) -> Cost:
    """The cost of what a recipe nests."""
    strategy, factors, unknown = recipe.strategy, list[tuple[int, str]](), ""
    if isinstance(strategy, SequenceStrategy):
        factors.append((strategy.count, "candidates"))
    if isinstance(strategy, SearchStrategy):
        factors.append((strategy.width, "hypotheses"))
    inner = innermost(strategy)
    assert isinstance(inner, TokenStrategy)
    try:
        factors.append((len(inner.branches(_example())), "branches"))
    except Exception:  # a prompt of another kind is wanted: nothing is wrong with the recipe
        unknown = inner.kind
    return Cost(tuple((count, name) for count, name in factors if count > 1), unknown)


class _AnyInput(dict[str, Any]):
    """Has a text for everything that may be asked for."""

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, "A text")


class _Letters:
    """A tokenizer whose tokens are characters."""

    def __call__(self, text: str, **options: Any) -> Any:
        return SimpleNamespace(input_ids=self.encode(text))

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def _example() -> Request:
    """A prompt that brings every input."""
    text, letters = "A question", _Letters()
    return Request(
        0,
        tuple(letters.encode(text)),
        Stream(0, 0, 0),
        inputs=_AnyInput(text=text),
        encode=letters.encode,
        tokenizer=letters,
    )
