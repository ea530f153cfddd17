"""Sampling in plain torch, with a sort."""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    counters: Tensor,
    logprobs: Tensor | None = None,
    broken: Tensor | None = None,
) -> Tensor:
    """Draw one token a row by inverse CDF, in vocabulary order, from what the filters leave, applied in this order.

    Equal logits are kept by lowest id. The draw is the first uniform of Philox4x32-10, as ``tl.rand`` maps it.

    Args:
        logits: [P, V]; a row whose largest is NaN or not finite has no token to draw, and gets 0.
        temperature: [P] float32; 0 takes the most likely token.
        top_k: [P] int32, tokens to keep, V or more for all (Fan et al., 2018, arXiv:1805.04833).
        top_p: [P] float32, least mass of the most likely tokens to keep; 1 for all (Holtzman et al., 2020, arXiv:1904.09751).
        min_p: [P] float32, least share of the best token's probability; 0 for all (Nguyen et al., 2024, arXiv:2407.01082).
        seeds: [P] int64, Philox keys.
        counters: [P, 4] int32, Philox counters.
        logprobs: [P] floating, filled with the log-probability (nats) of each drawn token among those that are left; NaN
            where there is none.
        broken: [P] bool, filled with which rows have no token to draw.

    Returns:
        [P] int64.
    """
    vocab_size = logits.shape[1]
    top_k = torch.where(temperature == 0, 1, top_k).clamp(max=vocab_size)
    scaled = logits.double() / torch.where(temperature == 0, 1.0, temperature).double().unsqueeze(1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(vocab_size, device=logits.device).expand_as(order))
    best = scaled.amax(-1, keepdim=True)
    without = ~best.squeeze(1).isfinite()
    weights = (scaled - best).exp().masked_fill_(rank >= top_k.unsqueeze(1), 0.0)
    # The mass of the tokens before this one: the token that passes p is still kept.
    leading = weights.gather(1, order)
    before = leading.cumsum(-1) - leading
    enough = before >= top_p.double().unsqueeze(1) * weights.sum(-1, keepdim=True)
    enough[:, 0] = False
    weights.masked_fill_(enough.gather(1, rank) & (top_p < 1).unsqueeze(1), 0.0)
    weights.masked_fill_(scaled < best + min_p.double().log().unsqueeze(1), 0.0)
    cumulative = weights.cumsum(-1)
    target = uniforms(seeds, counters).double().unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=vocab_size - 1)
    if logprobs is not None:
        logprobs.copy_((weights.gather(1, tokens).squeeze(1) / cumulative[:, -1]).log())
    if broken is not None:
        broken.copy_(without)
    return tokens.squeeze(1).masked_fill_(without, 0)


def uniforms(seeds: Tensor, counters: Tensor) -> Tensor:
    """[P] float32 in [0, 1): Philox4x32-10 (Salmon et al., 2011), mapped as ``tl.uint_to_uniform_float`` does."""
    words = [column & _MASK for column in counters.long().unbind(1)]
    keys = [seeds & _MASK, seeds >> 32 & _MASK]
    for _ in range(10):
        (high0, low0), (high1, low1) = (_product(m, word) for m, word in zip(_MULTIPLIERS, words[::2], strict=True))
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
        keys = [key + weyl & _MASK for key, weyl in zip(keys, _WEYL, strict=True)]
    signed = torch.where(words[0] > _MASK >> 1, words[0] - _MASK - 1, words[0])
    return torch.where(signed < 0, -signed - 1, signed).float() * 4.6566127342e-10


def _product(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of two 32-bit numbers, which int64 cannot hold."""
    low, high = (word & 0xFFFF) * multiplier, (word >> 16) * multiplier
    high, low = high + (low >> 16), low & 0xFFFF
    return high >> 16, (high & 0xFFFF) << 16 | low
