"""Sampling in Triton: thresholds are searched among the few tokens that may stay, nothing is sorted.

Three passes over the vocabulary, a part of it each program: the best token; how many tokens weigh how much near it; and those
that may stay, put together in order. One program a row then finds the thresholds among them and draws.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 4096  # looked at at a time


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    counters: Tensor,
    logprobs: Tensor | None = None,
) -> Tensor:
    """As the reference, but in float32; ``logits`` are contiguous in their last dimension."""
    positions, vocab_size = logits.shape
    filters = [option.contiguous() for option in (temperature, top_k, top_p, min_p)]
    tokens = torch.empty(positions, dtype=torch.int64, device=logits.device)
    keys = torch.empty((positions, vocab_size), dtype=torch.int32, device=logits.device)
    ids = torch.empty_like(keys)
    block = min(_TOKENS, triton.next_power_of_2(vocab_size))
    chunks = triton.cdiv(vocab_size, block)
    peaks = torch.empty((positions, chunks), dtype=torch.float32, device=logits.device)
    counts = torch.empty((positions, 3, chunks), dtype=torch.int32, device=logits.device)
    masses = torch.empty((positions, 3, chunks), dtype=torch.float32, device=logits.device)
    options = {"TOKENS": block, "CHUNKS": triton.next_power_of_2(chunks)}
    grid, warps = (chunks, positions), max(1, min(8, block // 128))
    where = logits.stride(0), vocab_size
    _peak[grid](logits, peaks, *where, TOKENS=block, num_warps=warps)
    _weigh[grid](logits, filters[0], peaks, counts, masses, *where, **options, num_warps=warps)
    _gather[grid](logits, *filters[:3], peaks, counts, masses, keys, ids, *where, **options, num_warps=warps)
    _choose[(positions,)](
        *filters,
        seeds.contiguous(),
        counters.contiguous(),
        peaks,
        counts,
        masses,
        keys,
        ids,
        tokens,
        logprobs,
        vocab_size,
        chunks,
        **options,
        num_warps=max(1, min(32, block // 128)),
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
def _numbers(logits, stride, vocab_size, TOKENS: tl.constexpr):
    """The logits of this program's part of the vocabulary."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.program_id(1).to(tl.int64) * stride + token
    return tl.load(logits + place, mask=token < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _inverse(temperature, row):
    heat = tl.load(temperature + row)
    return 1.0 / tl.where(heat == 0, 1.0, heat)


@triton.jit
def _best(peaks, row, chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(peaks + row * chunks + chunk, mask=chunk < chunks, other=float("-inf")), 0)


@triton.jit
def _bounds(best, inverse):
    """Only tokens near the best one are looked at again: within 6 or 14 nats, or all that have a weight in single precision."""
    return best - 6 / inverse, best - 14 / inverse, best - 104 / inverse


@triton.jit
def _peak(logits, peaks, stride, vocab_size, TOKENS: tl.constexpr):
    best = tl.max(_numbers(logits, stride, vocab_size, TOKENS), 0)
    tl.store(peaks + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0), best)


