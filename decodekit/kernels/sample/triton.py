"""Sampling in Triton, one row a program: thresholds are searched among the few tokens that may stay, nothing is sorted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 4096  # looked at at a time


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, counters: Tensor
) -> Tensor:
    """As the reference, but in float32; ``logits`` are contiguous in their last dimension."""
    positions, vocab_size = logits.shape
    filters = [option.contiguous() for option in (temperature, top_k, top_p, min_p)]
    tokens = torch.empty(positions, dtype=torch.int64, device=logits.device)
    keys = torch.empty((positions, vocab_size), dtype=torch.int32, device=logits.device)
    ids = torch.empty_like(keys)
    block = min(_TOKENS, triton.next_power_of_2(vocab_size))
    _sample[(positions,)](
        logits,
        *filters,
        seeds.contiguous(),
        counters.contiguous(),
        keys,
        ids,
        tokens,
        logits.stride(0),
        vocab_size,
        TOKENS=block,
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
def _sample(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    counters,
    keys,
    ids,
    tokens,
    stride,
    vocab_size,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    keys += row * vocab_size
    ids += row * vocab_size
    heat, share = tl.load(temperature + row), tl.load(min_p + row)
    wanted, nucleus = tl.minimum(tl.load(top_k + row), vocab_size), tl.load(top_p + row)
    wanted = tl.where(heat == 0, 1, wanted)
    inverse = 1.0 / tl.where(heat == 0, 1.0, heat)
    few = wanted < vocab_size
    offset = tl.arange(0, TOKENS)
    seen = tl.full([TOKENS], float("-inf"), tl.float32)
    for start in tl.range(0, vocab_size, TOKENS, loop_unroll_factor=4):
        token = start + offset
        number = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        seen = tl.maximum(seen, number)
    best = tl.max(seen, 0)
    # Only tokens near the best one are looked at again. Which distance, in nats, holds all that the filters keep?
    near, far = best - 6 / inverse, best - 14 / inverse
    near_number, far_number = tl.zeros([TOKENS], tl.int32), tl.zeros([TOKENS], tl.int32)
    near_mass, far_mass, mass = (
        tl.zeros([TOKENS], tl.float32),
        tl.zeros([TOKENS], tl.float32),
        tl.zeros([TOKENS], tl.float32),
    )
    for start in tl.range(0, vocab_size, TOKENS, loop_unroll_factor=4):
        token = start + offset
        number = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        weight = tl.exp((number - best) * inverse)
        near_number += (number >= near).to(tl.int32)
        far_number += (number >= far).to(tl.int32)
        near_mass += tl.where(number >= near, weight, 0.0)
        far_mass += tl.where(number >= far, weight, 0.0)
        mass += weight
    total = tl.sum(mass, 0)
    # The nucleus of the k best lies among the k best; without a k it weighs this much, and more than rounding can lose.
    needed = total * (nucleus + 1e-4)
    bound = float("-inf")
    if tl.where(few, tl.sum(far_number, 0) >= wanted, tl.sum(far_mass, 0) >= needed):
        bound = far
    if tl.where(few, tl.sum(near_number, 0) >= wanted, tl.sum(near_mass, 0) >= needed):
        bound = near
    count = 0
    for start in tl.range(0, vocab_size, TOKENS, loop_unroll_factor=4):
        token = start + offset
        number = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        inside = (token < vocab_size) & (number >= bound)
        if tl.max(inside.to(tl.int32), 0) > 0:
            place = count + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(keys + place, _key(number), mask=inside)
            tl.store(ids + place, token, mask=inside)
            count += tl.sum(inside.to(tl.int32), 0)
    # The threads of the program read what others of them wrote.
    tl.debug_barrier()
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
    tl.store(tokens + row, tl.load(ids + tl.where(chosen < 0, end, chosen)).to(tl.int64))


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
