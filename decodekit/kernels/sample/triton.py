"""Sampling in Triton: thresholds are searched among the few tokens that may lie at them, nothing is sorted.

Passes over the vocabulary, a part of it each program: the best token; how many tokens weigh how much near it; those among
which a filter ends, put together in order; what the filters leave of each part. Between them, one program a row finds where
the filters end, and at last one draws.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 2048  # of the vocabulary a program
_FEW, _MANY = 1024, 8192  # tokens that the search looks at at a time, where there are few and where there are more
_BOUNDS = tl.constexpr(16)  # distances from the best token at which is counted


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
    """As the reference, but in float32; ``logits`` are contiguous in their last dimension."""
    positions, vocab_size = logits.shape
    heat, most, nucleus, share = (option.contiguous() for option in (temperature, top_k, top_p, min_p))
    tokens = torch.empty(positions, dtype=torch.int64, device=logits.device)
    block = min(_TOKENS, triton.next_power_of_2(vocab_size))
    chunks = triton.cdiv(vocab_size, block)

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty((positions, *shape), dtype=dtype, device=logits.device)

    peaks, counts, masses = (
        scratch(chunks),
        scratch(_BOUNDS.value, chunks),
        scratch(_BOUNDS.value, chunks, dtype=torch.float32),
    )
    keys, ids, border, left = scratch(vocab_size), scratch(vocab_size), scratch(2), scratch(chunks, dtype=torch.float32)
    grid, where = (chunks, positions), (logits, logits.stride(0), vocab_size)
    part = {"TOKENS": block, "num_warps": max(1, min(8, block // 128))}
    row = {"CHUNKS": triton.next_power_of_2(chunks)}
    _peak[grid](*where, peaks, **part)
    _weigh[grid](*where, heat, peaks, counts, masses, **row, **part)
    _gather[grid](*where, heat, most, nucleus, peaks, counts, masses, keys, ids, **row, **part)
    of_row = peaks, counts, masses, keys, ids, border
    _end[(positions,)](
        heat, most, nucleus, *of_row, vocab_size, chunks, FEW=_FEW, MANY=_MANY, **row, num_warps=max(1, _MANY // 512)
    )
    kept = heat, share, peaks, border, left
    _leave[grid](*where, *kept, **row, **part)
    _draw[(positions,)](
        *where, *kept, seeds.contiguous(), counters.contiguous(), tokens, logprobs, broken, chunks, **row, **part
    )
    return tokens


@triton.jit
def _key(number):
    """Of float32, an int32 of the same order."""
    bits = (number + 0.0).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load(keys, start, count, best, inverse, TOKENS: tl.constexpr):
    """Keys from ``start`` on, and their weights; 0 behind the last."""
    place = start + tl.arange(0, TOKENS)
    key = tl.load(keys + place, mask=place < count, other=-2147483648)
    return key, tl.where(place < count, tl.exp((_number(key) - best) * inverse), 0.0)


@triton.jit
def _above(keys, count, pivot, best, inverse, TOKENS: tl.constexpr):
    """How many keys are at least ``pivot``, and what they weigh."""
    number, mass = 0, 0.0
    for start in range(0, count, TOKENS):
        key, weight = _load(keys, start, count, best, inverse, TOKENS)
        number += tl.sum((key >= pivot).to(tl.int32), 0)
        mass += tl.sum(tl.where(key >= pivot, weight, 0.0), 0)
    return number, mass


@triton.jit
def _add(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _threshold(keys, count, target, low, high, best, inverse, MASS: tl.constexpr, TOKENS: tl.constexpr):
    """The largest key in ``[low, high]`` such that those at least as large are ``target`` many, or weigh as much."""
    # The first are kept in registers: seldom there are others.
    first, first_weight = _load(keys, 0, count, best, inverse, TOKENS)
    if not MASS:
        first_weight = (tl.arange(0, TOKENS) < count).to(tl.float32)
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        quarter = (high - low + 4) >> 2
        one = low + quarter
        two, three = tl.minimum(one + quarter, high + 1), tl.minimum(one + 2 * quarter, high + 1)
        sum_one = tl.where(first >= one, first_weight, 0.0)
        sum_two = tl.where(first >= two, first_weight, 0.0)
        sum_three = tl.where(first >= three, first_weight, 0.0)
        for start in range(TOKENS, count, TOKENS):
            key, weight = _load(keys, start, count, best, inverse, TOKENS)
            if not MASS:
                weight = (start + tl.arange(0, TOKENS) < count).to(tl.float32)
            sum_one += tl.where(key >= one, weight, 0.0)
            sum_two += tl.where(key >= two, weight, 0.0)
            sum_three += tl.where(key >= three, weight, 0.0)
        found_one, found_two, found_three = tl.reduce((sum_one, sum_two, sum_three), 0, _add)
        if (three <= high) & (found_three >= target):
            low = three
        elif (two <= high) & (found_two >= target):
            low, high = two, three - 1
        elif found_one >= target:
            low, high = one, two - 1
        else:
            high = one - 1
    return low.to(tl.int32)


@triton.jit
def _numbers(logits, stride, vocab_size, row, chunk, TOKENS: tl.constexpr):
    """A part of the vocabulary, and its logits."""
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    return token, tl.load(logits + row * stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _inverse(temperature, row):
    heat = tl.load(temperature + row)
    return 1.0 / tl.where(heat == 0, 1.0, heat)


@triton.jit
def _wanted(temperature, top_k, row, vocab_size):
    return tl.where(tl.load(temperature + row) == 0, 1, tl.minimum(tl.load(top_k + row), vocab_size))


@triton.jit
def _best(peaks, row, chunks, CHUNKS: tl.constexpr):
    """The largest logit; NaN where there is one."""
    chunk = tl.arange(0, CHUNKS)
    return _number(tl.max(tl.load(peaks + row * chunks + chunk, mask=chunk < chunks, other=-2147483648), 0))


@triton.jit
def _bounds(best, inverse):
    """[BOUNDS] logits: ever less dense from the best one on, the last below all that have a weight in single precision."""
    step = tl.arange(0, _BOUNDS) + 1
    return best - tl.where(step < _BOUNDS, 0.1 * (step * step).to(tl.float32), 104.0) / inverse


@triton.jit
def _peak(logits, stride, vocab_size, peaks, TOKENS: tl.constexpr):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, number = _numbers(logits, stride, vocab_size, row, chunk, TOKENS)
    key = tl.where(number != number, 2147483647, _key(number))  # noqa: PLR0124  only NaN differs from itself
    tl.store(peaks + row * tl.num_programs(0) + chunk, tl.max(key, 0))


@triton.jit
def _weigh(
    logits,
    stride,
    vocab_size,
    temperature,
    peaks,
    counts,
    masses,
    CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    inverse, best = _inverse(temperature, row), _best(peaks, row, chunks, CHUNKS)
    _, number = _numbers(logits, stride, vocab_size, row, chunk, TOKENS)
    weight = tl.exp((number - best) * inverse)
    inside = number[:, None] >= _bounds(best, inverse)[None, :]
    place = (row * _BOUNDS + tl.arange(0, _BOUNDS)) * chunks + chunk
    tl.store(counts + place, tl.sum(inside.to(tl.int32), 0))
    tl.store(masses + place, tl.sum(tl.where(inside, weight[:, None], 0.0), 0))


@triton.jit
def _bound(best, inverse, wanted, nucleus, vocab_size, counts, masses, row, chunks, CHUNKS: tl.constexpr):
    """Which bound holds all that the filters keep; the bound; how many tokens it holds, and the mass of all tokens."""
    which, chunk = tl.arange(0, _BOUNDS), tl.arange(0, CHUNKS)
    place = (row * _BOUNDS + which[:, None]) * chunks + chunk[None, :]
    there = (chunk < chunks)[None, :]
    count = tl.sum(tl.load(counts + place, mask=there, other=0), 1)
    mass = tl.sum(tl.load(masses + place, mask=there, other=0.0), 1)
    total = tl.max(mass, 0)
    # The nucleus of the k best lies among the k best; without a k it weighs this much, and more than rounding can lose.
    enough = tl.where(wanted < vocab_size, count >= wanted, mass >= total * (nucleus + 1e-4))
    first = tl.min(tl.where(enough, which, _BOUNDS - 1), 0)
    bound = tl.max(tl.where(which == first, _bounds(best, inverse), float("-inf")), 0)
    return first, bound, tl.sum(tl.where(which == first, count, 0), 0), total


@triton.jit
def _gather(
    logits,
    stride,
    vocab_size,
    temperature,
    top_k,
    top_p,
    peaks,
    counts,
    masses,
    keys,
    ids,
    CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    own, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    wanted, nucleus = _wanted(temperature, top_k, row, vocab_size), tl.load(top_p + row)
    if (wanted < vocab_size) | (nucleus < 1):
        inverse, best = _inverse(temperature, row), _best(peaks, row, chunks, CHUNKS)
        which, bound, _, _ = _bound(best, inverse, wanted, nucleus, vocab_size, counts, masses, row, chunks, CHUNKS)
        chunk = tl.arange(0, CHUNKS)
        before = tl.load(counts + (row * _BOUNDS + which) * chunks + chunk, mask=chunk < own, other=0)
        token, number = _numbers(logits, stride, vocab_size, row, own, TOKENS)
        inside = (token < vocab_size) & (number >= bound)
        place = row * vocab_size + tl.sum(before, 0) + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(keys + place, _key(number), mask=inside)
        tl.store(ids + place, token, mask=inside)


@triton.jit
def _end(
    temperature,
    top_k,
    top_p,
    peaks,
    counts,
    masses,
    keys,
    ids,
    border,
    vocab_size,
    chunks,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Where top-k and top-p end: the least key that is kept, and the last token that is kept of those that have it."""
    row = tl.program_id(0).to(tl.int64)
    wanted, nucleus = _wanted(temperature, top_k, row, vocab_size), tl.load(top_p + row)
    threshold, last = -2147483648, vocab_size
    if (wanted < vocab_size) | (nucleus < 1):
        inverse, best = _inverse(temperature, row), _best(peaks, row, chunks, CHUNKS)
        _, bound, count, total = _bound(best, inverse, wanted, nucleus, vocab_size, counts, masses, row, chunks, CHUNKS)
        keys += row * vocab_size
        ids += row * vocab_size
        if count <= FEW:
            threshold, last = _search(keys, ids, count, wanted, nucleus, vocab_size, bound, total, best, inverse, FEW)
        else:
            threshold, last = _search(keys, ids, count, wanted, nucleus, vocab_size, bound, total, best, inverse, MANY)
    tl.store(border + 2 * row, threshold)
    tl.store(border + 2 * row + 1, last)


