"""Contrasts of distributions in Triton: no log-probabilities are ever written.

Parts of the vocabulary are summed up first, each by a program of its own; whoever reads logits after that puts the sums of
their row together again.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from decodekit.kernels.contrast.reference import Divergence, Form

_TOKENS = 2048  # of the vocabulary a program


def contrast(
    expert: Tensor,
    amateur: Tensor,
    weight: float | Tensor,
    form: Form = "logits",
    *,
    share: float = 0.0,
    temperature: float = 1.0,
) -> Tensor:
    """As the reference, in float32; the last dimension of all tensors is contiguous."""
    positions, vocab_size = expert.shape
    output = expert.new_empty(expert.shape)
    chunks = triton.cdiv(vocab_size, _TOKENS)
    sums = _summed(expert, amateur.unsqueeze(0), 1 / temperature) if share or form != "logits" else None
    _contrast[(chunks, positions)](
        expert,
        amateur,
        sums,
        weight.contiguous() if isinstance(weight, Tensor) else None,
        0.0 if isinstance(weight, Tensor) else float(weight),
        output,
        expert.stride(0),
        amateur.stride(0),
        positions,
        vocab_size,
        1 / temperature,
        math.log(share) if share else 0.0,
        FORM=form,
        PLAUSIBLE=share > 0,
        CHUNKS=triton.next_power_of_2(chunks),
        TOKENS=_TOKENS,
        num_warps=8,
    )
    return output


def contrast_layers(
    final: Tensor, early: Tensor, *, share: float = 0.0, divergence: Divergence = "jsd"
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference, in float32; the last dimension of both tensors is contiguous."""
    layers, positions, vocab_size = early.shape
    sums = _summed(final, early)
    parts = _diverged(final, early, sums, divergence)
    output, apart = final.new_empty(final.shape), final.new_empty(positions)
    chosen = final.new_empty(positions, dtype=torch.int64)
    chunks = parts.shape[-1]
    _contrast_layers[(chunks, positions)](
        final,
        early,
        sums,
        parts,
        output,
        chosen,
        apart,
        final.stride(0),
        *early.stride()[:2],
        layers,
        positions,
        vocab_size,
        math.log(share) if share else 0.0,
        PLAUSIBLE=share > 0,
        LAYERS=triton.next_power_of_2(layers),
        CHUNKS=triton.next_power_of_2(chunks),
        TOKENS=_TOKENS,
        num_warps=8,
    )
    return output, chosen, apart


def layer_divergence(final: Tensor, early: Tensor, divergence: Divergence = "jsd") -> Tensor:
    """As the reference, in float32; the last dimension of both tensors is contiguous."""
    return _diverged(final, early, _summed(final, early), divergence).sum(-1).to(final.dtype)


def _summed(final: Tensor, early: Tensor, inverse: float = 1.0) -> Tensor:
    """[2, 1 + C, P, chunks] float32 of the final and the early logits: the largest of a part, and the sum beside it."""
    layers, positions, vocab_size = early.shape
    chunks = triton.cdiv(vocab_size, _TOKENS)
    sums = final.new_empty((2, 1 + layers, positions, chunks), dtype=torch.float32)
    _sum[(chunks, positions, 1 + layers)](
        final,
        early,
        sums,
        final.stride(0),
        *early.stride()[:2],
        positions,
        vocab_size,
        inverse,
        TOKENS=_TOKENS,
        num_warps=8,
    )
    return sums


def _diverged(final: Tensor, early: Tensor, sums: Tensor, divergence: Divergence) -> Tensor:
    """[C, P, chunks] float32: what each part of the vocabulary adds to the divergence."""
    layers, positions, vocab_size = early.shape
    chunks = sums.shape[-1]
    parts = sums.new_empty((layers, positions, chunks))
    _diverge[(chunks, positions, layers)](
        final,
        early,
        sums,
        parts,
        final.stride(0),
        *early.stride()[:2],
        layers,
        positions,
        vocab_size,
        OFFICIAL=divergence == "official",
        CHUNKS=triton.next_power_of_2(chunks),
        TOKENS=_TOKENS,
        num_warps=8,
    )
    return parts


@triton.jit
def _numbers(logits, chunk, vocab_size, TOKENS: tl.constexpr):
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    return tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _keep(output, scores, chunk, vocab_size, TOKENS: tl.constexpr):
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    tl.store(output + token, scores.to(output.dtype.element_ty), mask=token < vocab_size)


@triton.jit
def _sum(
    final,
    early,
    sums,
    stride_fp,
    stride_ec,
    stride_ep,
    positions,
    vocab_size,
    inverse,
    TOKENS: tl.constexpr,
):
    chunk, position, layer = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    if layer == 0:
        number = _numbers(final + position * stride_fp, chunk, vocab_size, TOKENS)
    else:
        number = _numbers(early + (layer - 1) * stride_ec + position * stride_ep, chunk, vocab_size, TOKENS) * inverse
    peak = tl.max(number, 0)
    # Without any number, the difference would be NaN.
    total = tl.sum(tl.where(number == float("-inf"), 0.0, tl.exp(number - peak)), 0)
    place = sums + (layer * positions + position) * tl.num_programs(0) + chunk
    tl.store(place, peak)
    tl.store(place + tl.num_programs(2) * positions * tl.num_programs(0), total)


