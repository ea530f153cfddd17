"""What a model's cache weighs, and which kind of cache to take: from its config alone, before anything is loaded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from decodekit.cache.account import PRECISIONS, Account
from decodekit.cache.advice import Advice, advise
from decodekit.cache.shapes import LayerShape, layer_shapes, read_config
from decodekit.core.errors import InputError, nearest
from decodekit.core.units import parse_bytes

_DTYPES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
_SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True)
class KindBytes:
    """The share of all layers of one kind.

    Attributes:
        kind: as in ``LayerShape``.
        layers: how many there are.
        kept: tokens that stay when there are more (a window's, less the one being computed); ``None`` keeps all.
        kv_bytes_per_token: K/V of a token of a row in these layers, before scales.
        state_bytes_per_request: their recurrent states.
        conv_bytes_per_request: their convolutions' last columns.
        total_bytes: for the whole batch, unused slots of blocks included, checkpoints left out.
    """

    kind: str
    layers: int
    kept: int | None
    kv_bytes_per_token: int
    state_bytes_per_request: int
    conv_bytes_per_request: int
    total_bytes: int


@dataclass(frozen=True)
class Ledger:
    """What the caches of ``batch`` rows of ``context`` tokens take.

    Attributes:
        model_type: of the config; empty where it has none.
        context: tokens of a row, prompt and output together.
        batch: rows.
        dtype: of K/V and convolutions.
        block_size: tokens of a block.
        quantization: of full blocks.
        kv_bytes_per_token: K/V of a token of a row over all layers while inside every window, before scales.
        state_bytes_per_request: recurrent states of a row.
        conv_bytes_per_request: last columns of a row's convolutions.
        scale_bytes_per_block: scales of a full quantized block of a row over all layers.
        blocks_per_request: blocks of a row in layers that keep all tokens.
        block_waste_bytes: slots of allocated blocks that hold no token, for the whole batch.
        checkpoint_bytes: copies of states and convolutions, one every ``checkpoint_every`` tokens, for the whole batch.
        checkpoint_kv_ratio: a copy over the K/V of the tokens between two; ``None`` without copies or without K/V.
        total_bytes: all of the above for the whole batch.
        crossover_tokens: the length from which recurrent layers, with their convolutions, take no more than attention
            layers in their place would; 0 for a model without recurrent layers, ``None`` where that never happens.
        budget_bytes: for the caches alone.
        largest_batch: rows of ``context`` tokens that fit in the budget; ``None`` without one.
        largest_context: tokens at which ``batch`` rows fit in the budget; ``None`` without one, or if any number does.
        kinds: the same by kind of layer.
        advice: each kind of cache and its reason.
    """

    model_type: str
    context: int
    batch: int
    dtype: str
    block_size: int
    quantization: str | None
    kv_bytes_per_token: int
    state_bytes_per_request: int
    conv_bytes_per_request: int
    scale_bytes_per_block: int
    blocks_per_request: int
    block_waste_bytes: int
    checkpoint_bytes: int
    checkpoint_kv_ratio: float | None
    total_bytes: int
    crossover_tokens: int | None
    budget_bytes: int | None
    largest_batch: int | None
    largest_context: int | None
    kinds: tuple[KindBytes, ...]
    advice: tuple[Advice, ...]


def ledger(
    config: Any,
    context: int,
    batch: int,
    dtype: Any = None,
    block_size: int = 16,
    quantization: str | None = None,
    checkpoint_every: int | None = None,
    budget: int | str | None = None,
    state_dtype: Any = "float32",
) -> Ledger:
    """Count what a model's caches take. K/V follow 2 x layers x batch x K/V heads x tokens x head width x bytes.

    Not counted: a paged cache without quantization may keep K/V once more as its steps gather them (``keep_gathered``).

    Args:
        config: a transformers config, a dict of its fields, or the path of a ``config.json`` or its folder; never a
            model. A dict with a ``model_type`` that transformers knows gets that class's defaults, another is taken as
            it is.
        context: tokens of a row, prompt and output together.
        batch: rows, each with a cache of its own (samples and beams count).
        dtype: of K/V and convolutions, such as ``"bfloat16"``, ``"fp8"`` or ``torch.float16``; the config's own if left
            out, ``bfloat16`` where it names none. Eight bits are for K/V alone: convolutions then take two bytes.
        block_size: tokens of a block; 1 counts a cache without blocks.
        quantization: of full blocks, with scales by block: ``int8``, ``fp8``, ``int4`` or ``int2``.
        checkpoint_every: tokens between saved copies of the recurrent states, from which a shared prefix can go on.
        budget: bytes for the caches alone, such as ``"4GiB"``.
        state_dtype: of recurrent states.

    Raises:
        InputError: the config cannot be read, its architecture is not known, or a number or name is none of the above.
    """
    for name, value in {"context": context, "batch": batch, "block_size": block_size}.items():
        _check_positive(name, value)
    if checkpoint_every is not None:
        _check_positive("checkpoint_every", checkpoint_every)
    if quantization is not None and quantization not in PRECISIONS:
        raise InputError(f"unknown quantization {quantization!r}: {nearest(str(quantization), PRECISIONS)}")
    decoder = read_config(config)
    shapes = layer_shapes(decoder)
    # A config.json of older days says torch_dtype; config objects warn when asked for it.
    own_dtype = getattr(decoder, "dtype", None) or vars(decoder).get("torch_dtype")
    dtype = _dtype_name(dtype or own_dtype or "bfloat16")
    account = Account(
        layers=tuple(Counter(shapes).items()),
        dtype_bytes=_DTYPES[dtype],
        state_bytes=_DTYPES[_dtype_name(state_dtype)],
        block_size=block_size,
        precision=PRECISIONS[quantization] if quantization else None,
        checkpoint_every=checkpoint_every,
    )
    budget = None if budget is None else parse_bytes(budget)
    per_token = account.total(account.token)
    states, convs = account.total(account.state), account.total(account.conv)
    return Ledger(
        model_type=getattr(decoder, "model_type", ""),
        context=context,
        batch=batch,
        dtype=dtype,
        block_size=block_size,
        quantization=quantization,
        kv_bytes_per_token=per_token,
        state_bytes_per_request=states,
        conv_bytes_per_request=convs,
        scale_bytes_per_block=account.total(account.scales),
        blocks_per_request=-(-context // block_size) if any(s.heads and s.kept is None for s in shapes) else 0,
        block_waste_bytes=batch * account.total(lambda shape: account.blocks(shape, context)[1]),
        checkpoint_bytes=batch * account.checkpoints(context),
        checkpoint_kv_ratio=(states + convs) / (checkpoint_every * per_token)
        if checkpoint_every and per_token
        else None,
        total_bytes=batch * account.row(context),
        crossover_tokens=account.crossover(),
        budget_bytes=budget,
        largest_batch=None if budget is None else budget // account.peak(context),
        largest_context=None if budget is None else account.longest(budget // batch),
        kinds=_kinds(account, context, batch),
        advice=advise(account, context, batch, budget),
    )


def _kinds(account: Account, context: int, batch: int) -> tuple[KindBytes, ...]:
    groups: dict[tuple[str, int | None], list[tuple[LayerShape, int]]] = {}
    for shape, count in account.layers:
        groups.setdefault((shape.kind, shape.kept), []).append((shape, count))
    return tuple(
        KindBytes(
            kind=kind,
            layers=sum(count for _, count in layers),
            kept=kept,
            kv_bytes_per_token=part.total(part.token),
            state_bytes_per_request=part.total(part.state),
            conv_bytes_per_request=part.total(part.conv),
            total_bytes=batch * part.row(context),
        )
        for (kind, kept), layers in groups.items()
        for part in [replace(account, layers=tuple(layers), checkpoint_every=None)]
    )


def _dtype_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    name = _SHORT_NAMES.get(name, name)
    if name not in _DTYPES:
        raise InputError(f"unknown dtype {str(dtype)!r}: {nearest(name, [*_DTYPES, *_SHORT_NAMES])}")
    return name


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} is {value!r}: give a whole number of at least 1")
