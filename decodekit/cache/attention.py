"""The attention function ``decodekit`` of transformers models: reads K/V from their blocks, where the cache wrote them.

Importing this module registers it, with the mask function of the same name. A model with
``set_attn_implementation("decodekit")`` whose forward is given ``dk_cache=step`` attends to the blocks of that step;
without the keyword it attends to the tensors that ``cache.update`` returned, as with ``sdpa``.

In a paged step ``update`` writes the new K/V and returns them as they are. Left pads need no mask: a row's length says
which of its queries are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from decodekit.core.errors import Refused
from decodekit.kernels.paged_attention import (
    KV,
    Part,
    QuantizedKV,
    Work,
    paged_attention,
    plan_attention,
    why_torch,
)

NAME = "decodekit"
"""The attention implementation's name, for ``set_attn_implementation``."""

NAME_WITHOUT_MASKS = "decodekit_blocks"
"""The same for forwards of one token a row and of packed rows: transformers makes no mask for it."""

NAME_OF_FEW = "decodekit_few"
"""For forwards of a few tokens a row over gathered K/V, where sdpa would copy the K/V for each of their query heads."""

_SCORE_CHANGES = ("position_bias", "sinks", "indices", "block_indices")
"""Keywords with which some models change the scores of single pairs of tokens, or choose among the keys."""


@dataclass(eq=False)
class Layout:
    """Where the tokens of one step's rows lie, for all layers that share block tables.

    R rows with q new tokens each, or, for a forward of one packed row, any number each. Tensors are best on the host.

    Attributes:
        block_table: [R, B] int, block ``i`` has tokens ``i * block_size`` and on; -1 where a window let go.
        lengths: [R] int, tokens of each row, the new ones included and left pads not.
        query_start: [R + 1] int, the new tokens of row r (with its left pads, if any) are ``query_start[r]`` to
            ``query_start[r + 1]``.
        block_size: tokens a block.
        window: tokens a query sees, itself included; ``None``: all.
        path: what attended to the blocks last: ``triton``, or ``torch`` and why.
    """

    block_table: Tensor
    lengths: Tensor
    query_start: Tensor
    block_size: int
    window: int | None = None
    path: str | None = field(default=None, init=False)
    _plans: dict[tuple[str | None, torch.dtype, int], Work | list[Part]] = field(
        default_factory=dict, init=False, repr=False
    )
    _checked: Tensor | None = field(default=None, init=False, repr=False)

    def parts(self, query: Tensor, keys: KV, values: KV) -> Work | list[Part]:
        """What is attended to together, for all layers whose heads are as many and whose tensors are alike."""
        reason = why_torch(query, keys, values)
        self.path = "triton" if reason is None else f"torch ({reason})"
        alike = reason, query.dtype, query.shape[1] // keys.shape[1]
        if alike not in self._plans:
            tables = self.block_table, self.lengths, self.query_start
            self._plans[alike] = plan_attention(
                query, keys, values, *tables, block_size=self.block_size, window=self.window
            )
        return self._plans[alike]

    def check_mask(self, mask: Tensor | None, query_length: int) -> None:
        """Refuse a mask under which tokens see other than the last ``window`` tokens of their own row.

        Args:
            mask: [R, 1, q, T] bool, made by transformers for the rows at hand; ``None``: causal.
            query_length: q.
        """
        if mask is None or mask is self._checked or mask.shape[0] != len(self.lengths):
            return
        if torch.compiler.is_compiling():  # a graph cannot branch on what a mask holds
            return
        position = self.lengths[:, None] - query_length + torch.arange(query_length)
        # Where the forward was given no padding mask, transformers takes all rows for as long as the longest.
        longest = position.amax(0, keepdim=True)
        seen = mask.sum(-1)[:, 0].to("cpu")
        window = torch.inf if self.window is None else self.window
        as_row, as_longest = (seen == (places + 1).clamp(max=window) for places in (position, longest))
        if mask.dtype != torch.bool or not ((position < 0) | as_row | as_longest).all():
            raise Refused(
                "the attention mask shows tokens other than the earlier ones of their row (packed rows, image blocks, a mask "
                "of one's own), which the paged attention does not read; use sdpa and a gathered cache"
            )
        self._checked = mask  # the layers of a group are given the same


class Step(Protocol):
    """What the attention asks of a forward that a paged cache has begun.

    A model whose attention does not come from transformers' ``AttentionInterface`` (Bloom), or that does not hand the forward
    keyword down (StableLM), asks for nothing and sees the new tokens only: a step in which layers were written that never
    asked for :meth:`kv` has gone wrong and must not be committed.
    """

    def layout(self, layer_idx: int) -> Layout:
        """Where the rows' tokens lie in this layer; the same object for all layers of a cache group."""

    def kv(self, layer_idx: int) -> tuple[KV, KV]:
        """This layer's storage, [S, Hk, D] and [S, Hk, Dv], as numbers or quantized, the new tokens' K/V included.

        Slot ``s`` is token ``s % block_size`` of block ``s // block_size``.
        """


