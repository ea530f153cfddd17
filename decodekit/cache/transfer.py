"""One sequence of a cache as bytes, to go on with it in another: prefill here, decode there.

A safetensors file, so nothing in it is ever executed. It knows no blocks: a layer's K/V are [T, H, D], T the tokens that the
next token sees (of a quantized cache, the whole block of the first one, without which its range would be another), and go
into blocks of any size. The header has a checksum, and what the K/V depend on: the model's
configuration (not its weights), the salt, the adapter's and the media's keys. All of it is checked before the cache changes.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save
from torch import Tensor

from decodekit.cache.allocator import OutOfBlocks
from decodekit.cache.blocks import BlockTable
from decodekit.cache.gather import Group
from decodekit.cache.prefix import Prompt
from decodekit.cache.rows import Row
from decodekit.cache.states import StateBatch, StateKey, StateRef
from decodekit.core.errors import InputError, Refused

if TYPE_CHECKING:
    from decodekit.cache.paged import PagedCache

_FORMAT, _VERSION = "decodekit sequence", 1

_NOT_THE_MODEL = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "transformers_version",
    "use_cache",
}
"""Fields of a configuration on which no K/V depend."""


@dataclass(frozen=True)
class _Sequence:
    """What a file holds.

    Attributes:
        prompt: what the row was opened with.
        tokens: those whose K/V and states are there.
        kv: [T, H, D] keys and [T, H, Dv] values of each layer that has some.
        states: without the dimension of rows.
    """

    prompt: Prompt
    tokens: list[int]
    kv: dict[int, tuple[Tensor, Tensor]]
    states: dict[StateKey, Tensor]


def dump(cache: PagedCache, number: int) -> bytes:
    """Row ``number`` of a cache; see :meth:`PagedCache.export`."""
    _check_whole(cache)
    row = cache.rows[number]
    if row.prompt is None:
        raise Refused(
            f"row {number} was made by a forward without names, so which of its tokens are pads is not known; "
            "open rows with their prompts to export them"
        )
    tensors = {"prompt": torch.tensor(list(row.prompt.tokens)).long(), "tokens": torch.tensor(row.tokens).long()}
    for group, table in zip(cache.groups, row.tables, strict=True):
        start = group.first_needed(row.length)
        if cache.quantization is not None:
            start = start // group.pool.block_size * group.pool.block_size
        slots = torch.tensor(group.pool.slot_mapping(table, start, row.length)).long()
        for layer in group.layers if row.length else ():
            store = cache._stores[layer]
            for name, part in zip(_kv_names(layer), store.read(slots.to(store.device).unsqueeze(0)), strict=True):
                tensors[name] = _on_host(part[0])
    if row.state is not None:
        for key, states in row.state.batch.tensors.items():
            tensors[_state_name(key)] = _on_host(states[row.state.place])
    metadata = {
        "format": _FORMAT,
        "version": str(_VERSION),
        "decodekit": version("decodekit"),
        "model": json.dumps(_describe(cache), sort_keys=True),
        "keys": json.dumps(_encode((row.prompt.salt, row.prompt.extra, tuple(map(tuple, row.prompt.media))))),
    }
    return save(tensors, {**metadata, "checksum": _checksum(tensors, metadata)})


def restore(cache: PagedCache, blob: bytes, origin: str) -> int:
    """Append the row of ``blob`` to a cache; see :meth:`PagedCache.load`. ``origin`` names the blob in errors."""
    _check_whole(cache)
    sequence = _read(cache, blob, origin)
    _check(cache, sequence, origin)
    cache._use_names(True)
    length, prompt = len(sequence.tokens), cache._prompt(sequence.prompt)
    for group in cache.groups:
        pool, needed = group.pool, _blocks_to_take(group, length)
        if not pool.can_allocate(needed):
            raise OutOfBlocks(needed, pool.free_blocks, pool.cached_blocks, pool.num_blocks)
    row = Row(prompt, [], length, tokens=sequence.tokens, final=length, sealed=[0] * len(cache.groups))
    row.state = _place_states(cache, sequence.states)
    new: list[int] = []
    try:
        for number, group in enumerate(cache.groups):
            row.tables.append(group.pool.open(replace(prompt, tokens=())))
            _take_blocks(group, row.tables[-1], length)
            _write(cache, number, row, sequence, new)
            first = group.first_needed(length)
            group.pool.commit(row.tables[-1], sequence.tokens, written_from=first)
            row.floor = length if first else row.floor
            cache._seal(number, group, [row])
        cache._book.rows.append(row)
    except BaseException:
        for layer in new:
            cache._stores.pop(layer, None)
        cache._book.release([row])
        raise
    cache._book.tidy([row], [])
    return len(cache._book.rows) - 1


def _check_whole(cache: PagedCache) -> None:
    if cache.stream is not None:
        raise Refused(
            "a cache with a window keeps parts of its rows only, which a file does not hold; use one without window"
        )


def _read(cache: PagedCache, blob: bytes, origin: str) -> _Sequence:
    """The sequence in ``blob``, which is undamaged and of the cache's model."""
    try:
        tensors = parse(blob)
        metadata = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")]).get("__metadata__") or {}
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{origin} is no exported sequence, or a damaged one: it is not safetensors ({error})"
        ) from error
    if metadata.get("format") != _FORMAT:
        raise InputError(f"{origin} is a safetensors file, but no exported sequence; PagedCache.export makes one")
    if (found := metadata.get("version")) != str(_VERSION):
        raise InputError(
            f"{origin} has version {found!r} of the format, written by decodekit {metadata.get('decodekit')}; "
            f"decodekit {version('decodekit')} reads version {_VERSION}: export and load with the same decodekit"
        )
    if metadata.pop("checksum", None) != _checksum(tensors, metadata):
        raise InputError(f"{origin} is damaged: its checksum is not that of its content; export or copy it again")
    try:
        theirs, mine = json.loads(metadata["model"]), _describe(cache)
        # A field that only one side knows came or went with a version of transformers.
        different = [name for name in sorted(theirs.keys() & mine.keys()) if theirs[name] != mine[name]]
        salt, extra, media = _decode(json.loads(metadata["keys"]))
        prompt = Prompt(_ids(tensors.pop("prompt")), salt, extra, media)
        sequence = _Sequence(prompt, _ids(tensors.pop("tokens")), {}, {})
        while tensors:
            name = next(iter(tensors))
            _, layer, kind, *place = name.split(".")
            if place:
                sequence.states[int(layer), kind, int(place[0])] = tensors.pop(name)
            else:
                keys, values = map(tensors.pop, _kv_names(int(layer)))
                sequence.kv[int(layer)] = keys, values
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{origin} is no sequence that decodekit exported ({error!r})") from error
    if different:
        listed = ", ".join(
            f"{name} is {reprlib.repr(theirs[name])}, here {reprlib.repr(mine[name])}" for name in different[:3]
        )
        raise InputError(f"{origin} is of another model: {listed}; load it into a cache of the model that made it")
    return sequence


