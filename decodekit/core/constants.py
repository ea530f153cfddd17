"""Tensors of a few numbers that are the same at every step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import torch
from torch import Tensor

Nested = tuple["float | Nested", ...]


def constant(values: Nested, device: torch.device, dtype: torch.dtype) -> Tensor:
    """These numbers on a device, shared by all who ask for them and never to be edited.

    Made once: an upload at every token would stall a GPU, and a captured graph cannot hold it.
    """
    made = _made(values, device, dtype)
    if (into := _INTO.get()) is not None:
        into.append(made)
    return made


@contextmanager
def holding(into: list[Tensor]) -> Iterator[None]:
    """A context in which all constants that are asked for are noted: a graph reads them for as long as it lives."""
    token = _INTO.set(into)
    try:
        yield
    finally:
        _INTO.reset(token)


_INTO: ContextVar[list[Tensor] | None] = ContextVar("constants that are noted", default=None)


@lru_cache(maxsize=256)
def _made(values: Nested, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)
