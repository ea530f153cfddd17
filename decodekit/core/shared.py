"""What several calls on one model have in common, kept no longer than the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class PerModel(Generic[T]):
    """A value a model and key, made when it is first asked for.

    Args:
        make: makes one.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: WeakKeyDictionary[Any, dict[Hashable, T]] = WeakKeyDictionary()

    def of(self, model: Any, key: Hashable = None) -> T:
        """The model's value of this key."""
        values = self._values.setdefault(model, {})
        if key not in values:
            values[key] = self._make()
        return values[key]

    def forget(self, model: Any) -> None:
        """Begin anew with this model."""
        self._values.pop(model, None)
