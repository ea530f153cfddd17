"""Quantize groups of numbers to codes of 8, 4 or 2 bits and back, in plain torch.

Integers are asymmetric, as in KIVI (Liu et al., 2024, arXiv:2402.02750): a group has ``2**bits`` evenly spaced levels from
its lowest to its highest number. Those two are stored, of 2 bytes each. A scale and a zero point of as many bytes would
say the same less well: rounded to 8 bits of significand, a scale is off by half a step at code 255. FP8 is e4m3 times a
power of two, so that scaling never rounds.

Quantizing what was dequantized changes nothing: ``dequantize(quantize(y)) == y`` for every ``y`` that ``dequantize``
returned. The ends of a group are numbers of the group, or (float32) of float16 inside its range, and the first and last
level give them back exactly, so that they are the ends of ``y`` too. A number x became y because level p is within half a
step of x, and y is the number of the dtype that is nearest to p; x is one as well, so ``|p - y| <= |p - x|``, and p is
within half a step of y. In FP8 the power of two of ``y`` is that of the group, or half of it: its codes are exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

BITS = {"int8": 8, "fp8": 8, "int4": 4, "int2": 2}
"""Bits of a code, by kind."""

_FP8 = torch.float8_e4m3fn
_LARGEST_FP8 = math.frexp(torch.finfo(_FP8).max)


def quantize(numbers: Tensor, dim: int, kind: str) -> tuple[Tensor, Tensor]:
    """Quantize each group, the numbers along ``dim``.

    The error is at most half a step, ``(highest - lowest) / (2**bits - 1) / 2``, and half a unit in the last place of the
    result. In float32 the ends are float16: the error is at most half a step or ``2**-10`` of the largest magnitude of the
    group, whichever is more, down to ``2**-24``; and a group is cut at 65504, the largest float16. FP8: at most ``2**-4``
    of a number, and ``2**-17`` of the largest of its group.

    Integers have no code for NaN or infinity: one of them makes its whole group NaN or infinite, and no other. In FP8 it
    alone becomes NaN.

    Args:
        numbers: [..., D] of any floating dtype.
        dim: along which a group lies.
        kind: ``int8``, ``fp8``, ``int4`` or ``int2``.

    Returns:
        codes: [..., B] uint8, B = ceil(D * bits / 8); number d is in byte ``d % B``, from bit ``d // B * bits`` on.
        scales: [S, ...], 1 along ``dim``, of 2 bytes each. Integers: lowest and highest number, in the dtype of
            ``numbers`` (float16 where that is wider). FP8: the power of two, in bfloat16.
    """
    exact = numbers.float()
    if kind == "fp8":
        return _quantize_fp8(exact, dim)
    levels = 2 ** BITS[kind] - 1
    low, high = _ends(exact, dim, numbers.dtype if numbers.itemsize == 2 else torch.float16)
    steps = (exact - low) / (high.float() - low) * levels
    # NaN: a constant group, where every code is right, or one with a NaN, which must not reach the codes beside it.
    codes = steps.round().clamp(0, levels).nan_to_num(0)
    return _pack(codes.byte(), BITS[kind]), torch.stack((low, high))


def dequantize(codes: Tensor, scales: Tensor, kind: str, width: int, dtype: torch.dtype) -> Tensor:
    """The numbers that :func:`quantize` made codes of.

    Args:
        codes: [..., ceil(width * bits / 8)] uint8.
        scales: [S, ...], broadcast to ``[..., width]``.
        kind: ``int8``, ``fp8``, ``int4`` or ``int2``.
        width: D of the numbers.
        dtype: of the numbers, the same as when they were quantized.

    Returns:
        [..., width].
    """
    if kind == "fp8":
        # Rounding up to 4 bits may pass the largest number of the dtype.
        limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        return (codes.view(_FP8).float() * scales[0].float()).clamp_(-limit, limit).to(dtype)
    low, high = scales.float()
    share = _unpack(codes, BITS[kind], width).float().div_(2 ** BITS[kind] - 1)
    # Not low + share * (high - low), which misses the high end by what the difference lost.
    return (1 - share).mul_(low).add_(share.mul_(high)).to(dtype)


def _ends(numbers: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Lowest and highest number, rounded to the inside of that range: what lies outside gets the code of its end."""
    low, high = numbers.amin(dim, keepdim=True), numbers.amax(dim, keepdim=True)
    up, down = torch.tensor((math.inf, -math.inf), dtype=dtype, device=numbers.device)
    inner_low, inner_high = low.to(dtype), high.to(dtype)
    inner_low = torch.where(inner_low < low, inner_low.nextafter(up), inner_low)
    inner_high = torch.where(inner_high > high, inner_high.nextafter(down), inner_high)
    # A range without a number of that dtype is constant as far as it can tell; of its two neighbours, the one nearer 0
    # is never infinite.
    only = torch.where(inner_low.abs() < inner_high.abs(), inner_low, inner_high)
    empty = inner_low > inner_high
    return torch.where(empty, only, inner_low), torch.where(empty, only, inner_high)


def _quantize_fp8(numbers: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    finite = numbers.isfinite()
    significand, exponent = numbers.abs().where(finite, 0.0).amax(dim, keepdim=True).frexp()
    largest, shift = _LARGEST_FP8
    # The smallest power of two that brings the largest number of the group into range; 2**-126 is the smallest normal.
    power = (exponent - shift + (significand > largest).int()).clamp(min=-126)
    scale = torch.ones_like(significand).ldexp(power)
    return (numbers.where(finite, math.nan) / scale).to(_FP8).view(torch.uint8), scale.bfloat16().unsqueeze(0)


def _pack(codes: Tensor, bits: int) -> Tensor:
    parts = 8 // bits
    width = -(-codes.shape[-1] // parts)
    padded = pad(codes, (0, width * parts - codes.shape[-1])).unflatten(-1, (parts, width))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (padded << shifts.unsqueeze(1)).sum(-2, dtype=torch.uint8)


def _unpack(codes: Tensor, bits: int, width: int) -> Tensor:
    return torch.cat([codes >> shift & 2**bits - 1 for shift in range(0, 8, bits)], -1)[..., :width]
