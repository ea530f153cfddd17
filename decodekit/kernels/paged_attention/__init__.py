"""Attention of ragged rows of queries over K/V that lie in blocks; a prefix that rows share is read once."""

from decodekit.kernels.paged_attention.plan import Part, plan_parts
from decodekit.kernels.paged_attention.reference import paged_attention

__all__ = ["Part", "paged_attention", "plan_parts"]