@triton.jit
def _log_sum(sums, layer, layers, position, positions, chunks, CHUNKS: tl.constexpr):
    """The largest logit of a row, and the logarithm of the sum of all their exponentials."""
    chunk = tl.arange(0, CHUNKS)
    place = sums + (layer * positions + position) * chunks + chunk
    peaks = tl.load(place, mask=chunk < chunks, other=float("-inf"))
    totals = tl.load(place + (1 + layers) * positions * chunks, mask=chunk < chunks, other=0.0)
    peak = tl.max(peaks, 0)
    return peak, peak + tl.log(tl.sum(tl.where(peaks == float("-inf"), totals, totals * tl.exp(peaks - peak)), 0))


@triton.jit
def _weighted(weight, number):
    """Without a weight, also infinity is nothing."""
    return tl.where(weight == 0, 0.0, weight * number)


@triton.jit
def _contrast(
    expert,
    amateur,
    sums,
    weights,
    weight,
    output,
    stride_e,
    stride_a,
    positions,
    vocab_size,
    inverse,
    floor,
    FORM: tl.constexpr,
    PLAUSIBLE: tl.constexpr,
    CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    chunk, position, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    if weights is not None:
        weight = tl.load(weights + position).to(tl.float32)
    given = _numbers(expert + position * stride_e, chunk, vocab_size, TOKENS)
    other = _numbers(amateur + position * stride_a, chunk, vocab_size, TOKENS) * inverse
    excluded = given == float("-inf")
    if sums is not None:
        peak, whole = _log_sum(sums, 0, 1, position, positions, chunks, CHUNKS)
        if PLAUSIBLE:
            excluded = excluded | (given < peak + floor)
    if FORM == "logits":
        scores = (1 + weight) * given - _weighted(weight, other)
    else:
        _, whole_other = _log_sum(sums, 1, 1, position, positions, chunks, CHUNKS)
        given, other = given - whole, other - whole_other
        if FORM == "ratio":
            scores = given - _weighted(weight, other)
        else:
            scores = _weighted(weight, given) + _weighted(1 - weight, other)
    scores = tl.where(excluded, float("-inf"), scores)
    _keep(output + position * vocab_size, scores, chunk, vocab_size, TOKENS)


@triton.jit
def _diverge(
    final,
    early,
    sums,
    parts,
    stride_fp,
    stride_ec,
    stride_ep,
    layers,
    positions,
    vocab_size,
    OFFICIAL: tl.constexpr,
    CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    chunk, position, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    layer = tl.program_id(2).to(tl.int64)
    _, whole = _log_sum(sums, 0, layers, position, positions, chunks, CHUNKS)
    _, whole_early = _log_sum(sums, layer + 1, layers, position, positions, chunks, CHUNKS)
    log_p = _numbers(final + position * stride_fp, chunk, vocab_size, TOKENS) - whole
    log_q = _numbers(early + layer * stride_ec + position * stride_ep, chunk, vocab_size, TOKENS) - whole_early
    p, q = tl.exp(log_p), tl.exp(log_q)
    mixture = 0.5 * (p + q)
    log_m = tl.log(mixture)
    # A token without mass adds nothing; 0 * -inf would be NaN.
    if OFFICIAL:
        terms = tl.where(mixture > 0, mixture * (2 * log_m - log_p - log_q), 0.0)
    else:
        terms = tl.where(p > 0, p * (log_p - log_m), 0.0) + tl.where(q > 0, q * (log_q - log_m), 0.0)
    tl.store(parts + (layer * positions + position) * chunks + chunk, 0.5 * tl.sum(terms, 0))


@triton.jit
def _contrast_layers(
    final,
    early,
    sums,
    parts,
    output,
    chosen,
    apart,
    stride_fp,
    stride_ec,
    stride_ep,
    layers,
    positions,
    vocab_size,
    floor,
    PLAUSIBLE: tl.constexpr,
    LAYERS: tl.constexpr,
    CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    own, position, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    layer, chunk = tl.arange(0, LAYERS), tl.arange(0, CHUNKS)
    place = (layer[:, None] * positions + position) * chunks + chunk[None, :]
    there = (layer < layers)[:, None] & (chunk < chunks)[None, :]
    divergence = tl.sum(tl.load(parts + place, mask=there, other=0.0), 1)
    divergence = tl.where(layer < layers, divergence, float("-inf"))
    most = tl.max(divergence, 0)
    # Where none is the largest, there is NaN, and any layer's result is.
    first = tl.minimum(tl.min(tl.where(divergence == most, layer, LAYERS), 0), layers - 1)
    if own == 0:
        tl.store(chosen + position, first.to(tl.int64))
        tl.store(apart + position, most.to(apart.dtype.element_ty))
    peak, whole = _log_sum(sums, 0, layers, position, positions, chunks, CHUNKS)
    _, whole_early = _log_sum(sums, first + 1, layers, position, positions, chunks, CHUNKS)
    given = _numbers(final + position * stride_fp, own, vocab_size, TOKENS)
    early += first.to(tl.int64) * stride_ec + position * stride_ep
    other = _numbers(early, own, vocab_size, TOKENS)
    excluded = given == float("-inf")
    if PLAUSIBLE:
        excluded = excluded | (given < peak + floor)
    scores = tl.where(excluded, float("-inf"), (given - whole) - (other - whole_early))
    _keep(output + position * vocab_size, scores, own, vocab_size, TOKENS)