def _check(cache: PagedCache, sequence: _Sequence, origin: str) -> None:
    """Whether the shapes and dtypes are those that the cache has, or will have."""
    length = len(sequence.tokens)
    expected = set(cache._group_of) if length else set()
    if sequence.kv.keys() != expected:
        raise InputError(
            f"{origin} has K/V of layers {sorted(sequence.kv)}; this cache keeps those of {sorted(expected)}"
        )
    for layer, parts in sequence.kv.items():
        group, store = cache.groups[cache._group_of[layer]], cache._stores.get(layer)
        tokens = length - group.first_needed(length)
        stored = parts if store is None else store.read(torch.zeros((1, 1), dtype=torch.long, device=store.device))
        for kind, part, like in zip(("keys", "values"), parts, stored, strict=True):
            given = len(parts[0]) if parts[0].dim() else 0
            shape = [max(tokens, min(given, length)), *like.shape[-2:]]
            if list(part.shape) != shape or part.dtype != like.dtype or not part.is_floating_point():
                raise InputError(
                    f"{origin} has {kind} {list(part.shape)} of {part.dtype} in layer {layer}; this cache has {shape} of "
                    f"{like.dtype}: load it where the model has the same dtype"
                )
    known = next((row.state.batch.tensors for row in cache.rows if row.state is not None), None)
    if {layer for layer, _, _ in sequence.states} != (cache._state_layers if length else set()) or (
        length and known is not None and sequence.states.keys() != known.keys()
    ):
        raise InputError(
            f"{origin} has states {sorted(sequence.states)}; the layers of this cache with states are "
            f"{sorted(cache._state_layers)}"
        )
    for key, state in sequence.states.items():
        if known is not None and (state.shape, state.dtype) != (known[key].shape[1:], known[key].dtype):
            raise InputError(
                f"{origin} has {_state_name(key)} {list(state.shape)} of {state.dtype}; this cache has "
                f"{list(known[key].shape[1:])} of {known[key].dtype}: load it where the model has the same dtype"
            )


