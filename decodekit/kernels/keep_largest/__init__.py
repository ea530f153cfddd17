"""Mask all but the n largest entries of each row, with exact ties."""

from decodekit.kernels.keep_largest.reference import keep_largest

__all__ = ["keep_largest"]
