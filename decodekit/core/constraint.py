"""What a constraint compiles to, and one row's place in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
_KEPT_MASKS = 64


def mask_words(width: int) -> int:
    """The int32 words that a mask over ``width`` logits takes."""
    return (width + 31) // 32


def mask_tokens(row: Tensor) -> list[int]:
    """The ids whose bits are set in one row of a mask, [ceil(V/32)] int32."""
    return np.flatnonzero(np.unpackbits(row.numpy().view(np.uint8), bitorder="little")).tolist()


def legal_only(scores: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """Scores with ``-inf`` at what is not legal.

    Args:
        scores: [R, V] floats.
        masks: [R] of [ceil(V/32)] int32 each, on any device.
    """
    if scores.device.type == "cpu" and scores.dtype in _NUMPY:
        given = scores.detach().numpy()
        legal = np.empty_like(given)
        for row, mask in enumerate(masks):
            limits = _limits(mask.numpy().tobytes(), scores.dtype)[: given.shape[1]]
            np.minimum(given[row], limits, out=legal[row])
        return torch.from_numpy(legal)
    bits = torch.stack([*masks]).to(scores.device).unsqueeze(-1) >> torch.arange(
        32, dtype=torch.int32, device=scores.device
    )
    illegal = (bits & 1).flatten(1)[:, : scores.shape[-1]] == 0
    return scores.masked_fill(illegal, -torch.inf)


@lru_cache(maxsize=_KEPT_MASKS)
def _limits(mask: bytes, dtype: torch.dtype) -> NDArray[Any]:
    """The largest score that a mask allows each token: any or none. Texts come to the same masks again and again."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    return np.where(bits, np.inf, -np.inf).astype(_NUMPY[dtype])


def best_of_each(scores: Tensor) -> Tensor:
    """[R] the largest of each row of scores, [R, V] floats."""
    if scores.device.type == "cpu" and scores.dtype in _NUMPY:
        return torch.from_numpy(scores.detach().numpy().max(-1))
    return scores.amax(-1)


def is_legal(row: Tensor, token: int) -> bool:
    """Whether the bit of ``token`` is set in one row of a mask, [ceil(V/32)] int32."""
    return bool(int(row[token // 32]) >> token % 32 & 1)


class ConstraintState(ABC):
    """One row's place in a compiled constraint; every row and every call begins with a fresh one.

    After an EOS nothing but EOS is legal, so that a finished row stays finished.
    """

    @abstractmethod
    def mask(self, out: Tensor, row: int) -> None:
        """Overwrite ``out[row]`` with the legal tokens: bit ``v % 32`` of word ``v // 32`` stands for token v.

        Args:
            out: [R, ceil(V/32)] int32 on the CPU, where V is the width of the logits, not of the tokenizer.
            row: which of its rows.
        """

    @abstractmethod
    def advance(self, token: int) -> None:
        """Go on by one token.

        Raises:
            RowError: the token is not legal here; the state is as it was.
        """

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Take back the last ``count`` tokens, as if they had never been taken."""

    @abstractmethod
    def fork(self) -> Self:
        """A copy that goes its own way."""

    @abstractmethod
    def forced_tokens(self) -> list[int]:
        """The tokens that every legal continuation begins with, cut as the tokenizer cuts that text; never an EOS."""

    @abstractmethod
    def is_accepting(self) -> bool:
        """Whether the text may end here: then, and only then, is EOS legal."""

    @abstractmethod
    def min_tokens_to_accept(self, limit: int) -> int | None:
        """The fewest tokens after which the text may end (EOS not counted); ``None`` if more than ``limit`` or unknown."""

    def ends_within(self, limit: int) -> bool:
        """Whether ``min_tokens_to_accept`` finds an end."""
        return self.min_tokens_to_accept(limit) is not None

    def mask_within(self, out: Tensor, row: int, limit: int) -> None:
        """As ``mask``, but of the tokens only those after which the text can end within ``limit`` tokens, this one included.

        EOS is legal as ever where the text may end. The mask is empty when no text ends in time.
        """
        self.mask(out, row)
        for token in mask_tokens(out[row]):
            ahead = self.fork()
            ahead.advance(token)
            if not self.is_accepting() and ahead.min_tokens_to_accept(limit - 1) is None:
                out[row, token // 32] &= ~(1 << token % 32)


class CompiledConstraint(ABC):
    """A language as masks over one vocabulary.

    Attributes:
        exact: the masks allow what the language allows and nothing else.
        unsupported: the keywords that it cannot enforce; empty when ``exact``.
        counts_exactly: ``min_tokens_to_accept`` is ``None`` only where no text is short enough.
    """

    exact: bool = True
    unsupported: tuple[str, ...] = ()
    counts_exactly: bool = False

    @abstractmethod
    def start(self) -> ConstraintState:
        """A fresh state before the first token."""