def _place_states(cache: PagedCache, states: dict[StateKey, Tensor]) -> StateRef | None:
    """The states as a batch of one row, where those of the other rows are."""
    if not states:
        return None
    known = next((row.state.batch.tensors for row in cache.rows if row.state is not None), {})
    devices = {key: known[key].device if key in known else cache.device for key in states}
    return StateRef(StateBatch({key: state.to(devices[key]).unsqueeze(0) for key, state in states.items()}, 1), 0)


def _blocks_to_take(group: Group, length: int) -> int:
    """How many blocks ``length`` tokens take of which a window has let go of the first."""
    size = group.pool.block_size
    return max(-(-length // size) - group.first_needed(length) // size, int(length > 0))


def _take_blocks(group: Group, table: BlockTable, length: int) -> None:
    """Room for ``length`` tokens; never more blocks at once than are kept, whatever the window has let go of."""
    size, kept = group.pool.block_size, _blocks_to_take(group, length)
    skipped = group.first_needed(length) // size * size
    while table.length < skipped:
        group.pool.append(table, min(kept * size, skipped - table.length))
        group.pool.slide(table, table.length)
    group.pool.append(table, length - skipped)


def _write(cache: PagedCache, number: int, row: Row, sequence: _Sequence, new: list[int]) -> None:
    """Store the K/V of one group; ``new`` gets the layers that had no store."""
    group, table = cache.groups[number], row.tables[number]
    start = table.slid * group.pool.block_size
    slots = torch.tensor(group.pool.slot_mapping(table, start, row.length)).long()
    cache._make_room(group)
    for layer in group.layers if row.length else ():
        store = cache._stores.get(layer)
        device = cache.device if store is None else store.device
        # What lies before the first token, in its block, is never seen; a copy of that token widens no quantized range.
        first = row.length - len(sequence.kv[layer][0])
        source = (torch.arange(start, row.length, device=device) - first).clamp_(min=0)
        keys, values = (part.to(device)[source] for part in sequence.kv[layer])
        if store is None:
            store = cache._stores[layer] = cache._new_store(number, keys, values)
            new.append(layer)
        store.write(slots.to(device), keys, values)


def _describe(cache: PagedCache) -> dict[str, Any]:
    """What K/V and states depend on beside tokens and weights, as JSON has it."""
    config = cache._config.get_text_config(decoder=True).to_dict()
    fields = {name: value for name, value in config.items() if name not in _NOT_THE_MODEL}
    fields["attention_layers"] = [[list(group.layers), group.window] for group in cache.groups]
    fields["state_layers"] = sorted(cache._state_layers)
    described: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    return described


def _checksum(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """SHA-256 of names, dtypes, shapes, the rest of the header, and every byte."""
    named = sorted(tensors.items())
    described = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in named]
    digest = hashlib.sha256(json.dumps([sorted(metadata.items()), described]).encode())
    for _, tensor in named:
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _encode(key: Hashable) -> Any:
    """A key as JSON: bytes as an object, a tuple as a list."""
    if key is None or type(key) in (str, int, bool):
        return key
    if isinstance(key, bytes):
        return {"bytes": key.hex()}
    if isinstance(key, tuple):
        return [_encode(part) for part in key]
    raise InputError(
        f"a prompt's salt, extra or media key is {key!r}; to be exported it must be made of str, bytes, int, bool, None "
        "and tuples of them"
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(part) for part in value)
    return bytes.fromhex(value["bytes"]) if isinstance(value, dict) else value


def _ids(tensor: Tensor) -> list[int]:
    if tensor.dim() != 1 or tensor.dtype != torch.long:
        raise ValueError(f"tokens are {list(tensor.shape)} of {tensor.dtype}")
    ids: list[int] = tensor.tolist()
    return ids


def _kv_names(layer: int) -> Sequence[str]:
    return f"layers.{layer}.keys", f"layers.{layer}.values"


def _state_name(key: StateKey) -> str:
    layer, kind, place = key
    return f"layers.{layer}.{kind}.{place}"


def _on_host(tensor: Tensor) -> Tensor:
    """A copy of its own: what a store or a batch hands out may be a view."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
