"""A sequence from one cache to another: it goes on exactly, and nothing but the whole of it is ever loaded."""

import contextlib
import functools
import io
import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from decodekit.cache import transfer
from decodekit.cache.allocator import OutOfBlocks
from decodekit.cache.paged import PagedCache
from decodekit.cache.prefix import Prompt
from decodekit.core.errors import InputError, Refused
from decodekit.testing import tiny_model
from tests.cache.families import Loop, family_model, forward

pytestmark = pytest.mark.integration

FAMILIES = ("llama", "gemma3", "qwen3_5", "mamba2")
THEN = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def tokens(count, seed=0):
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def cache_of(model, **options):
    return PagedCache(model.config, **{"num_blocks": 64, "block_size": 4, **options})


def prefilled(model, prompt, **options):
    loop = Loop(model, cache_of(model, **options))
    loop.prefill(loop.cache.open([prompt])[0], prompt.tokens if isinstance(prompt, Prompt) else prompt)
    return loop


def go_on(loop, *rows):
    """Logits of more tokens, one a step and then several; the same ones for all rows."""
    steps = [loop.step(rows, [[token]] * len(rows)) for token in THEN[:5]]
    return torch.cat([*steps, loop.extend(rows, [THEN[5:]] * len(rows))], dim=1)


@functools.cache
def in_bfloat16(name):
    return type(family_model(name))(family_model(name).config).bfloat16().eval().requires_grad_(False)


@functools.cache
def exported(name):
    return prefilled(family_model(name), tokens(21)).cache.export(0)


def header_of(blob):
    return json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"]


def edited(blob, *, reseal=True, tensors=(), **fields):
    """A blob with other metadata and tensors, and a checksum that fits."""
    parts = {**load(blob), **dict(tensors)}
    header = header_of(blob)
    checksum = header.pop("checksum")
    header |= fields
    return save(parts, {**header, "checksum": transfer._checksum(parts, header) if reseal else checksum})


def state(cache):
    """All that a refused load must leave as it was."""
    return cache.stats(), len(cache.rows), sorted(cache._stores)


# It goes on as it would have