@triton.jit
def _weigh(
    logits,
    temperature,
    peaks,
    counts,
    masses,
    stride,
    vocab_size,
    TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, chunks = tl.program_id(1).to(tl.int64), tl.num_programs(0)
    inverse = _inverse(temperature, row)
    best = _best(peaks, row, chunks, CHUNKS)
    number = _numbers(logits, stride, vocab_size, TOKENS)
    weight = tl.exp((number - best) * inverse)
    near, far, rest = _bounds(best, inverse)
    place = row * 3 * chunks + tl.program_id(0)
    tl.store(counts + place, tl.sum((number >= near).to(tl.int32), 0))
    tl.store(masses + place, tl.sum(tl.where(number >= near, weight, 0.0), 0))
    tl.store(counts + place + chunks, tl.sum((number >= far).to(tl.int32), 0))
    tl.store(masses + place + chunks, tl.sum(tl.where(number >= far, weight, 0.0), 0))
    tl.store(counts + place + 2 * chunks, tl.sum((number >= rest).to(tl.int32), 0))
    tl.store(masses + place + 2 * chunks, tl.sum(weight, 0))


@triton.jit
def _bound(best, inverse, wanted, nucleus, vocab_size, counts, masses, row, chunks, CHUNKS: tl.constexpr):
    """Which bound holds all that the filters keep, 0 to 2; the bound; and the mass of all tokens."""
    chunk = tl.arange(0, CHUNKS)
    there, place = chunk < chunks, row * 3 * chunks + chunk
    total = tl.sum(tl.load(masses + place + 2 * chunks, mask=there, other=0.0), 0)
    # The nucleus of the k best lies among the k best; without a k it weighs this much, and more than rounding can lose.
    needed = total * (nucleus + 1e-4)
    few = wanted < vocab_size
    near, far, bound = _bounds(best, inverse)
    which = 2
    far_number = tl.sum(tl.load(counts + place + chunks, mask=there, other=0), 0)
    far_mass = tl.sum(tl.load(masses + place + chunks, mask=there, other=0.0), 0)
    if tl.where(few, far_number >= wanted, far_mass >= needed):
        which, bound = 1, far
    near_number = tl.sum(tl.load(counts + place, mask=there, other=0), 0)
    near_mass = tl.sum(tl.load(masses + place, mask=there, other=0.0), 0)
    if tl.where(few, near_number >= wanted, near_mass >= needed):
        which, bound = 0, near
    return which, bound, total


@triton.jit
def _wanted(temperature, top_k, row, vocab_size):
    return tl.where(tl.load(temperature + row) == 0, 1, tl.minimum(tl.load(top_k + row), vocab_size))


@triton.jit
def _gather(
    logits,
    temperature,
    top_k,
    top_p,
    peaks,
    counts,
    masses,
    keys,
    ids,
    stride,
    vocab_size,
    TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, chunks = tl.program_id(1).to(tl.int64), tl.num_programs(0)
    inverse, best = _inverse(temperature, row), _best(peaks, row, chunks, CHUNKS)
    wanted, nucleus = _wanted(temperature, top_k, row, vocab_size), tl.load(top_p + row)
    which, bound, _ = _bound(best, inverse, wanted, nucleus, vocab_size, counts, masses, row, chunks, CHUNKS)
    chunk = tl.arange(0, CHUNKS)
    before = tl.load(counts + (row * 3 + which) * chunks + chunk, mask=chunk < tl.program_id(0), other=0)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    number = _numbers(logits, stride, vocab_size, TOKENS)
    inside = (token < vocab_size) & (number >= bound)
    place = row * vocab_size + tl.sum(before, 0) + tl.cumsum(inside.to(tl.int32), 0) - 1
    tl.store(keys + place, _key(number), mask=inside)
    tl.store(ids + place, token, mask=inside)


@triton.jit
def _choose(
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    counters,
    peaks,
    counts,
    masses,
    keys,
    ids,
    tokens,
    logprobs,
    vocab_size,
    chunks,
    TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    keys += row * vocab_size
    ids += row * vocab_size
    share, nucleus, offset = tl.load(min_p + row), tl.load(top_p + row), tl.arange(0, TOKENS)
    wanted = _wanted(temperature, top_k, row, vocab_size)
    few = wanted < vocab_size
    inverse, best = _inverse(temperature, row), _best(peaks, row, chunks, CHUNKS)
    which, bound, total = _bound(best, inverse, wanted, nucleus, vocab_size, counts, masses, row, chunks, CHUNKS)
    chunk = tl.arange(0, CHUNKS)
    count = tl.sum(tl.load(counts + (row * 3 + which) * chunks + chunk, mask=chunk < chunks, other=0), 0)
    threshold, high, ties = _key(bound), _key(best), vocab_size
    if few:
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
    last = _last_tie(keys, count, threshold, ties, TOKENS)
    floor = best + tl.log(share) / inverse
    counter = counters + row * 4
    word, _, _, _ = tl.philox(
        tl.load(seeds + row),
        tl.load(counter).to(tl.uint32, bitcast=True),
        tl.load(counter + 1).to(tl.uint32, bitcast=True),
        tl.load(counter + 2).to(tl.uint32, bitcast=True),
        tl.load(counter + 3).to(tl.uint32, bitcast=True),
    )
    total = 0.0
    for start in range(0, count, TOKENS):
        total += tl.sum(_kept(keys, start, count, threshold, last, floor, best, inverse, TOKENS), 0)
    target = tl.uint_to_uniform_float(word) * total
    before, chosen, end = 0.0, -1, 0
    for start in range(0, count, TOKENS):
        weight = _kept(keys, start, count, threshold, last, floor, best, inverse, TOKENS)
        after = before + tl.sum(weight, 0)
        if (chosen < 0) & (after > before):
            place = start + offset
            # Never a token without mass, however the sums are rounded.
            end = tl.max(tl.where(weight > 0, place, -1), 0)
            if after > target:
                passed = (before + tl.cumsum(weight, 0) > target) & (weight > 0)
                chosen = tl.min(tl.where(passed, place, end), 0)
        before = after
    chosen = tl.where(chosen < 0, end, chosen)
    tl.store(tokens + row, tl.load(ids + chosen).to(tl.int64))
    if logprobs is not None:
        tl.store(logprobs + row, (_number(tl.load(keys + chosen)) - best) * inverse - tl.log(total))


@triton.jit
def _kept(keys, start, count, threshold, last, floor, best, inverse, TOKENS: tl.constexpr):
    """The weights of the tokens that are kept, 0 of the others."""
    key, weight = _load(keys, start, count, best, inverse, TOKENS)
    kept = (key > threshold) | ((key == threshold) & (start + tl.arange(0, TOKENS) <= last))
    return tl.where(kept & (_number(key) >= floor), weight, 0.0)


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
