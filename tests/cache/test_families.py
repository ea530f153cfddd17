"""Every architecture, in every way its cache is used: logits of the same forward with a DynamicCache, and without a cache."""

import inspect

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from decodekit.cache.paged import PagedCache
from decodekit.core.compat import cache_layers
from decodekit.core.errors import Refused
from tests.cache.families import CACHE_NAMES, FAMILIES, Loop, family_model, forward

pytestmark = pytest.mark.integration

QUICK = ("llama", "gemma3", "qwen3_5", "mamba2", "jamba")
families = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


@pytest.fixture(params=families)
def model(request):
    return family_model(request.param)


@pytest.fixture
def ids():
    return torch.randint(3, 97, (3, 64), generator=torch.Generator().manual_seed(1))


def paged(model, **options):
    return PagedCache(model.config, **{"num_blocks": 96, "block_size": 4, **options})


def assert_close(found, expected, tolerance):
    """Relative to the largest logit; greedy tokens agree wherever they are clear."""
    scale = expected.abs().max()
    assert (found - expected).abs().max() <= tolerance * scale
    best = expected.topk(2).values
    clear = best[..., 0] - best[..., 1] > 2 * tolerance * scale
    assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])


def segments(model, cache, ids, lengths):
    logits, start = [], 0
    for count in lengths:
        positions = torch.arange(start, start + count).expand(len(ids), -1)
        logits.append(forward(model, ids[:, start : start + count], cache, position_ids=positions))
        start += count
    return torch.cat(logits, dim=1)


def uncached(model, tokens):
    """Logits after each token of one row, [n, V]."""
    return forward(model, [tokens])[0]


def test_every_recurrent_model_of_transformers_is_tried_here_or_refused():
    tried = {family_model(name).config.model_type.removesuffix("_text") for name in FAMILIES}
    tried |= {"lfm2_moe", "qwen3_5_moe"}  # the recurrent layers of lfm2 and qwen3_5
    found, refused, known = set(), set(), set(dir(transformers))  # to ask for a class imports its module
    for name, prefix in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        config_class = CONFIG_MAPPING[name]
        kind = config_class.model_type.removesuffix("_text")
        if prefix not in known or getattr(config_class, "is_encoder_decoder", False):
            continue
        try:
            if any(layer.states for layer in cache_layers(config_class())):
                found.add(kind)
        except Refused:
            refused.add(kind)
        except Exception:
            continue
    assert found <= tried
    assert {"olmo_hybrid", "kimi_linear", "inkling", "jamba", "mamba2"} <= found
    assert {"minimax", "recurrent_gemma", "rwkv", "xlstm", "zaya", "qwen4_exp"} <= refused


# As any transformers cache


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "lengths", [[64], [20, 25, 19], [32] + [1] * 32, [2, 1, 3, 58]], ids=["whole", "segments", "steps", "short"]
)
def test_forwards_as_with_a_dynamic_cache(model, ids, rows, lengths):
    ids = ids[:rows]
    cache = paged(model)
    found = segments(model, cache, ids, lengths)
    assert_close(found, segments(model, DynamicCache(config=model.config), ids, lengths), 1e-5)
    assert [row.length for row in cache.rows] in ([64] * rows, [0] * rows)  # states alone have no length


def test_left_padding_by_mask(model, ids):
    mask = torch.ones_like(ids)
    mask[1, :7] = mask[2, :12] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def run(cache):
        logits = [forward(model, ids[:, :30], cache, attention_mask=mask[:, :30], position_ids=positions[:, :30])]
        for end in range(31, 45):
            seen = mask[:, :end] if any(paged(model).groups) else None  # as generate does
            inputs = {"attention_mask": seen, "position_ids": positions[:, end - 1 : end]}
            logits.append(forward(model, ids[:, end - 1 : end], cache, **inputs))
        return torch.cat(logits, dim=1)[:, 13:]

    assert_close(run(paged(model)), run(DynamicCache(config=model.config)), 1e-5)


def test_generates_the_tokens_of_a_dynamic_cache(model, ids):
    name = next(name for name in CACHE_NAMES if name in inspect.signature(model.forward).parameters)
    for beams in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        options = {"max_new_tokens": 12, "do_sample": False, **beams}
        expected = model.generate(ids[:2, :21], **options)
        assert torch.equal(model.generate(ids[:2, :21], **options, **{name: paged(model)}), expected)


# Rows by name


def test_ragged_rows(model, ids):
    rows = [ids[0, :5].tolist(), ids[1, :17].tolist(), ids[2, :30].tolist()]
    loop = Loop(model, paged(model))
    numbers = loop.open(*rows)
    found = [loop.prefill(number, tokens) for number, tokens in zip(numbers, rows, strict=True)]
    queries = [ids[n, 30:40].tolist() for n in range(3)]
    steps = [loop.step(numbers, [[ids[n, 30 + t].item()] for n in range(3)]) for t in range(6)]
    together = torch.cat([*steps, loop.extend(numbers, [query[6:] for query in queries])], dim=1)
    for number, tokens in enumerate(rows):
        expected = uncached(model, tokens + queries[number])
        assert_close(torch.cat([found[number], together[number]]), expected, 1e-4)


def test_a_new_row_beside_old_ones(model, ids):
    loop = Loop(model, paged(model))
    loop.open(ids[0, :9].tolist())
    loop.prefill(0, ids[0, :9].tolist())
    loop.open([ids[1, 0].item()])
    logits = loop.step([1, 0], [[ids[1, 0].item()], [ids[0, 9].item()]])
    assert_close(logits[0], uncached(model, ids[1, :1].tolist()), 1e-4)
    assert_close(logits[1], uncached(model, ids[0, :10].tolist())[-1:], 1e-4)