@pytest.mark.parametrize("model_of", [family_model, in_bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("size", "other"), [(4, 4), (4, 16), (16, 3)])
def test_a_loaded_row_goes_on_exactly(name, model_of, size, other):
    model = model_of(name)
    for length in (1, 6, 21, 32):
        here, there = prefilled(model, tokens(length), block_size=size), Loop(model, cache_of(model, block_size=other))
        row = there.cache.load(here.cache.export(0))
        assert there.cache.rows[row].tokens == tokens(length)
        assert torch.equal(go_on(there, row), go_on(here, 0))


@pytest.mark.parametrize("name", FAMILIES)
def test_it_goes_on_among_other_rows(name):
    model = family_model(name)
    there = prefilled(model, tokens(9, 1))
    there.open(tokens(13, 2))
    there.prefill(1, tokens(13, 2))
    there.cache.fork([1, 0, 0])
    row = there.cache.load(exported(name))
    assert row == 3
    found = torch.cat([there.step([2, row, 0], [[token]] * 3) for token in THEN], dim=1)
    for number, prompt in enumerate([tokens(9, 1), tokens(21), tokens(13, 2)]):
        expected = forward(model, [[*prompt, *THEN]])[0, len(prompt) :]
        assert torch.allclose(found[number], expected, atol=1e-4 * expected.abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_it_goes_on_in_the_middle_of_a_prompt_and_through_a_file(name, tmp_path):
    model, prompt = family_model(name), tokens(30)
    here, there = Loop(model, cache_of(model)), Loop(model, cache_of(model, block_size=8))
    here.open(prompt)
    here.extend([0], [prompt[:10]])
    blob = here.cache.export(0, tmp_path / "sequence.safetensors")
    assert (tmp_path / "sequence.safetensors").read_bytes() == blob
    assert [path.name for path in tmp_path.iterdir()] == ["sequence.safetensors"]
    there.cache.load(str(tmp_path / "sequence.safetensors"))
    assert there.cache.rows[0].prompt.tokens == prompt
    assert torch.allclose(there.prefill(0, prompt)[-1], here.prefill(0, prompt)[-1], atol=1e-5)


def test_a_row_without_tokens_moves_too():
    for name in FAMILIES:
        model = family_model(name)
        here, there = cache_of(model), Loop(model, cache_of(model))
        here.open([tokens(5)])
        there.cache.load(here.export(0))
        expected = forward(model, [tokens(5)])[0, -1]
        assert torch.allclose(there.prefill(0, tokens(5))[-1], expected, atol=1e-4 * expected.abs().max())


def test_only_what_a_window_shows_is_moved():
    model = family_model("gemma3")
    kept = {name: part.shape[0] for name, part in load(exported("gemma3")).items() if name.endswith("keys")}
    assert kept == {"layers.0.keys": 6, "layers.1.keys": 21, "layers.2.keys": 6, "layers.3.keys": 21}
    short, long = (len(prefilled(model, tokens(n)).cache.export(0)) for n in (21, 121))
    assert long - short < 100 * (2 * 2 * 2 * 8 * 4 + 16) + 64


# Blocks, prefixes, rollback


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_later_prompts_hit_loaded_blocks(name, size):
    model = family_model(name)
    for cut in range(1, 22):
        loop = Loop(model, cache_of(model, block_size=size))
        loop.cache.load(exported(name))
        prompt = [*tokens(21)[:cut], (*tokens(21), 0)[cut] + 1, 3, 4]
        loop.open(prompt)
        # A window shows the last 6 tokens; a block of which only a part was loaded is not hit.
        whole = name == "llama" or (cut == 21 and size in (1, 3))
        assert loop.cache.rows[1].num_cached == (cut // size * size if whole else 0)
        expected = forward(model, [prompt])[0, -1]
        assert torch.allclose(loop.prefill(1, prompt)[-1], expected, atol=1e-4 * expected.abs().max())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [4, 16])
def test_a_loaded_row_rolls_back(name, size):
    model = family_model(name)
    for drop in range(22):
        loop = Loop(model, cache_of(model, block_size=size))
        loop.cache.load(exported(name))
        (again,) = loop.cache.rollback([drop])
        length = loop.cache.rows[0].length
        assert length + again == 21 - drop
        rest = [*tokens(21)[length : 21 - drop], 3, 4]
        expected = forward(model, [[*tokens(21)[:length], *rest]])[0, -1]
        assert torch.allclose(loop.extend([0], [rest])[0, -1], expected, atol=1e-4 * expected.abs().max())


def test_a_states_checkpoint_is_made_where_it_is_due():
    model = family_model("qwen3_5")
    blob = prefilled(model, tokens(24), checkpoint=None).cache.export(0)
    loop = Loop(model, cache_of(model, checkpoint=8))
    loop.cache.load(blob)
    loop.open([*tokens(24), 3])
    assert loop.cache.rows[1].num_cached == 24


def test_tenants_stay_apart():
    model = family_model("llama")
    prompt = Prompt(tokens(17), salt=b"\x00a", extra=("adapter", 1, None), media=((2, 4, ("cat", b"\xff")),))
    cache = cache_of(model)
    cache.load(prefilled(model, prompt).cache.export(0))
    assert cache.rows[0].prompt == prompt
    later = [Prompt(tokens(17), prompt.salt, prompt.extra, prompt.media), Prompt(tokens(17), prompt.salt), tokens(17)]
    cache.open(later)
    assert [row.num_cached for row in cache.rows] == [0, 16, 0, 0]


def test_a_prompt_without_salt_gets_that_of_the_cache():
    cache = cache_of(family_model("llama"), salt="mine")
    cache.load(exported("llama"))
    assert cache.rows[0].prompt.salt == "mine"


@pytest.mark.parametrize("name", FAMILIES)
def test_it_takes_no_more_blocks_than_it_keeps(name):
    model = family_model(name)
    here = prefilled(model, tokens(200))
    blob, used = here.cache.export(0), [group.pool.used_blocks for group in here.cache.groups]
    cache = cache_of(model, num_blocks=max([*used, 1]))
    cache.load(blob)
    assert [group.pool.used_blocks for group in cache.groups] == used
    assert [group.pool.stats()["peak"] for group in cache.groups] == used
    cache.release([0])
    assert [group.pool.used_blocks for group in cache.groups] == [0] * len(used)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_without_room_nothing_changes(name):
    model = family_model(name)
    loop = prefilled(model, tokens(9, 1), num_blocks=6)
    loop.open(tokens(5, 2))
    loop.prefill(1, tokens(5, 2))
    loop.cache.release([1])
    before = state(loop.cache)
    with pytest.raises(OutOfBlocks, match="6 blocks needed"):
        loop.cache.load(exported(name))
    assert state(loop.cache) == before
    loop.open([*tokens(5, 2)])
    assert loop.cache.rows[1].num_cached == 4
    assert go_on(prefilled(model, tokens(9, 1)), 0)[0, 0].equal(loop.step([0], [THEN[:1]])[0, 0])


def test_a_write_that_fails_takes_nothing(monkeypatch):
    cache, made = cache_of(family_model("gemma3")), []
    before, blob = state(cache), exported("gemma3")

    def failing(number, keys, values):
        made.append(number)
        if len(made) == 3:
            raise MemoryError
        return PagedCache._new_store(cache, number, keys, values)

    monkeypatch.setattr(cache, "_new_store", failing)
    with pytest.raises(MemoryError):
        cache.load(blob)
    monkeypatch.undo()
    assert (len(cache.rows), cache._stores) == (0, {})
    assert [group.pool.used_blocks for group in cache.groups] == [0, 0]
    assert before[1:] == state(cache)[1:]


# What is refused


def test_rows_of_unknown_tokens_are_refused():
    model = family_model("llama")
    cache = cache_of(model)
    forward(model, [tokens(5)], cache)
    with pytest.raises(Refused, match=r"row 0 was made by a forward without names.*open rows with their prompts"):
        cache.export(0)
    with pytest.raises(InputError, match="reset it before"):
        cache.load(exported("llama"))
    with pytest.raises(InputError, match="row 1 is not open; the cache has 1 rows"):
        cache.export(1)


def test_nothing_moves_inside_a_step():
    cache = prefilled(family_model("llama"), tokens(5)).cache
    cache.begin([0], [[5]])
    for move in (lambda: cache.export(0), lambda: cache.load(exported("llama"))):
        with pytest.raises(InputError, match="inside a step"):
            move()


def test_keys_that_are_no_data_are_refused():
    loop = prefilled(family_model("llama"), Prompt(tokens(5), extra=frozenset([1])))
    with pytest.raises(InputError, match=r"key is frozenset\(\{1\}\); .*str, bytes, int"):
        loop.cache.export(0)


def torch_file():
    buffer = io.BytesIO()
    torch.save({"tokens": torch.zeros(3)}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "not safetensors"),
        (pickle.dumps({"tokens": [1, 2]}), "not safetensors"),
        (torch_file(), "not safetensors"),
        (save({"weight": torch.zeros(3)}), "no exported sequence; PagedCache.export makes one"),
        (save({"weight": torch.zeros(3)}, {"format": "pt"}), "no exported sequence"),
        (
            save({}, {"format": "decodekit sequence", "version": "2", "decodekit": "9.1"}),
            "by decodekit 9.1; .* version 1",
        ),
        (save({}, {"format": "decodekit sequence", "version": "1"}), "damaged: its checksum"),
    ],
    ids=["empty", "pickle", "torch", "weights", "pt", "newer", "unsealed"],
)
def test_other_files_are_refused(blob, message, tmp_path):
    cache = prefilled(family_model("llama"), tokens(9, 1)).cache
    before, path = state(cache), tmp_path / "sequence"
    path.write_bytes(blob)
    for given_, origin in ((blob, "the blob"), (path, str(path))):
        with pytest.raises(InputError, match=message) as raised:
            cache.load(given_)
        assert str(raised.value).startswith(origin)
        assert "\n" not in str(raised.value)
    assert state(cache) == before
    with pytest.raises(InputError, match=r"nowhere cannot be read \(No such file"):
        cache.load(tmp_path / "nowhere")


