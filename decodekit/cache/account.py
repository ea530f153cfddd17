"""Bytes that one row takes in a cache, at any length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from decodekit.cache.shapes import LayerShape

_FAR = 1 << 40
"""A length, in tokens, that stands for no limit."""


@dataclass(frozen=True)
class Precision:
    """How K/V are quantized: keys by channel, values by token (KIVI: Liu et al., 2024, arXiv:2402.02750).

    Attributes:
        bits: of one element.
        scale_bytes: of what turns a group of them back into numbers.
    """

    bits: int
    scale_bytes: int


# Integers have a scale and a zero point of two bytes each; a float has its own zero.
PRECISIONS = {
    "int8": Precision(8, 4),
    "fp8": Precision(8, 2),
    "int4": Precision(4, 4),
    "int2": Precision(2, 4),
}


@dataclass(frozen=True)
class Account:
    """What one row takes.

    A block is quantized when it is full, since the scale of a key channel is that of all its tokens; until then it has
    full precision, as the residual of KIVI.

    Attributes:
        layers: equal layers together: their shape, and how many there are.
        dtype_bytes: of an element of K/V and of convolutions.
        state_bytes: of an element of a recurrent state.
        block_size: tokens of a block.
        precision: of full blocks; ``None`` keeps the dtype.
        checkpoint_every: tokens between two saved copies of the states; ``None`` saves none.
    """

    layers: tuple[tuple[LayerShape, int], ...]
    dtype_bytes: int
    state_bytes: int
    block_size: int
    precision: Precision | None = None
    checkpoint_every: int | None = None

    def token(self, shape: LayerShape) -> int:
        """K/V bytes of a token in a layer, scales left out."""
        return self._elements(shape, self.precision.bits if self.precision else 8 * self.dtype_bytes)

    def scales(self, shape: LayerShape) -> int:
        """Bytes of scales of a full block in a layer: one a key channel, one a value head and token."""
        if self.precision is None:
            return 0
        return shape.heads * (shape.key_dim + self.block_size) * self.precision.scale_bytes

    def state(self, shape: LayerShape) -> int:
        """Bytes of a layer's recurrent state."""
        return shape.state * self.state_bytes

    def conv(self, shape: LayerShape) -> int:
        """Bytes of a layer's convolution. Eight bits are for K/V alone: these columns enter the state at every step."""
        return shape.conv * max(self.dtype_bytes, 2)

    def blocks(self, shape: LayerShape, tokens: int) -> tuple[int, int]:
        """K/V bytes of the blocks a layer holds after ``tokens``, and how many of these bytes no token uses."""
        plain = self._elements(shape, 8 * self.dtype_bytes)
        start = 0 if shape.kept is None else max(0, tokens - shape.kept)
        first, (last, filled) = start // self.block_size, divmod(tokens, self.block_size)
        unused = (start - first * self.block_size) * (self.token(shape) if last > first else plain)
        held = (last - first) * (self.block_size * self.token(shape) + self.scales(shape))
        if filled:
            held += self.block_size * plain
            unused += (self.block_size - filled) * plain
        return held, unused

    def checkpoints(self, tokens: int) -> int:
        """Bytes of the copies of all states and convolutions saved on the way to ``tokens``."""
        copies = tokens // self.checkpoint_every if self.checkpoint_every else 0
        return copies * self.total(lambda shape: self.state(shape) + self.conv(shape))

    def row(self, tokens: int) -> int:
        """Bytes after ``tokens``: blocks, states, convolutions and checkpoints."""
        held = self.total(lambda shape: self.blocks(shape, tokens)[0] + self.state(shape) + self.conv(shape))
        return held + self.checkpoints(tokens)

    def peak(self, tokens: int) -> int:
        """The most bytes on the way to ``tokens``: a block shrinks when it is quantized or leaves a window."""
        return max(self.row(n) for n in range(max(0, tokens - self.block_size + 1), tokens + 1))

    def contiguous(self, tokens: int, *, spare: int = 0) -> int:
        """Bytes of a cache without blocks in full precision; ``spare`` more tokens in each window."""
        return self.total(
            lambda shape: (
                (tokens if shape.kept is None else min(tokens, shape.kept + spare))
                * self._elements(shape, 8 * self.dtype_bytes)
                + self.state(shape)
                + self.conv(shape)
            )
        )

    def longest(self, budget: int) -> int | None:
        """Most tokens of a row in ``budget`` bytes; ``None`` where no number of tokens is too many."""
        tokens = first_length(lambda n: self.peak(n) > budget)
        return None if tokens is None else max(0, tokens - 1)

    def crossover(self) -> int | None:
        """Tokens from which recurrent layers take no more than attention layers in their place would.

        ``None`` where there is no attention layer to compare with, or where windows end before.
        """
        recurrent = self.total(lambda shape: int(shape.state + shape.conv > 0))
        attention = self.total(lambda shape: int(shape.heads > 0))
        states = self.total(lambda shape: self.state(shape) + self.conv(shape))
        if not attention:
            return None

        def enough(tokens: int) -> bool:
            kv = self.total(lambda shape: min(tokens, tokens if shape.kept is None else shape.kept) * self.token(shape))
            return kv * recurrent >= states * attention

        return first_length(enough)

    def total(self, of: Callable[[LayerShape], int]) -> int:
        """The sum of ``of`` over all layers."""
        return sum(count * of(shape) for shape, count in self.layers)

    def _elements(self, shape: LayerShape, bits: int) -> int:
        quantized = shape.heads * (-(-shape.key_dim * bits // 8) + -(-shape.value_dim * bits // 8))
        # An indexer ranks tokens by its keys: what it loses, attention never sees.
        return quantized + shape.index_dim * self.dtype_bytes


def first_length(found: Callable[[int], bool]) -> int | None:
    """The smallest number of tokens for which ``found`` holds, given that it then holds for all larger ones."""
    length = bisect_left(range(_FAR), True, key=found)
    return None if length == _FAR else length
