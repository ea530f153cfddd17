"""CUDA graphs: how they are captured, what memory they share, and what tells whether one still holds for a model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class GraphStats:
    """What graphs did for a call.

    Attributes:
        steps: that came from graphs.
        forward_captures: forwards that were captured; those of earlier calls are used again.
        pick_captures: captures of score, rules and pick.
        pool_bytes: memory that the captures of this call took.
        eager: why steps are launched one by one; ``None`` where they are not.
    """

    steps: int = 0
    forward_captures: int = 0
    pick_captures: int = 0
    pool_bytes: int = 0
    eager: str | None = None


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


def fingerprint(model: Any, session: object) -> int:
    """Another number for weights at other places, other modules or hooks: what was captured does not hold for them.

    Modules from elsewhere (adapters) may compute something else at any time: every session has a number of its own then.
    """
    modules = [*model.modules()]
    known = all(type(own).__module__.startswith(("torch.", "transformers.")) for own in modules)
    hooks = [len(own._forward_hooks) + len(own._forward_pre_hooks) for own in modules]
    weights = [(own.data_ptr(), own.dtype) for own in model.parameters()]
    return hash((*map(id, modules), *hooks, *weights, None if known else id(session)))