def test_sequences_of_other_models_are_refused():
    for name in FAMILIES:
        for other in FAMILIES:
            if name != other:
                with pytest.raises(InputError, match=r"is of another model: .*, here "):
                    cache_of(family_model(name)).load(exported(other))
    model = family_model("llama")
    for field, value in (("rope_parameters", {"rope_theta": 5.0, "rope_type": "default"}), ("vocab_size", 98)):
        config = type(model.config).from_dict({**model.config.to_dict(), field: value})
        with pytest.raises(InputError, match=f"another model: {field} is "):
            PagedCache(config, num_blocks=64).load(exported("llama"))


def test_the_name_and_the_version_of_transformers_do_not_matter():
    model = family_model("llama")
    fields = {**model.config.to_dict(), "_name_or_path": "elsewhere", "eos_token_id": 7, "made_by": "me"}
    assert PagedCache(type(model.config).from_dict(fields), num_blocks=64).load(exported("llama")) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_another_dtype_is_refused(name):
    cache = prefilled(family_model(name), tokens(5)).cache
    before = state(cache)
    with pytest.raises(InputError, match=r"of torch.bfloat16.*; this cache has .* of torch.float32"):
        cache.load(
            edited(prefilled(in_bfloat16(name), tokens(5)).cache.export(0), model=header_of(exported(name))["model"])
        )
    assert state(cache) == before


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"tensors": {"tokens": torch.arange(20)}}),
        ("llama", {"tensors": {"tokens": torch.zeros(0, dtype=torch.long)}}),
        ("llama", {"tensors": {"tokens": torch.tensor(3)}}),
        ("llama", {"tensors": {"tokens": torch.zeros(21)}}),
        ("llama", {"tensors": {"layers.0.keys": torch.zeros(21, 1, 9)}}),
        ("llama", {"tensors": {"layers.0.keys": torch.zeros(3)}}),
        ("llama", {"tensors": {"layers.7.keys": torch.zeros(3), "layers.7.values": torch.zeros(3)}}),
        ("llama", {"tensors": {"layers.0.conv_states.0": torch.zeros(3)}}),
        ("llama", {"tensors": {"layers.7.keys": torch.zeros(3)}}),
        ("llama", {"tensors": {"more": torch.zeros(3)}}),
        ("llama", {"keys": "[1, 2]"}),
        ("llama", {"keys": "{"}),
        ("llama", {"model": "3"}),
        ("qwen3_5", {"tensors": {"layers.0.conv_states.0": torch.zeros(3)}}),
        ("qwen3_5", {"tensors": {"layers.0.conv_states.1": torch.zeros(3)}}),
        ("qwen3_5", {"tensors": {"layers.0.other_states.0": torch.zeros(3)}}),
    ],
)
def test_what_does_not_fit_is_refused(name, change):
    cache = prefilled(family_model(name), tokens(9, 1)).cache
    before = state(cache)
    with pytest.raises(InputError, match=r"^the blob ") as raised:
        cache.load(edited(exported(name), **change))
    assert "\n" not in str(raised.value)
    assert state(cache) == before
    assert cache.load(edited(exported(name))) == 1