def check_config(config: Any) -> None:
    """Refuse models whose attention cannot read blocks.

    Args:
        config: a model's, also a multimodal one.

    Raises:
        Refused: with the reason; a gathered cache serves them.
    """
    config = config.get_text_config(decoder=True)
    reason = None
    if getattr(config, "kv_lora_rank", None) is not None:
        reason = "caches latents (MLA) and expands them after the cache's update, so no block holds its K/V"
    elif getattr(config, "num_kv_shared_layers", 0):
        reason = "has layers that attend to other layers' K/V"
    elif "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        reason = "attends in chunks"
    elif config.model_type == "diffllama":
        reason = "exchanges halves of its values after the cache's update"
    if reason:
        raise Refused(f"{config.model_type} {reason}: it cannot use paged attention; use a gathered cache")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    dk_cache: Step | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a transformers module, over the blocks of ``dk_cache`` if the forward was given one.

    R rows (1 where they are packed), q new tokens, Hq query heads and Hk K/V heads.

    Args:
        module: the attention module; it knows its layer.
        query: [R, Hq, q, D].
        key: [R, Hk, q, D] what ``update`` returned.
        value: [R, Hk, q, Dv].
        attention_mask: [R, 1, q, T] bool; read only without ``dk_cache``, else checked.
        scaling: of the scores; ``None``: ``D ** -0.5``.
        dropout: must be 0 over blocks.
        softcap: see :func:`~decodekit.kernels.paged_attention.paged_attention`.
        s_aux: [Hq] sinks, as there.
        sliding_window: tokens a query sees, if the module tells.
        is_causal: whether tokens see only earlier ones; ``None``: what the module says. Others (an image encoder's) never
            use blocks.
        dk_cache: the step.
        kwargs: of other attention functions.

    Returns:
        [R, q, Hq, Dv], and ``None`` for the probabilities.

    Raises:
        Refused: something that the blocks cannot serve.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    kind = type(module).__name__
    if dk_cache is None or not causal:
        if softcap is not None or s_aux is not None:
            raise Refused(f"{kind} with attention {NAME} needs a paged step (dk_cache=...); without one use eager")
        return _sdpa(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    if dropout:
        raise Refused(f"{kind} has a dropout of {dropout}, which paged attention does not have; call model.eval()")
    if changes := [name for name in _SCORE_CHANGES if kwargs.get(name) is not None]:
        raise Refused(f"{kind} uses {changes[0]}, which paged attention does not have; use a gathered cache")
    number: Any = module.layer_idx
    layout = dk_cache.layout(number)
    keys, values = dk_cache.kv(number)
    if (key.shape[1::2], value.shape[1::2]) != (keys.shape[1:], values.shape[1:]):
        raise Refused(
            f"{kind} changes its K/V after the cache's update, from {list(keys.shape[1:])} and {list(values.shape[1:])} to "
            f"{list(key.shape[1::2])} and {list(value.shape[1::2])} (heads, width), as MLA does when it expands latents: no "
            "block holds them; use a gathered cache"
        )
    if sliding_window is not None and sliding_window != layout.window:
        raise Refused(f"layer {number} has a window of {sliding_window}, its cache one of {layout.window}")
    layout.check_mask(attention_mask, query.shape[2])
    flat = query.transpose(1, 2).flatten(0, 1)
    if isinstance(keys, QuantizedKV) and (reason := why_torch(flat, keys, values)) is not None:
        # Plain torch would dequantize them part by part; gathered, they are dequantized in one go.
        raise Refused(f"{reason}: quantized K/V are to be gathered")
    output = paged_attention(
        flat,
        keys,
        values,
        layout.block_table,
        layout.lengths,
        layout.query_start,
        block_size=layout.block_size,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=layout.window,
        softcap=softcap,
        sinks=s_aux,
        parts=layout.parts(flat, keys, values),
    )
    return output.unflatten(0, (query.shape[0], query.shape[2])), None


def attention_of_few(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As ``sdpa``, which repeats K/V heads under a mask; here the query heads of one are more queries of it.

    Args:
        module: the attention module.
        query: [R, Hq, q, D].
        key: [R, Hk, T, D].
        value: [R, Hk, T, Dv].
        attention_mask: [R, 1, q, T].
        kwargs: as of sdpa.

    Returns:
        [R, q, Hq, Dv], and ``None`` for the probabilities.
    """
    groups = query.shape[1] // key.shape[1]
    changed = any(kwargs.get(name) is not None for name in ("softcap", "s_aux", *_SCORE_CHANGES))
    if groups == 1 or attention_mask is None or attention_mask.shape[1] > 1 or changed:
        return _sdpa(module, query, key, value, attention_mask, **kwargs)
    output = nn.functional.scaled_dot_product_attention(
        query.reshape(query.shape[0], key.shape[1], groups * query.shape[2], -1),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, groups, 1),
        dropout_p=kwargs.get("dropout", 0.0),
        scale=kwargs.get("scaling"),
    )
    return output.reshape(*query.shape[:-1], -1).transpose(1, 2).contiguous(), None


_sdpa = AttentionInterface()["sdpa"]
AttentionInterface.register(NAME, attention)
AttentionInterface.register(NAME_WITHOUT_MASKS, attention)
AttentionInterface.register(NAME_OF_FEW, attention_of_few)
AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])
AttentionMaskInterface.register(NAME_OF_FEW, AttentionMaskInterface()["sdpa"])
