"""Faults of other projects' caches and prefix reuse, which must not happen here; each test names where it was reported."""

import copy

import pytest
import torch
import transformers
from transformers import StaticCache

import decodekit
from decodekit.cache import blocks, prefix
from decodekit.cache.blocks import BlockPool
from decodekit.cache.paged import PagedCache
from decodekit.cache.prefix import Prompt
from decodekit.core.compat import CACHE_KEY
from decodekit.core.errors import Refused
from decodekit.testing import tiny_model
from tests.cache import test_streaming
from tests.cache.families import Loop, forward
from tests.cache.test_blocks import compute
from tests.strategies.golden import left_pad

pytestmark = pytest.mark.integration

PROMPTS = [[9, 9, 30, 61, 77, 12, 4, 88, 5], [5, 17, 42, 8]]
OPTIONS = {"max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0, "custom_generate": decodekit.load({})}
reference = test_streaming.reference


def tokens(count, seed=0, most=97):
    return torch.randint(3, most, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def loop_over(model, **options):
    return Loop(model, PagedCache(model.config, **{"num_blocks": 64, "block_size": 4, **options}))


def in_chunks(loop, row, ids, chunks):
    """Logits [n, V] of a row's tokens, forwarded so many at a time; the last size is repeated."""
    logits, done = [], 0
    for count in (*chunks, *chunks[-1:] * len(ids)):
        if done < len(ids):
            logits.append(loop.extend([row], [ids[done : done + count]])[0])
            done += count
    return torch.cat(logits)


# --- the cache of generate


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_does_not_change_a_row(attention) -> None:
    """https://github.com/huggingface/transformers/issues/29419: the side of the pads changed the logits."""
    model = tiny_model("dense", layers=2)
    model.set_attn_implementation(attention)
    whole = model.generate(**left_pad(PROMPTS), **OPTIONS)[:, 9:]
    for prompt, row in zip(PROMPTS, whole, strict=True):
        assert torch.equal(model.generate(torch.tensor([prompt]), **OPTIONS)[0, len(prompt) :], row)
    right = {name: tensor.flip(1) for name, tensor in left_pad([prompt[::-1] for prompt in PROMPTS]).items()}
    with pytest.raises(Refused, match="pads belong on the left"):
        model.generate(**right, **OPTIONS)


def test_a_token_flips_only_where_rounding_decides() -> None:
    """https://github.com/huggingface/transformers/issues/25921: tokens changed with the batch size and with the cache."""
    rows = [tokens(33, seed) for seed in range(8)]
    rounded = tiny_model("dense", dtype=torch.bfloat16)
    exact = copy.deepcopy(rounded).float()

    def argmaxes(model):
        alone = torch.stack([forward(model, [ids])[0] for ids in rows])
        together = loop_over(model, num_blocks=128)
        together.open(*rows)
        stepped = loop_over(model, num_blocks=128)
        stepped.open(*rows)
        batch = together.extend(range(8), rows)
        steps = torch.cat([stepped.step(range(8), [[ids[at]] for ids in rows]) for at in range(33)], dim=1)
        return alone, batch, steps

    first, *others = argmaxes(exact)
    assert all(torch.equal(first.argmax(-1), other.argmax(-1)) for other in others)
    best = first.topk(2).values
    margin = best[..., 0] - best[..., 1]
    for found in argmaxes(rounded):
        error = (found.float() - first).abs().amax(-1)
        flipped = found.argmax(-1) != first.argmax(-1)
        assert bool((margin[flipped] < 4 * error[flipped]).all())


def test_the_size_of_a_cache_is_what_was_asked_for() -> None:
    """https://github.com/huggingface/transformers/issues/46424: the length was ignored, and longer calls made it anew."""
    model = tiny_model("dense", layers=2)
    static = StaticCache(config=model.config, max_cache_len=100)
    paged = PagedCache(model.config, num_blocks=25, block_size=4)
    places = set()
    for length in (9, 40):
        ids = torch.tensor([tokens(length)])
        expected = model.generate(ids, max_new_tokens=4, eos_token_id=None, pad_token_id=0)
        static.reset()
        assert torch.equal(model.generate(ids, **{**OPTIONS, "max_new_tokens": 4, CACHE_KEY: static}), expected)
        assert torch.equal(model.generate(ids, **{**OPTIONS, "max_new_tokens": 4, CACHE_KEY: paged}), expected)
        assert static.layers[0].keys.shape[2] == 100
        assert paged.can_admit(tokens(90, 7), 10)
        assert not paged.can_admit(tokens(90, 7), 11)
        places.add(static.layers[0].keys.data_ptr())
    assert len(places) == 1


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9, 10])
def test_a_window_shifts_neither_early_nor_late(window) -> None:
    """https://github.com/huggingface/transformers/issues/37574: off by one where the length reached the window."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.MistralConfig(
            vocab_size=97, num_key_value_heads=2, initializer_range=0.3, sliding_window=window, **shape
        )
        model = transformers.MistralForCausalLM(config).eval().requires_grad_(False)
    ids = tokens(20)
    expected = forward(model, [ids])[0]
    for chunks in ((7, 1, 1, 5, 1, 5), (3,), (9, 2), (20,), (1,)):
        loop = loop_over(model, block_size=1)
        [row] = loop.open(ids)
        assert (in_chunks(loop, row, ids, chunks) - expected).abs().max() < 1e-3
        assert loop.cache.groups[0].pool.used_blocks <= window


def test_a_window_with_sinks_counts_positions_in_the_cache(reference) -> None:
    """https://github.com/huggingface/transformers/issues/35350: positions drifted after the first eviction."""
    model = tiny_model("dense", layers=2)
    ids = tokens(30)
    loop = loop_over(model, sinks=2, window=6)
    loop.open(ids)
    found = torch.cat([loop.step([0], [[token]])[0] for token in ids])
    assert (found - reference(model, ids, 2, 6)).abs().max() < 1e-3


