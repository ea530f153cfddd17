"""Quantize groups of numbers to codes of 8, 4 or 2 bits, and back."""

from decodekit.kernels.kv_quantize.reference import BITS, dequantize, quantize

__all__ = ["BITS", "dequantize", "quantize"]
