"""What a kernel is measured at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A kernel at one shape: ours, its peer and the bytes that either has to move."""

    kernel: str
    shape: str
    peer: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    nbytes: int
