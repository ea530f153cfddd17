"""CUDA graphs: how they are captured, what memory they share, and what tells whether one still holds for a model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module

from decodekit.core.swaps import Replacement


@dataclass
class GraphStats:
    """What graphs did for a call.

    Attributes:
        steps: that came from graphs.
        forwards: that came from graphs in steps which the host takes part in: drafts, searches, requests that come and go;
            the first of each size does not.
        forward_captures: forwards that were captured; those of earlier calls are used again.
        pick_captures: captures of score, rules and pick.
        pool_bytes: memory that the captures of this call took.
        short: runs that there were too few blocks for; a step of each was launched alone.
        eager: why steps are launched one by one; ``None`` where they are not.
        alone: why also their forwards are launched operation by operation, where it was tried to capture them.
    """

    steps: int = 0
    forwards: int = 0
    forward_captures: int = 0
    pick_captures: int = 0
    pool_bytes: int = 0
    short: int = 0
    eager: str | None = None
    alone: str | None = None

    def joined(self, others: Iterable[GraphStats]) -> GraphStats:
        """With what others did: counts are added, of reasons the first one stays."""
        every, values = [self, *others], dict[str, Any]()
        for name in vars(self):
            parts = [getattr(part, name) for part in every]
            values[name] = sum(parts) if isinstance(parts[0], int) else next(filter(None, parts), None)
        return GraphStats(**values)


def captures(device: torch.device) -> bool:
    """Whether what runs on this device is captured."""
    return device.type == "cuda"


def capture(call: Callable[[], None], stats: GraphStats) -> Any:
    """A CUDA graph of a call, which is made once before."""
    held = torch.cuda.memory_reserved()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    collects = gc.isenabled()
    gc.disable()  # what it frees meanwhile, the graph would hold
    try:
        with torch.cuda.stream(stream):
            call()
            pool = _pool()
            stream.synchronize()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                call()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    stats.pool_bytes += max(0, torch.cuda.memory_reserved() - held)
    return graph


_POOL: list[Any] = []


def _pool() -> Any:
    """The memory that all graphs share: they run one after the other."""
    if not _POOL:
        handle, keeper = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        # Memory of a pool that no graph uses is gone for good: this one stays.
        keeper.capture_begin(pool=handle, capture_error_mode="thread_local")
        kept = torch.zeros(1, device="cuda")
        keeper.capture_end()
        _POOL.extend([handle, keeper, kept])
    return _POOL[0]


class Look:
    """What was found in a model, and what tells, fast enough for every step, whether it is still so.

    It lies in the model, and so must not hold it: with a cycle, its memory would wait for the garbage collector.

    Attributes:
        number: another one for weights at other places, other modules, hooks or forwards: what was made for a model holds no
            more.
        hooked: others run code in its forwards: hooks, or forwards that they put in place of a module's own.
        from_elsewhere: modules are not torch's or transformers' (adapters): they may compute something else at any time.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = _modules(model)
        self._below = [weakref.ref(own) for own in modules[1:]]
        self._state, self._hooks = _state(modules), _hooks(modules)
        self.number = hash((*map(id, modules), *map(tuple, self._state)))
        self.hooked = any(map(is_hooked, modules))
        self.from_elsewhere = not all(type(own).__module__.startswith(("torch.", "transformers.")) for own in modules)

    def holds(self, model: nn.Module) -> bool:
        """Whether this model is as it was."""
        return (now := self._now(model)) is not None and _state(now) == self._state

    def hooks_hold(self, model: nn.Module) -> bool:
        """Whether it has the hooks that it had, which takes less to find out."""
        return (now := self._now(model)) is not None and _hooks(now) == self._hooks

    def _now(self, model: nn.Module) -> list[nn.Module] | None:
        """The modules that were found in it, if they are all left: those that were replaced are not held."""
        below = [own() for own in self._below]
        return None if None in below else [model, *(own for own in below if own is not None)]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the model is to be looked at anew

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


_NAME = "_decodekit_look"


def look(model: nn.Module) -> Look:
    """A model as it is now."""
    own = vars(model)
    found: Look | None = own.get(_NAME)
    if found is None or not found.holds(model):
        found = own[_NAME] = Look(model)
    return found


def fingerprint(model: nn.Module) -> int:
    """:attr:`Look.number`."""
    return look(model).number


def hooked(model: nn.Module) -> bool:
    """:attr:`Look.hooked`."""
    return look(model).hooked


def is_hooked(own: nn.Module) -> bool:
    """The same of one module, without those that it consists of."""
    hooks = [hook for place in (own._forward_hooks, own._forward_pre_hooks, *_GLOBAL) for hook in place.values()]
    return _others_forward(own) is not None or any(getattr(hook, "__module__", None) != _OUTPUTS for hook in hooks)


_GLOBAL = (module._global_forward_hooks, module._global_forward_pre_hooks)
_OUTPUTS = "transformers.utils.output_capturing"
"""Its hooks stay where they once kept a hidden state, and a graph holds what they do."""


def _state(modules: Sequence[nn.Module]) -> tuple[list[Any], ...]:
    """Their classes, what they consist of, their hooks, and where others put a forward."""
    weights = [weight for own in modules for weight in own._parameters.values() if weight is not None]
    return (
        [type(own) for own in modules],
        [(*map(id, own._modules.values()),) for own in modules],
        [_address(weight) for weight in weights],
        [weight.dtype for weight in weights],
        _hooks(modules),
        [_others_forward(own) for own in modules],
    )


def _hooks(modules: Sequence[nn.Module]) -> list[int]:
    """The handles of their hooks, which are never used twice, and of those of all modules."""
    places = [place for own in modules for place in (own._forward_hooks, own._forward_pre_hooks) if place]
    return [hook for place in (*places, *_GLOBAL) for hook in place]


def _modules(model: nn.Module) -> list[nn.Module]:
    """All modules, itself first."""
    found, waiting = {model: None}, [model]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return [*found]


def _others_forward(own: nn.Module) -> int | None:
    forward = vars(own).get("forward")
    return None if forward is None or isinstance(forward, Replacement) else id(forward)


def _address(weight: Tensor) -> int:
    """Where a weight lies; those that consist of others (quantized ones) do not tell."""
    return weight.data_ptr() if type(weight) in (Tensor, nn.Parameter) else id(weight)
