"""Which kind of cache to take, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from decodekit.cache.account import PRECISIONS, Account
from decodekit.core.units import format_bytes

# Tokens a second of generate with a compiled static cache, as a multiple of those with a dynamic cache, by batch. Measured
# on an H200 with a Llama-8B shape in bf16, torch 2.11, transformers 5.17: 115 to 13.4, 469 to 88 and 731 to 383.
_STATIC_SPEEDUP = {1: 8.6, 8: 5.3, 32: 1.9}


@dataclass(frozen=True)
class Advice:
    """A kind of cache, what it would take on the device, and when it is the one to take.

    Attributes:
        cache: ``paged``, ``dynamic``, ``static``, ``quantized`` or ``offloaded``.
        bytes: on the device, for the whole batch.
        fits: whether that is within the budget; ``None`` without one.
        recommended: true of one at most, of none when nothing fits.
        reason: one sentence.
    """

    cache: str
    bytes: int
    fits: bool | None
    recommended: bool
    reason: str


def advise(account: Account, context: int, batch: int, budget: int | None) -> tuple[Advice, ...]:
    """All kinds of cache for ``batch`` rows of ``context`` tokens, ``account`` telling how they are stored.

    Recommended is what loses nothing, if it fits: blocks, or the plain cache where there are no K/V; then what loses
    precision; then what loses speed.
    """
    rows = list(_kinds(account, context, batch, budget))
    fitting = [cache for cache, size, _ in rows if budget is None or size <= budget]
    has_kv = account.total(lambda shape: shape.heads) > 0
    ranking = ("paged", "quantized", "offloaded") if has_kv else ("dynamic",)
    best = next((cache for cache in ranking if cache in fitting), None)
    return tuple(
        Advice(cache, size, None if budget is None else size <= budget, cache == best, reason)
        for cache, size, reason in rows
    )


def _kinds(account: Account, context: int, batch: int, budget: int | None) -> Iterator[tuple[str, int, str]]:
    full = replace(account, precision=None)
    if not full.total(lambda shape: shape.heads):
        size = batch * full.row(context)
        yield "paged", size, "there are no K/V to put in blocks, only states of fixed size"
        yield (
            "dynamic",
            batch * full.contiguous(context),
            "states have a fixed size, so nothing grows and nothing is copied",
        )
        yield "static", batch * full.contiguous(context), "states have a fixed size in any cache, so it changes nothing"
        yield "quantized", size, "there are no K/V to quantize, and a state that is rounded at every step drifts"
        yield "offloaded", size, "every state is read and written at every step, so none can wait on the host"
        return
    paged, copies = batch * full.row(context), batch * full.checkpoints(context)
    kv = batch * full.total(lambda shape: full.blocks(shape, context)[0])
    unused = batch * full.total(lambda shape: full.blocks(shape, context)[1])
    yield (
        "paged",
        paged,
        f"rows of any length take blocks of {full.block_size} tokens as they grow ({format_bytes(unused)} stay unused), "
        "and samples, beams and forks share those of their prompt"
        + (f"; {format_bytes(copies)} are checkpoints, which can be fewer" if copies else ""),
    )
    layer = batch * max(full.blocks(shape, context)[0] for shape, _ in full.layers)
    yield (
        "dynamic",
        batch * full.contiguous(context),
        f"needs no setup, but pads every row to the longest and copies each layer's K/V (up to {format_bytes(layer)}) "
        "at every step: for one short row",
    )
    near = max(known for known in _STATIC_SPEEDUP if known <= batch)
    yield (
        "static",
        batch * full.contiguous(context, spare=1),
        f"takes its full size from the first token on, but can be compiled: {_STATIC_SPEEDUP[near]} times the tokens a "
        f"second of dynamic at batch {near} (8B model on an H200)",
    )
    name, size = _quantized(account, context, batch, budget)
    yield (
        "quantized",
        size,
        f"{name} takes {size / paged:.2f} of paged, scales included, and rounds K/V: measure what that costs on your "
        "task",
    )
    yield (
        "offloaded",
        2 * layer + batch * full.total(lambda shape: full.state(shape) + full.conv(shape)),
        f"keeps two layers' K/V on the device and moves {format_bytes(kv)} of them over the host's bus at every step: "
        "only when nothing else fits",
    )


def _quantized(account: Account, context: int, batch: int, budget: int | None) -> tuple[str, int]:
    """The precision asked for, or the mildest that fits (the strongest when none does)."""
    asked = [name for name, precision in PRECISIONS.items() if precision == account.precision]
    sizes = {name: batch * replace(account, precision=PRECISIONS[name]).row(context) for name in asked or PRECISIONS}
    fitting = [name for name, size in sizes.items() if budget is None or size <= budget]
    name = fitting[0] if fitting else min(sizes, key=sizes.__getitem__)
    return name, sizes[name]
