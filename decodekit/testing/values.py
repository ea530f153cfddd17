"""What every plugin is: a frozen value that equals what its own dump builds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from decodekit.core.protocols import Plugin


def broken(plugin: Plugin, law: str, found: str) -> AssertionError:
    """The error that says which law a plugin breaks."""
    return AssertionError(f"{plugin.kind} breaks the law {law!r}: {found}")


def check_value(plugin: Plugin) -> None:
    """A plugin is its own configuration, and nothing else."""
    law = "a plugin is a frozen value"
    try:
        plugin.kind = plugin.kind  # type: ignore[misc]
    except ValidationError:
        pass
    else:
        raise broken(plugin, law, f"{type(plugin).__name__}.kind can be set; leave frozen=True in model_config")
    try:
        hash(plugin)
    except TypeError as error:
        raise broken(plugin, law, f"{error} in {plugin!r}; use tuples, and FrozenDict for mappings") from error
    law = "a plugin equals what its dump builds"
    for form, build in (
        ("model_dump", lambda: type(plugin)(**plugin.model_dump(by_alias=True))),
        ("model_dump_json", lambda: type(plugin).model_validate_json(plugin.model_dump_json(by_alias=True))),
    ):
        try:
            again = build()
        except (TypeError, ValueError) as error:
            raise broken(plugin, law, f"{form} of {plugin!r} cannot be read back: {error}") from error
        if again != plugin:
            raise broken(plugin, law, f"{form} of {plugin!r} builds {again!r}")


def same(a: Any, b: Any) -> bool:
    """Whether two states hold the same values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return same(vars(a), vars(b)) if hasattr(a, "__dict__") else bool(a == b)
