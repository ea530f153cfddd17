"""CUDA graphs: how they are captured, what memory they share, and what tells whether one still holds for a model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
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
        forwards: that came from graphs in steps which the host takes part in: drafts, searches, requests that come and go.
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


def fingerprint(model: nn.Module) -> int:
    """Another number for weights at other places, other modules, hooks or forwards: what was made for a model holds no more."""
    parts: list[Any] = [hook for hooks in _GLOBAL for hook in hooks]
    for own in _modules(model):
        hooks = (*own._forward_hooks, *own._forward_pre_hooks)  # handles' ids, which are never used twice
        weights = [(_address(weight), weight.dtype) for weight in own._parameters.values() if weight is not None]
        parts.append((id(own), type(own), hooks, _others_forward(own), *weights))
    return hash(tuple(parts))


class Hooks:
    """Tells, fast enough for every step, whether hooks were added to a model since, or taken from it."""

    def __init__(self, model: nn.Module) -> None:
        places = [place for own in _modules(model) for place in (own._forward_hooks, own._forward_pre_hooks)]
        self._places = [*places, *_GLOBAL]
        self._known = self._now()

    def changed(self) -> bool:
        """Whether there are others than at first."""
        return self._now() != self._known

    def _now(self) -> list[int]:
        return [handle for place in self._places for handle in place]


def hooked(model: nn.Module) -> bool:
    """Whether others run code in its forwards: hooks, or forwards that they put in place of a module's own."""
    return any(map(is_hooked, _modules(model)))


def is_hooked(own: nn.Module) -> bool:
    """The same of one module, without those that it consists of."""
    hooks = [hook for place in (own._forward_hooks, own._forward_pre_hooks, *_GLOBAL) for hook in place.values()]
    return _others_forward(own) is not None or any(getattr(hook, "__module__", None) != _OUTPUTS for hook in hooks)


def from_elsewhere(model: nn.Module) -> bool:
    """Whether modules are not torch's or transformers' (adapters): they may compute something else at any time."""
    return not all(type(own).__module__.startswith(("torch.", "transformers.")) for own in model.modules())


_GLOBAL = (module._global_forward_hooks, module._global_forward_pre_hooks)
_OUTPUTS = "transformers.utils.output_capturing"
"""Its hooks stay where they once kept a hidden state, and a graph holds what they do."""


def _modules(model: nn.Module) -> Iterable[nn.Module]:
    """All modules, without their names: at every step, ``modules()`` would take longer than all else here."""
    found, waiting = {model: None}, [model]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return found


def _others_forward(own: nn.Module) -> int | None:
    forward = vars(own).get("forward")
    return None if forward is None or isinstance(forward, Replacement) else id(forward)


def _address(weight: Tensor) -> int:
    """Where a weight lies; those that consist of others (quantized ones) do not tell."""
    return weight.data_ptr() if type(weight) in (Tensor, nn.Parameter) else id(weight)
