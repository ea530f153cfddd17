"""A dict that cannot change, so that a plugin with a mapping among its options stays a hashable value."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A dict without ways to change it; hashable when its values are.

    As the type of a field, ``FrozenDict[int, float]`` takes any mapping and has the JSON schema of a dict.
    """

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("this dict is frozen; build a new one, such as {**old, key: value}")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[FrozenDict[K, V]], tuple[dict[K, V]]]:
        return type(self), (dict(self),)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        key, value = get_args(source) or (Any, Any)
        return core_schema.no_info_after_validator_function(cls, handler.generate_schema(dict[key, value]))  # type: ignore[valid-type]
