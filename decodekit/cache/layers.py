"""What stands in the places of transformers' cache layers: marks for K/V, which the cache itself holds, and states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from decodekit.core.compat import CacheLayer


class MarkedLayer:
    """A layer with K/V, or with nothing: what transformers asks about a layer itself."""

    is_compileable = False
    supports_early_init = False
    record_past = False

    def __init__(self, is_sliding: bool) -> None:
        self.is_sliding = is_sliding


class StateLayer(LinearAttentionLayer):
    """A layer with a convolution and a recurrent state, alone or beside K/V.

    It keeps the dtype that the model computes a state in (fp32 for gated DeltaNet, KDA and Mamba, whatever the weights are). A
    new state takes the old one's place instead of overwriting it: that one may be another row's.
    """

    is_compileable = False

    def __init__(self, is_sliding: bool, number_of_states: int) -> None:
        super().__init__(number_of_states=number_of_states)
        self.is_sliding = is_sliding

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Columns to convolve, [R, C, k + q] or (in a row's first step) [R, C, q]; the last k are kept.

        Args:
            conv_states: [R, C, q] of the new tokens.
            state_idx: which of the layer's states.
            conv_kernel_size: k; as many as there are columns by default.
            **kwargs: ignored.
        """
        columns, width = conv_states.detach(), conv_kernel_size or conv_states.shape[-1]
        if self.has_previous_state[state_idx]:
            columns = torch.cat([self.conv_states[state_idx], columns], dim=-1)
        kept = torch.nn.functional.pad(columns, (max(width - columns.shape[-1], 0), 0))[..., -width:]
        first = not self.has_previous_state[state_idx]
        self.conv_states[state_idx] = kept.clone(memory_format=torch.contiguous_format)
        self.is_conv_states_initialized[state_idx] = self.has_previous_state[state_idx] = True
        # As transformers does: a first step shorter than the convolution sees its padding.
        return kept if first and columns.shape[-1] < width else columns

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """The state after the step, [R, ...]."""
        old, new = self.recurrent_states[state_idx], recurrent_states.detach()
        self.recurrent_states[state_idx] = new if old is None else new.to(old.dtype)
        self.is_recurrent_states_initialized[state_idx] = True
        return self.recurrent_states[state_idx]


def make_layers(kinds: list[CacheLayer]) -> list[MarkedLayer | StateLayer]:
    """A layer of the cache for each of the model's."""
    return [
        StateLayer(kind.window is not None, kind.states) if kind.states else MarkedLayer(kind.window is not None)
        for kind in kinds
    ]
