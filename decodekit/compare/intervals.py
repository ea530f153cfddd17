"""Means over rows with bootstrap intervals (Efron, 1979): rows are drawn with replacement, the same for both of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ROUNDS = 10_000


class Interval(NamedTuple):
    """A mean and its 95 % percentile interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interval(values: Sequence[float]) -> Interval:
    """The mean of values, one a row; of differences it is the paired interval."""
    own = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(0)
    means = np.concatenate(
        [own[generator.integers(0, len(own), (1000, len(own)))].mean(1) for _ in range(ROUNDS // 1000)]
    )
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(own.mean()), float(low), float(high))


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The mean difference of two measurements of the same rows."""
    return interval([one - other for one, other in zip(ours, theirs, strict=True)])
