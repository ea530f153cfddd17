"""How good an output is, given what was expected: a number a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from decodekit.core import registry
from decodekit.core.errors import InputError, nearest
from decodekit.core.protocols import Utility
from decodekit.strategies.self_consistency.extractors import LastNumber, canonical

Metric = Callable[[str, str], float]
"""An output and its reference to its quality; higher is better."""


def _number(text: str, reference: str) -> float:
    return float(LastNumber()(text) == canonical(reference))


def _contains(text: str, reference: str) -> float:
    return float(reference.strip().casefold() in text.casefold())


OWN: dict[str, Metric] = {"number": _number, "contains": _contains}
"""``number``: the last number of the output is the reference's (0 or 1); ``contains``: the reference stands in it."""


def metric_of(name: str | None, references: Sequence[str]) -> tuple[str, Metric]:
    """A metric by name: one of ``OWN`` or a utility; without a name ``number`` where all references are, or else ``exact``.

    Raises:
        InputError: there is none of this name, or what it needs is not installed.
    """
    if name is None:
        numbers = all(LastNumber().find(reference) == reference.strip() for reference in references)
        name = "number" if numbers else "exact"
    if name in OWN:
        return name, OWN[name]
    known = [*OWN, *registry.kinds("utilities")]
    if name not in known:
        raise InputError(f"unknown metric {name!r}: {nearest(name, known)}")
    utility = registry.create("utilities", name)
    assert isinstance(utility, Utility)
    return name, lambda text, reference: float(utility.pairwise([text], [reference])[0, 0])
