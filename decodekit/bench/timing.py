"""Paired timings: two callables in turn, so that both meet the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pair:
    """Seconds of two callables over the same rounds.

    Attributes:
        peer: median of the peer.
        ours: median of ours.
        ratio: median over the rounds of ours / peer.
        low: first quartile of that ratio.
        high: third quartile.
    """

    peer: float
    ours: float
    ratio: float
    low: float
    high: float

    @property
    def both(self) -> tuple[float, float]:
        """Seconds of the peer and of ours."""
        return self.peer, self.ours


def paired(peer: Callable[[], Any], ours: Callable[[], Any], *, rounds: int) -> Pair:
    """Time both ``rounds`` times in turn, the order swapped every round, after one warm-up each."""
    peer()
    ours()
    times: dict[str, list[float]] = {"peer": [], "ours": []}
    for number in range(rounds):
        order = [("peer", peer), ("ours", ours)]
        for name, call in order if number % 2 == 0 else reversed(order):
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
    ratios = [ours / peer for peer, ours in zip(times["peer"], times["ours"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Pair(statistics.median(times["peer"]), statistics.median(times["ours"]), middle, low, high)