# --- prefixes


class Colliding(int):
    """A token whose hash says next to nothing."""

    def __hash__(self) -> int:
        return int(self) & 1

    __eq__ = int.__eq__


def test_a_collision_of_hashes_serves_nobody_elses_tokens(monkeypatch) -> None:
    """https://github.com/openvinotoolkit/openvino.genai/issues/3722: a block was found by its hash alone."""
    honest = prefix.block_contents
    for module in (prefix, blocks):
        monkeypatch.setattr(
            module, "block_contents", lambda *given, **more: list(map(Colliding, honest(*given, **more)))
        )
    model = tiny_model("dense", layers=2)
    loop, hits = loop_over(model, num_blocks=12, block_size=2), 0
    for seed in range(200):
        ids = tokens(3 + seed % 9, seed, most=6)
        [row] = loop.open(ids)
        hits += loop.cache.rows[row].num_cached > 0
        assert torch.allclose(loop.prefill(row, ids)[-1], forward(model, [ids])[0, -1], atol=1e-4)
        loop.cache.release([row])
    assert hits > 50
    assert len({hash(Colliding(token)) for token in range(97)}) == 2


def test_another_images_placeholders_are_not_hit() -> None:
    """https://github.com/LMCache/LMCache/issues/690: all images have the same placeholder ids."""
    loop = loop_over(tiny_model("dense"))
    ids = [*tokens(4), *[9] * 8, *tokens(5, 1)]

    def cached(start, content, ids=ids) -> int:
        [row] = loop.cache.open([Prompt(ids, media=[(start, start + 8, content)])])
        found = loop.cache.rows[row].num_cached
        loop.prefill(row, ids)
        loop.cache.release([row])
        return found

    assert cached(4, "cat") == 0
    assert cached(4, "cat") == 16
    assert cached(4, "dog") == 4  # the text before it is shared
    assert cached(0, "cat", ids[4:]) == 0


def test_a_tenant_cannot_tell_what_another_sent() -> None:
    """https://github.com/vllm-project/vllm/issues/16016: the time to the first token told it."""
    loop, prompt = loop_over(tiny_model("dense")), tokens(64)

    def cached(salt) -> int:
        [row] = loop.cache.open([Prompt(prompt, salt=salt)])
        found = loop.cache.rows[row].num_cached
        loop.prefill(row, prompt)
        loop.cache.release([row])
        return found

    assert [cached(salt) for salt in ("a", "b", "a", "b", None)] == [0, 0, 60, 60, 0]


def test_a_block_that_is_used_again_forgets_what_it_was() -> None:
    """https://github.com/ovg-project/kvcached/issues/362: it kept its old hash, so that the old prefix hit it."""
    pool = BlockPool(4, 2)
    old, new = [1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12, 13]
    pool.release(compute(pool, old))
    assert pool.resumable(Prompt(old))[-1] == 4
    pool.release(compute(pool, new))
    assert pool.resumable(Prompt(old))[-1] == 0
    assert pool.resumable(Prompt(new))[-1] == 6
    chains = pool._allocator.chains
    held = {block: chain for block, chain in enumerate(chains) if chain is not None}
    assert held == {block: chain for chain in pool._index._chains.values() for block in chain.holders}


def test_a_state_is_found_at_the_depth_that_it_was_saved_at_only() -> None:
    """https://github.com/vllm-project/vllm/pull/34587: a state half way into a block was saved under the full block."""
    model, ids = tiny_model("hybrid", dtype=torch.float64), tokens(12)
    cold = forward(model, [ids])[0]
    for chunks in ((5, 7), (12,), (8, 4), (1,)):
        loop = loop_over(model, block_size=8)
        loop.open(ids)
        done = 0
        for count in (*chunks, *chunks * 12):
            if done < len(ids):  # not asking how many tokens a step had better take
                loop.step([0], [ids[done : done + count]])
                done += count
        [row] = loop.open(ids)
        cached = loop.cache.rows[row].num_cached
        assert cached == (8 if chunks in ((8, 4), (1,)) else 0)
        assert torch.allclose(loop.prefill(row, ids), cold[cached:], atol=1e-4)