@triton.jit
def _search(keys, ids, count, wanted, nucleus, vocab_size, bound, total, best, inverse, TOKENS: tl.constexpr):
    threshold, high, ties = _key(bound), _key(best), vocab_size
    if wanted < vocab_size:
        threshold = _threshold(keys, count, wanted, threshold, high, best, inverse, False, TOKENS)
        number, above = _above(keys, count, threshold + 1, best, inverse, TOKENS)
        ties = wanted - number
        total = above + ties * tl.exp((_number(threshold) - best) * inverse)
    if nucleus < 1:
        target = nucleus * total
        number, above = _above(keys, count, threshold + 1, best, inverse, TOKENS)
        if above >= target:
            threshold = _threshold(keys, count, target, threshold + 1, high, best, inverse, True, TOKENS)
            number, above = _above(keys, count, threshold + 1, best, inverse, TOKENS)
            ties = vocab_size
        missing = tl.ceil((target - above) * tl.exp((best - _number(threshold)) * inverse))
        ties = tl.minimum(ties, tl.maximum(missing, 1.0).to(tl.int32))
    place = _last_tie(keys, count, threshold, ties, TOKENS)
    return threshold, tl.load(ids + place, mask=place < count, other=vocab_size)


@triton.jit
def _last_tie(keys, count, threshold, ties, TOKENS: tl.constexpr):
    """The place of the ``ties``-th key that equals ``threshold``, or one behind them all."""
    offset = tl.arange(0, TOKENS)
    last, found = count, 0
    for start in range(0, count, TOKENS):
        place = start + offset
        tie = (tl.load(keys + place, mask=place < count, other=-2147483648) == threshold) & (place < count)
        more = tl.sum(tie.to(tl.int32), 0)
        if (found < ties) & (found + more >= ties):
            rank = found + tl.cumsum(tie.to(tl.int32), 0)
            last = tl.min(tl.where(tie & (rank == ties), place, count), 0)
        found += more
    return last


