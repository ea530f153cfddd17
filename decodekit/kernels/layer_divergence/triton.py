"""Jensen-Shannon divergence of candidate layers in Triton: each distribution is read once, nothing in between is written."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from decodekit.kernels.layer_divergence.reference import Divergence

_TOKENS = 2048  # of the vocabulary a program


def layer_divergence(final: Tensor, early: Tensor, divergence: Divergence = "jsd") -> Tensor:
    """As the reference, in float32; both tensors are contiguous in their last dimension."""
    layers, positions, vocab_size = early.shape
    chunks = triton.cdiv(vocab_size, _TOKENS)
    parts = early.new_empty((layers, positions, chunks), dtype=final.dtype)
    _diverge[(chunks, positions)](
        final,
        early,
        parts,
        final.stride(0),
        *early.stride()[:2],
        layers,
        positions,
        vocab_size,
        OFFICIAL=divergence == "official",
        TOKENS=_TOKENS,
        num_warps=8,
    )
    return parts.sum(-1)


@triton.jit
def _diverge(
    final,
    early,
    parts,
    stride_fp,
    stride_ec,
    stride_ep,
    layers,
    positions,
    vocab_size,
    OFFICIAL: tl.constexpr,
    TOKENS: tl.constexpr,
):
    chunk, position = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    there = token < vocab_size
    log_p = tl.load(final + position * stride_fp + token, mask=there, other=float("-inf")).to(tl.float32)
    p = tl.exp(log_p)
    early += position * stride_ep + token
    parts += position * tl.num_programs(0) + chunk
    for _ in range(layers):
        log_q = tl.load(early, mask=there, other=float("-inf")).to(tl.float32)
        q = tl.exp(log_q)
        mixture = 0.5 * (p + q)
        log_m = tl.log(mixture)
        # A token without mass adds nothing; 0 * -inf would be NaN.
        if OFFICIAL:
            terms = tl.where(mixture > 0, mixture * (2 * log_m - log_p - log_q), 0.0)
        else:
            terms = tl.where(p > 0, p * (log_p - log_m), 0.0) + tl.where(q > 0, q * (log_q - log_m), 0.0)
        tl.store(parts, (0.5 * tl.sum(terms, 0)).to(parts.dtype.element_ty))
        early += stride_ec
        parts += positions * tl.num_programs(0)
