"""Sequences out of quantized caches: they go on as they would have, in a cache of any quantization."""

import contextlib
import functools
import random

import pytest
import torch
from safetensors.torch import load

from decodekit.cache.paged import PagedCache
from decodekit.core.errors import InputError
from decodekit.kernels.kv_quantize import BITS
from decodekit.testing import tiny_model
from tests.cache.families import Loop, family_model
from tests.cache.test_transfer import cache_of, go_on, header_of, prefilled, state, tokens

pytestmark = pytest.mark.integration

FAMILIES = ("llama", "gemma3", "qwen3_5", "deepseek_v3")


@functools.cache
def model_of(name, dtype):
    model = family_model(name)
    return model if dtype == torch.float32 else type(model)(model.config).to(dtype).eval().requires_grad_(False)


DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        # Quick: each quantization of each family once, in both types in turn.
        pytest.param(name, kind, dtype, marks=[] if (row + column + place) % 2 == 0 else pytest.mark.slow)
        for row, name in enumerate(FAMILIES)
        for column, kind in enumerate(BITS)
        for place, dtype in enumerate(DTYPES)
    ],
)
def test_a_loaded_row_goes_on_exactly(name, kind, dtype):
    model = model_of(name, dtype)
    here, there = (Loop(model, cache_of(model, quantization=kind)) for _ in range(2))
    for seed, length in enumerate((1, 6, 21, 24)):
        [row] = here.open(tokens(length, seed))
        here.prefill(row, tokens(length, seed))
        assert there.cache.load(here.cache.export(row)) == row
    rows = range(4)
    assert torch.equal(go_on(there, *rows), go_on(here, *rows))
    for row in rows:
        found, expected = (load(loop.cache.export(row)) for loop in (there, here))
        assert all(torch.equal(found[part], expected[part]) for part in expected)


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("name", FAMILIES)
def test_any_quantization_loads_what_another_exported(name, kind):
    """What is loaded are the numbers that were read; a quantized cache rounds them by its own rule."""
    model = family_model(name)
    blob = prefilled(model, tokens(21), quantization=kind).cache.export(0)
    exact = Loop(model, cache_of(model))
    exact.cache.load(blob)
    again = load(exact.cache.export(0))
    for part, expected in load(blob).items():
        assert torch.equal(
            again[part], expected[-len(again[part]) :]
        )  # a window's first block may be whole in the blob
    expected = go_on(exact, 0)
    for other, size, tolerance in (("int8", 4, 0.05), ("int8", 16, 0.05), (None, 16, 1e-4)):
        loop = Loop(model, cache_of(model, quantization=other, block_size=size))
        loop.cache.load(blob)
        found = go_on(loop, 0)
        assert (found - expected).abs().mean() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_full_precision_loads_into_a_quantized_cache_as_if_computed_there(name):
    model = family_model(name)
    blob = prefilled(model, tokens(24), checkpoint=None).cache.export(0)
    for kind in BITS:
        loop = Loop(model, cache_of(model, quantization=kind))
        computed = prefilled(model, tokens(24), checkpoint=None, quantization=kind)
        loop.cache.load(blob)
        found, expected = (load(cache.export(0)) for cache in (loop.cache, computed.cache))
        if name != "gemma3":  # of a window's first block only a part was there to find the range
            assert all(torch.equal(found[part], expected[part]) for part in expected)
        assert found.keys() == expected.keys()


def test_later_prompts_hit_loaded_blocks():
    model = family_model("llama")
    for kind in BITS:
        here = prefilled(model, tokens(24), quantization=kind)
        there = Loop(model, cache_of(model, quantization=kind))
        there.cache.load(here.cache.export(0))
        prompt = [*tokens(24), 5]
        for loop in (here, there):
            loop.open(prompt)
            assert loop.cache.rows[1].num_cached == 24
        assert torch.equal(there.prefill(1, prompt), here.prefill(1, prompt))


@functools.cache
def small(kind):
    model = tiny_model("hybrid", layers=2)
    cache = prefilled(model, tokens(9), quantization=kind).cache
    return cache.export(0), cache


@pytest.mark.parametrize("kind", BITS)
def test_a_flipped_byte_is_never_loaded(kind):
    """Every byte of the header's ends, and hundreds elsewhere; a flip that JSON does not mind loads the very same."""
    blob, cache = small(kind)
    rng, header = random.Random(0), 8 + int.from_bytes(blob[:8], "little")
    places = [*range(16), *rng.choices(range(16, header), k=140), *rng.choices(range(header, len(blob)), k=150)]
    before = state(cache)
    loaded = 0
    for place in places:
        damaged = bytearray(blob)
        damaged[place] ^= rng.randrange(1, 256)
        row = None
        with contextlib.suppress(InputError):
            row = cache.load(bytes(damaged))
        if row is not None:
            loaded += 1
            assert place < header
            again = cache.export(row)
            assert header_of(again) == header_of(blob)
            assert all(torch.equal(load(again)[part], expected) for part, expected in load(blob).items())
            cache.release([row])
        assert state(cache)[1:] == before[1:]
    assert loaded < 5


@pytest.mark.parametrize("kind", BITS)
def test_a_part_of_a_file_is_never_loaded(kind):
    blob, cache = small(kind)
    before = state(cache)
    for cut in range(0, len(blob), 37):
        for part in (blob[:cut], blob[cut + 1 :], blob[:cut] + blob[cut + 1 :], blob + blob[: cut + 1]):
            with pytest.raises(InputError, match=r"^the blob "):
                cache.load(part)
    assert state(cache) == before


def test_another_dtype_is_refused_before_anything_was_stored():
    """A cache without stores takes the blob's dtype; one that has some tells."""
    model = family_model("llama")
    blob = prefilled(model_of("llama", torch.bfloat16), tokens(9), quantization="int8").cache.export(0)
    cache = prefilled(model, tokens(9, 1), quantization="int8").cache
    before = state(cache)
    with pytest.raises(InputError, match=r"dtype|of torch\.bfloat16") as raised:
        cache.load(blob)
    assert "\n" not in str(raised.value)
    assert state(cache) == before


def test_the_whole_of_a_quantized_block_is_in_a_blob():
    """A window shows 6 tokens, from the middle of a block: without the rest, the block's range would be another."""
    model = family_model("gemma3")
    kept = {
        kind: load(prefilled(model, tokens(21), quantization=kind).cache.export(0))["layers.0.keys"].shape[0]
        for kind in (None, "int8")
    }
    assert kept == {None: 6, "int8": 9}
    assert (
        PagedCache(model.config, num_blocks=9, block_size=8).load(
            prefilled(model, tokens(21), quantization="int8").cache.export(0)
        )
        == 0
    )
