"""Faults that any rule or token-level strategy can have, put into a class of one's own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from decodekit.core.protocols import Plugin, Rule, TokenStrategy
from decodekit.core.types import Outputs, Rows

Score = Callable[..., Tensor]


def _averaged(honest: Score, *given: Any) -> Tensor:
    result = honest(*given)
    return result.nan_to_num(neginf=-1e4).mean(0, keepdim=True).expand_as(result).clone()


def _first_for_all(honest: Score, *given: Any) -> Tensor:
    result = honest(*given)
    return result[:1].expand_as(result).clone()


def _neighbours(honest: Score, *given: Any) -> Tensor:
    return honest(*given).roll(1, 0)


def _in_place(honest: Score, *given: Any) -> Tensor:
    logits = given[-1]["main"].logits if isinstance(given[-1], Outputs) else given[-1]
    return logits.copy_(honest(*given))


def _unmasked(honest: Score, *given: Any) -> Tensor:
    return honest(*given).clamp(min=-1e4)


def _nothing(_: Score, *given: Any) -> Tensor:
    logits = given[-1]["main"].logits if isinstance(given[-1], Outputs) else given[-1]
    return logits.clone()


def _noisy(honest: Score, *given: Any) -> Tensor:
    result = honest(*given)
    return result + 1e-3 * torch.randn_like(result)


def _narrower(honest: Score, *given: Any) -> Tensor:
    return honest(*given)[:, :-1]


def _other_dtype(honest: Score, *given: Any) -> Tensor:
    return honest(*given).half()


def _not_a_number(honest: Score, *given: Any) -> Tensor:
    result = honest(*given)
    return result.masked_fill(result == result.amax(-1, keepdim=True), math.nan)


def _rows_changed(**change: Callable[[Rows], Any]) -> Callable[..., Tensor]:
    def fault(honest: Score, plugin: Any, rows: Rows, logits: Tensor) -> Tensor:
        return honest(plugin, dataclasses.replace(rows, **{name: own(rows) for name, own in change.items()}), logits)

    return fault


_ANY: dict[str, Callable[..., Tensor]] = {
    "rows are averaged": _averaged,
    "the first row's result is everyone's": _first_for_all,
    "rows get their neighbours' results": _neighbours,
    "shared logits are edited": _in_place,
    "masked tokens come back": _unmasked,
    "nothing is changed": _nothing,
    "the same call gives another result": _noisy,
    "a token is missing": _narrower,
    "the result is of another dtype": _other_dtype,
    "the best token becomes NaN": _not_a_number,
}
_RULES = _ANY | {
    "the history is a token short": _rows_changed(lengths=lambda rows: (rows.lengths - 1).clamp(min=1)),
    "what lies beyond a history is read": _rows_changed(
        lengths=lambda rows: torch.full_like(rows.lengths, rows.tokens.shape[1])
    ),
    "all rows draw alike": _rows_changed(streams=lambda rows: [rows.streams[0]] * len(rows)),
    "the prompt counts as output": _rows_changed(prompt_lengths=lambda rows: torch.zeros_like(rows.prompt_lengths)),
}


def faults_of(plugin: type[Plugin]) -> dict[str, Callable[..., Tensor]]:
    """The faults that a plugin of this class can have, by name.

    Raises:
        TypeError: it is neither a rule nor a token-level strategy.
    """
    if issubclass(plugin, Rule):
        return _RULES
    if issubclass(plugin, TokenStrategy):
        return _ANY
    raise TypeError(f"{plugin.__name__} is neither a Rule nor a TokenStrategy, for which there are faults")


@contextmanager
def spoiled(plugin: type[Plugin], name: str) -> Iterator[None]:
    """A context in which all plugins of this class have the fault."""
    method = "__call__" if issubclass(plugin, Rule) else "score"
    honest, fault = getattr(plugin, method), faults_of(plugin)[name]
    own = vars(plugin).get(method)
    setattr(plugin, method, lambda *given: fault(honest, *given))
    try:
        yield
    finally:
        if own is None:
            delattr(plugin, method)
        else:
            setattr(plugin, method, own)
