"""Streams without end: a few first tokens and a window of the last ones stay, at positions in the cache.

StreamingLLM (Xiao et al., 2023, arXiv:2309.17453): attention rests on the first tokens, its sinks; with them and the last
tokens a model goes on for ever. Distances count what is kept, as if the rest had never been (section 3.2), so the window's
first token comes right behind the sinks.

Here a token behind the sinks has the place in a ring of ``window`` tokens as its position, so that no position is larger than
``sinks + window``, however long the stream. When its key is read later, by a query on another lap of the ring, it is turned to
where that query has to see it: rotary positions (RoPE: Su et al., 2021, arXiv:2104.09864) are angles, and angles add.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from decodekit.core import compat
from decodekit.core.errors import InputError, Refused

_HALVES = {
    "gemma",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_next",
    "stablelm",
    "starcoder2",
}
"""Model types that rotate element ``i`` of every key with element ``i + n`` before they cache it, n pairs in all; those that
rotate only a part of the elements rotate the first. Others pair neighbours, rotate in some layers only, cache latents, or were
not tried."""

_STATIC = {"default", "linear", "llama3", "proportional", "yarn"}
"""Kinds of frequencies that stay as they are while a row grows."""


@dataclass(frozen=True)
class Stream:
    """What full attention keeps of a row.

    Attributes:
        sinks: first tokens.
        window: last tokens that a query sees, itself included.
    """

    sinks: int
    window: int

    @property
    def capacity(self) -> int:
        """Tokens that a query sees at most, itself included."""
        return self.sinks + self.window

    def blocks(self, block_size: int, config: Any) -> int:
        """Most blocks that a row of a model ever has in a cache group."""
        longest = max(kind.window or self.window for kind in compat.cache_layers(config))
        return -(-self.sinks // block_size) + -(-max(longest, self.window) // block_size) + 1

    def positions(self, tokens: Tensor) -> Tensor:
        """The positions, below :attr:`capacity`, at which the tokens with these numbers are forwarded."""
        return torch.where(tokens < self.sinks, tokens, self.sinks + (tokens - self.sinks) % self.window)

    def turns(self, tokens: Tensor, query: Tensor, sinks: int) -> Tensor:
        """By how many positions to turn the keys of some tokens for a query.

        Args:
            tokens: [R, T] their numbers.
            query: [R, 1] that of the query.
            sinks: first tokens that stay as near as if nothing lay between them and the window; 0 where no layer of a group
                sees them for longer than its own window.
        """
        laps = (tokens - self.positions(tokens)) - (query - self.positions(query))
        dropped = (query + 1 - self.capacity).clamp(min=0)
        return torch.where(tokens < sinks, laps + dropped, laps)


class Turn:
    """Turns the keys of a step.

    Args:
        frequencies: [n] angle of each pair of elements a position.
        positions: [R, T] by how many positions.
    """

    def __init__(self, frequencies: Tensor, positions: Tensor) -> None:
        self._frequencies, self._positions = frequencies, positions
        self._on: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, keys: Tensor) -> Tensor:
        """[R, H, T, D] keys at the positions where they are to be seen."""
        dtype = torch.promote_types(keys.dtype, torch.float32)
        if (found := self._on.get((keys.device, dtype))) is None:
            angles = self._positions.to(keys.device, dtype)[..., None] * self._frequencies.to(keys.device, dtype)
            found = self._on[keys.device, dtype] = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        cos, sin = found
        pairs = len(self._frequencies)
        first, second, rest = keys.split([pairs, pairs, keys.shape[-1] - 2 * pairs], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(keys.dtype)


def make_stream(config: Any, sinks: int, window: int | None) -> Stream | None:
    """What the full-attention layers of a model keep; ``None`` for everything.

    Raises:
        InputError: a number is out of range, or there are sinks without a window.
        Refused: the model's positions cannot be moved.
    """
    if window is None:
        if sinks:
            raise InputError(
                f"sinks is {sinks} without a window, so nothing is dropped that they would stay beside; give window"
            )
        return None
    if window < 1 or sinks < 0:
        raise InputError(
            f"window is {window} and sinks {sinks}; a query sees at least 1 token, after 0 or more sinks (4 is usual)"
        )
    config = config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and sinks + window > context:
        raise InputError(
            f"{sinks} sinks and a window of {window} need {sinks + window} positions; the model has {context}"
        )
    if str(config.model_type).removesuffix("_text") not in _HALVES:
        raise Refused(
            f"{config.model_type} is not known to rotate keys by halves (RoPE), so they cannot be moved over what a window "
            f"drops; leave window out (with it: {', '.join(sorted(_HALVES))})"
        )
    return Stream(sinks, window)


def frequencies(config: Any, layer: int) -> Tensor:
    """[n] angles of one layer's rotary embedding a position.

    Raises:
        Refused: they change with the length of the row.
    """
    config = config.get_text_config(decoder=True)
    module = import_module(type(config).__module__.replace("configuration_", "modeling_"))
    prefix = type(config).__name__.removesuffix("Config")
    names = (f"{prefix}RotaryEmbedding", f"{prefix.removesuffix('Text')}RotaryEmbedding")
    rotary = next(getattr(module, name) for name in names if hasattr(module, name))(config)
    layer_type = (getattr(config, "layer_types", None) or {layer: ""})[layer]
    kind = rotary.rope_type[layer_type] if isinstance(rotary.rope_type, dict) else rotary.rope_type
    if kind not in _STATIC:
        raise Refused(
            f"{config.model_type} has RoPE of type {kind!r}, whose angles change as a row grows; leave window out"
        )
    own: Tensor = getattr(rotary, f"{layer_type}_inv_freq") if isinstance(rotary.rope_type, dict) else rotary.inv_freq
    return own.double()