def test_fork_then_diverge(model, ids):
    prompt = ids[0, :23].tolist()
    loop = Loop(model, paged(model))
    loop.open(prompt)
    loop.prefill(0, prompt)
    loop.cache.fork([0, 0, 0])
    tails = [ids[n, 40:50].tolist() for n in range(3)]
    found = loop.extend([0, 1, 2], tails)
    for number, tail in enumerate(tails):
        assert_close(found[number], uncached(model, prompt + tail)[23:], 1e-4)
    loop.cache.fork([2, 0])
    found = loop.extend([0, 1], [tails[1], tails[2]])
    assert_close(found[0], uncached(model, prompt + tails[2] + tails[1])[33:], 1e-4)
    assert_close(found[1], uncached(model, prompt + tails[0] + tails[2])[33:], 1e-4)


@pytest.mark.parametrize("recording", [False, True])
def test_rollback_then_continue(model, ids, recording):
    rows = [ids[0, :19].tolist(), ids[1, :26].tolist()]
    loop = Loop(model, paged(model))
    if recording:
        loop.cache.activate_past_recording()
    loop.open(*rows)
    for number, tokens in enumerate(rows):
        loop.prefill(number, tokens)
    loop.cache.rollback([0, 0])
    drafts = [ids[n, 40:45].tolist() for n in range(2)]
    loop.extend([0, 1], drafts)
    for drop in ([1, 4], [3, 0], [0, 11]):
        rows = [(tokens + draft)[: len(tokens) + 5 - n] for tokens, draft, n in zip(rows, drafts, drop, strict=True)]
        again = loop.cache.rollback(drop)
        for number, count in enumerate(again):
            if count:
                loop.extend([number], [rows[number][-count:]])
        assert [row.length for row in loop.cache.rows] == list(map(len, rows))
        assert [row.tokens for row in loop.cache.rows] == rows
        drafts = [ids[n, 50 + drop[0] : 55 + drop[0]].tolist() for n in range(2)]
        found = loop.extend([0, 1], drafts)
        for number in range(2):
            expected = uncached(model, rows[number] + drafts[number])[len(rows[number]) :]
            assert_close(found[number], expected, 1e-4)


def test_a_second_prompt_continues_from_what_the_first_left(model, ids):
    first = ids[0, :39].tolist()
    loop = Loop(model, paged(model))
    loop.open(first)
    loop.prefill(0, first)
    loop.cache.release([0])
    second = first[:37] + ids[1, :12].tolist()
    loop.open(second)
    assert loop.cache.rows[0].num_cached == 36
    assert_close(loop.prefill(0, second), uncached(model, second)[36:], 1e-4)
    # The same prompt once more: at least one token is computed.
    loop.open(second)
    length = loop.cache.rows[1].length
    assert length < len(second)
    assert_close(loop.prefill(1, second), uncached(model, second)[length:], 1e-4)


def test_snapshots_come_back(model, ids):
    prompt, tail = ids[0, :39].tolist(), ids[1, :6].tolist()
    loop = Loop(model, paged(model))
    loop.open(prompt)
    loop.prefill(0, prompt)
    snapshot = loop.cache.snapshot()
    expected = uncached(model, prompt + tail)[39:]
    for _ in range(2):
        loop.extend([0], [ids[2, :9].tolist()])
        loop.cache.restore(snapshot)
        assert_close(loop.extend([0], [tail]), expected[None], 1e-4)
    snapshot.release()


class Boom(Exception):
    pass


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("query", [1, 3])
@pytest.mark.parametrize("named", [False, True])
def test_an_exception_in_a_layer_leaves_everything_as_before(model, ids, layer, place, query, named):
    if model.config.model_type == "olmo_hybrid" and not named and hasattr(DynamicCache, "max_cache_len"):
        pytest.skip("its forward asks for a state before it says of which layer: a step cannot be told from the next")
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None) or decoder.h
    prompt, tail = ids[0, :18].tolist(), ids[0, 18 : 18 + query].tolist()
    loop, undisturbed = Loop(model, paged(model)), Loop(model, paged(model))

    def go(loop, tokens, start):
        if named:
            return loop.step([0], [tokens])
        positions = torch.arange(start, start + len(tokens))[None]
        return forward(model, [tokens], loop.cache, position_ids=positions)

    for own in (loop, undisturbed):
        if not named:
            go(own, prompt, 0)
            continue
        own.open(prompt)
        own.prefill(0, prompt)
        if own.cache.max_query(0, query) < query:
            pytest.skip("one token a step")
    lengths, used = loop.cache.get_seq_length() if loop.cache.groups else 0, blocks_in_use(loop.cache)

    def boom(*_):
        raise Boom

    hook = (
        layers[layer].register_forward_pre_hook(boom)
        if place == "before"
        else layers[layer].register_forward_hook(boom)
    )
    try:
        with pytest.raises(Boom):
            go(loop, tail, 18)
    finally:
        hook.remove()
    assert not loop.cache.groups or loop.cache.get_seq_length() == lengths
    if named:
        assert blocks_in_use(loop.cache) == used
    assert torch.equal(go(loop, tail, 18), go(undisturbed, tail, 18))


def blocks_in_use(cache):
    return [group.pool.used_blocks for group in cache.groups]
