"""Exact verification of drafted tokens against the target's distribution."""

from decodekit.kernels.verify.reference import verify

__all__ = ["verify"]