@triton.jit
def _kept(logits, stride, vocab_size, heat, min_p, border, best, row, chunk, TOKENS: tl.constexpr):
    """The logits of a part of the vocabulary, and the weights of those that are kept, 0 of the others."""
    inverse, threshold, last = _inverse(heat, row), tl.load(border + 2 * row), tl.load(border + 2 * row + 1)
    token, number = _numbers(logits, stride, vocab_size, row, chunk, TOKENS)
    key, floor = _key(number), best + tl.log(tl.load(min_p + row)) / inverse
    kept = ((key > threshold) | ((key == threshold) & (token <= last))) & (number >= floor) & (token < vocab_size)
    return number, tl.where(kept, tl.exp((number - best) * inverse), 0.0)


@triton.jit
def _leave(
    logits,
    stride,
    vocab_size,
    temperature,
    min_p,
    peaks,
    border,
    left,
    CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    best = _best(peaks, row, chunks, CHUNKS)
    _, weight = _kept(logits, stride, vocab_size, temperature, min_p, border, best, row, chunk, TOKENS)
    tl.store(left + row * chunks + chunk, tl.sum(weight, 0))


@triton.jit
def _passing(weight, target, COUNT: tl.constexpr):
    """The first place up to which the weights add up to more than ``target``, and what those before it weigh.

    Never a place without mass, however the sums are rounded.
    """
    place = tl.arange(0, COUNT)
    end = tl.max(tl.where(weight > 0, place, 0), 0)
    chosen = tl.min(tl.where((tl.cumsum(weight, 0) > target) & (weight > 0), place, end), 0)
    return chosen, tl.sum(tl.where(place < chosen, weight, 0.0), 0)


@triton.jit
def _draw(
    logits,
    stride,
    vocab_size,
    temperature,
    min_p,
    peaks,
    border,
    left,
    seeds,
    counters,
    tokens,
    logprobs,
    broken,
    chunks,
    CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    counter = counters + row * 4
    word, _, _, _ = tl.philox(
        tl.load(seeds + row),
        tl.load(counter).to(tl.uint32, bitcast=True),
        tl.load(counter + 1).to(tl.uint32, bitcast=True),
        tl.load(counter + 2).to(tl.uint32, bitcast=True),
        tl.load(counter + 3).to(tl.uint32, bitcast=True),
    )
    chunk, best = tl.arange(0, CHUNKS), _best(peaks, row, chunks, CHUNKS)
    mass = tl.load(left + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    total = tl.sum(mass, 0)
    target = tl.uint_to_uniform_float(word) * total
    own, before = _passing(mass, target, CHUNKS)
    number, weight = _kept(logits, stride, vocab_size, temperature, min_p, border, best, row, own, TOKENS)
    place, _ = _passing(weight, target - before, TOKENS)
    finite = tl.abs(best) < float("inf")
    tl.store(tokens + row, tl.where(finite, own * TOKENS + place, 0).to(tl.int64))
    if broken is not None:
        tl.store(broken + row, ~finite)
    if logprobs is not None:
        drawn = tl.sum(tl.where(tl.arange(0, TOKENS) == place, number, 0.0), 0)
        tl.store(logprobs + row, (drawn - best) * _inverse(temperature, row) - tl.log(total))
