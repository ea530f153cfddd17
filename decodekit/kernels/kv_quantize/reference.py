"""Quantize groups of numbers to codes of 8, 4 or 2 bits and back, in plain torch.

Integers are asymmetric, as in KIVI (Liu et al., 2024, arXiv:2402.02750): a group has ``2**bits`` evenly spaced levels from
its lowest to its highest number. Those two are stored, of 2 bytes each. A scale and a zero point of as many bytes would
say the same less well: rounded to 8 bits of significand, a scale is off by half a step at code 255. FP8 is e4m3 times a
power of two, so that scaling never rounds.

Quantizing what was dequantized changes nothing: ``dequantize(quantize(y)) == y`` for every ``y`` that ``dequantize``
returned. The ends of a group are numbers of the group, or (float32) of float16 inside its range, and codes 0 and L give
them back exactly, so that they are the ends of ``y`` too; and each code is chosen by what it dequantizes to, after
rounding to the dtype, so that for a number of ``y`` a code at distance 0 wins. It is among the three tried: where rounding
to the dtype moves a level, it moves it to the nearest number of the dtype, as it does every nearer level on that side.
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

    Integers have no code for NaN or infinity: one of them makes its whole group NaN, none else. In FP8 it alone is NaN.

    Args:
        numbers: [..., D] of any floating dtype.
        dim: along which a group lies.
        kind: ``int8``, ``fp8``, ``int4`` or ``int2``.

    Returns:
        codes: [..., ceil(D * bits / 8)] uint8; the first of a byte's codes is in its lowest bits.
        scales: [S, ...], 1 along ``dim``, of 2 bytes each. Integers: lowest and highest number, in the dtype of
            ``numbers`` (float16 where that is wider). FP8: the power of two, in bfloat16.
    """
    exact = numbers.float()
    if kind == "fp8":
        return _quantize_fp8(exact, dim)
    levels = 2 ** BITS[kind] - 1
    low, high = _ends(exact, dim, numbers.dtype if numbers.itemsize == 2 else torch.float16)
    nearest = ((exact - low) / (high.float() - low) * levels).round()
    codes, error = torch.zeros_like(exact), torch.full_like(exact, math.inf)
    for shift in (0, -1, 1):
        candidate = (nearest + shift).clamp(0, levels)
        distance = (_interpolate(low, high, candidate, levels).to(numbers.dtype).float() - exact).abs()
        # Never true for NaN, which therefore cannot reach the bits of the codes beside it.
        closer = distance < error
        codes, error = torch.where(closer, candidate, codes), torch.where(closer, distance, error)
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
    levels = 2 ** BITS[kind] - 1
    return _interpolate(scales[0], scales[1], _unpack(codes, BITS[kind], width), levels).to(dtype)


def _interpolate(low: Tensor, high: Tensor, codes: Tensor, levels: int) -> Tensor:
    """The levels of these codes in float32; exactly ``low`` at the first, ``high`` at the last."""
    return torch.lerp(low.float(), high.float(), codes.float() / levels)


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
    if bits == 8:
        return codes
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    count = -(-codes.shape[-1] // len(shifts))
    padded = pad(codes, (0, count * len(shifts) - codes.shape[-1]))
    return (padded.unflatten(-1, (count, len(shifts))) << shifts).sum(-1, dtype=torch.uint8)


def _unpack(codes: Tensor, bits: int, width: int) -> Tensor:
    if bits == 8:
        return codes
    parts = [codes >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(-2)[..., :width]