@functools.cache
def small():
    """A blob of few bytes, and a cache of its model."""
    model = tiny_model("hybrid", layers=2)
    cache = prefilled(model, tokens(3)).cache
    return cache.export(0), cache


def refused_or_the_same(blob):
    whole, cache = small()
    before = state(cache)
    row = None
    with contextlib.suppress(InputError):
        row = cache.load(blob)
    if row is not None:  # a flip that JSON does not mind
        again = cache.export(row)
        assert header_of(again) == header_of(whole)
        assert all(map(torch.equal, load(again).values(), load(whole).values()))
        cache.release([row])
    assert state(cache)[1:] == before[1:]


@settings(max_examples=150)
@given(st.data())
def test_a_flipped_byte_is_never_loaded(data):
    blob = bytearray(small()[0])
    header = 8 + int.from_bytes(blob[:8], "little")
    place = data.draw(st.integers(0, header - 1) | st.integers(header, len(blob) - 1))
    blob[place] ^= data.draw(st.integers(1, 255))
    refused_or_the_same(bytes(blob))


@settings(max_examples=60)
@given(st.data())
def test_a_part_of_a_file_is_never_loaded(data):
    blob = small()[0]
    cut = data.draw(st.integers(0, len(blob) - 1))
    for part in (blob[:cut], blob[cut + 1 :], blob[:cut] + blob[cut + 1 :], blob + blob[: cut + 1]):
        with pytest.raises(InputError):
            small()[1].load(part)


@settings(max_examples=60)
@given(st.binary(max_size=200), st.booleans())
def test_noise_is_never_loaded(noise, framed):
    with pytest.raises(InputError):
        small()[1].load(len(noise).to_bytes(8, "little") + noise if framed else noise)
