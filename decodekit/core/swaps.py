"""Forwards and functions in place of a model's own, for as long as any thread uses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

_ABSENT: Any = object()
_LOCK = Lock()


class Replacement(partial[Any]):
    """A module's forward that computes what its own does: known from forwards that others (accelerate, ...) put there."""


class Swap:
    """A value in place of an attribute. Where neither it nor the usual value is found, others have replaced it: it stays.

    Args:
        owner: a module, of torch or of Python.
        name: of the attribute, in ``vars(owner)``.
        value: what takes its place.
        usual: what is there otherwise; left out, nothing is.
    """

    def __init__(self, owner: Any, name: str, value: Any, usual: Any = _ABSENT) -> None:
        self._owner, self._name, self._value, self._usual = owner, name, value, usual
        self._users = 0

    def take(self) -> bool:
        """Use it once more; whether the value is there now."""
        own = vars(self._owner)
        found = own.get(self._name, _ABSENT)
        if found is not self._value:
            if found is not self._usual:
                return False
            own[self._name] = self._value
        self._users += 1
        return True

    def leave(self) -> None:
        """One use is over."""
        self._users -= 1
        own = vars(self._owner)
        if self._users or own.get(self._name) is not self._value:
            return
        if self._usual is _ABSENT:
            del own[self._name]
        else:
            own[self._name] = self._usual


@contextmanager
def swapped(swaps: Iterable[Swap]) -> Iterator[None]:
    """A context in which the values are there, as far as nobody else's are; several threads may be in it at once."""
    with _LOCK:
        taken = [swap for swap in swaps if swap.take()]
    try:
        yield
    finally:
        with _LOCK:
            for swap in taken:
                swap.leave()
