"""Evicted blocks and states come back from the host bit for bit, within its budget, or are computed again."""

import random

import pytest
import torch

from decodekit.cache.host import HostCopy, HostTier
from decodekit.cache.paged import PagedCache
from decodekit.cache.prefix import Prompt
from decodekit.core.errors import InputError
from tests.cache.families import Loop, family_model, forward

pytestmark = pytest.mark.integration

FAMILIES = ("llama", "gemma3", "qwen3_5", "mamba2")


def tokens(count, seed=0):
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def loop_over(name, **options):
    model = family_model(name)
    options = {"num_blocks": 12, "block_size": 4, "host_bytes": 1 << 20, "max_checkpoints": 2, **options}
    return Loop(model, PagedCache(model.config, **options))


def serve(loop, prompt):
    """Logits of a prompt's last token and how many tokens the cache had; the row is over then."""
    (row,) = loop.open(prompt)
    cached = loop.cache.rows[row].num_cached
    logits = loop.prefill(row, prompt)[-1]
    loop.cache.release([row])
    return logits, cached


def stored(cache, row):
    """What the stores hold for a row, block by block."""
    return [
        [part.clone() for parts in cache.store(layer).save(torch.tensor(blocks)) for part in parts]
        for group, table in zip(cache.groups, cache.rows[row].tables, strict=True)
        if (blocks := [block for block in table.blocks if block is not None])
        for layer in group.layers
    ]


def assert_equal(found, expected):
    """To the bit; what no token has written yet may be anything, NaN too."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def pushed_out(loop):
    """Other prompts, until nothing of earlier ones is on the device."""
    for seed in range(1, 5):
        serve(loop, tokens(41, seed))


@pytest.mark.parametrize("kind", [None, "int8", "fp8", "int4", "int2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_evicted_is_hit_bit_for_bit(name, kind):
    if name == "mamba2" and kind:
        pytest.skip("it has no K/V")
    loop, prompt = loop_over(name, quantization=kind), tokens(30)
    serve(loop, prompt)
    loop.open([*prompt, 3])
    expected, num_cached = stored(loop.cache, 0), loop.cache.rows[0].num_cached
    logits = loop.prefill(0, [*prompt, 3])
    loop.cache.release([0])
    pushed_out(loop)
    assert num_cached == 28
    assert all(group.pool.resumable(loop.cache._prompt([*prompt, 3]))[-1] == 28 for group in loop.cache.groups)
    hits = loop.cache.stats()["host"]["hits"]
    loop.open([*prompt, 3])
    assert loop.cache.rows[0].num_cached == num_cached
    assert_equal(stored(loop.cache, 0), expected)
    assert torch.equal(loop.prefill(0, [*prompt, 3]), logits)
    window_blocks = {"gemma3": 2 + 7, "mamba2": 0}
    assert loop.cache.stats()["host"]["hits"] - hits == window_blocks.get(name, 7)


@pytest.mark.parametrize("name", FAMILIES)
def test_without_a_host_it_is_computed_again(name):
    loop, prompt = loop_over(name, host_bytes=0), tokens(30)
    serve(loop, prompt)
    pushed_out(loop)
    assert serve(loop, [*prompt, 3])[1] == 0
    assert loop.cache.stats()["host"] == {"blocks": 0, "bytes": 0, "suspended_bytes": 0, "offloaded": 0, "hits": 0}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [3, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_no_budget_and_no_order_gives_wrong_logits(name, size):
    """Tiny pools and budgets, prompts drawn from history, rows of any age."""
    rng, model = random.Random(size), family_model(name)
    for host_bytes in (3_000, 60_000):
        options = {"host_bytes": host_bytes, "checkpoint": size, "max_checkpoints": 6}
        loop = loop_over(name, num_blocks=36 // size, block_size=size, **options)
        history, hits = [tokens(29)], 0
        for turn in range(20):
            known = rng.choice(history)
            prompt = [*known[: rng.randrange(len(known) + 1)], *tokens(rng.randrange(1, 19), turn)][:30]
            logits, cached = serve(loop, prompt)
            history.append(prompt)
            hits += cached > 0
            expected = forward(model, [prompt])[0, -1]
            # Token by token a recurrence rounds so far from chunks, to the bit as with transformers' own cache.
            assert torch.allclose(logits, expected, atol=2e-4 * expected.abs().max())
            stats = loop.cache.stats()
            assert stats["host"]["bytes"] <= host_bytes
            assert sum(group["used"] for group in stats["groups"]) == 0
    # Of states, six tokens' are kept: few prompts go on from one of them.
    few = size == 1 and name in ("qwen3_5", "mamba2")
    assert hits > (1 if few else 3)
    assert stats["host"]["hits"] > 0 or few or name == "mamba2"


def test_a_hit_that_fails_takes_nothing(monkeypatch):
    loop, prompt = loop_over("gemma3"), tokens(30)
    serve(loop, prompt)
    pushed_out(loop)

    def failing(*_):
        raise MemoryError

    store = loop.cache.store(1)  # of the second group
    monkeypatch.setattr(store, "load", failing)
    with pytest.raises(MemoryError):
        loop.open([*prompt, 3])
    monkeypatch.undo()
    assert loop.cache.rows == []
    assert [group.pool.used_blocks for group in loop.cache.groups] == [0, 0]
    logits, cached = serve(loop, [*prompt, 3])
    expected = forward(loop.model, [[*prompt, 3]])[0, -1]
    assert cached == 28
    assert torch.allclose(logits, expected, atol=1e-4 * expected.abs().max())


def test_admission_counts_the_blocks_that_would_come_back():
    loop, prompt = loop_over("llama"), tokens(30)
    serve(loop, prompt)
    pushed_out(loop)
    loop.open(tokens(20, 9))
    loop.prefill(0, tokens(20, 9))  # 5 of 12 blocks
    for more in range(12):
        assert loop.cache.can_admit([*prompt], more) == (30 + more <= 28)
    assert loop.cache.can_admit(prompt[:20], 8)
    loop.open(prompt)
    assert loop.cache.rows[1].num_cached == 28  # all there is room for


def test_a_prompt_begins_with_what_there_is_room_for():
    loop, prompt = loop_over("llama"), tokens(30)
    serve(loop, prompt)
    pushed_out(loop)
    loop.open(tokens(33, 9))
    loop.prefill(0, tokens(33, 9))  # 9 of 12 blocks
    loop.open(prompt)
    assert loop.cache.rows[1].num_cached == 12


def test_tenants_stay_apart_on_the_host():
    loop, prompt = loop_over("llama"), tokens(30)
    serve(loop, prompt)
    pushed_out(loop)
    loop.cache.open([Prompt(prompt, salt="b"), Prompt(prompt, extra="lora")])
    assert [row.num_cached for row in loop.cache.rows] == [0, 0]


def test_a_reset_forgets_the_host():
    loop, prompt = loop_over("qwen3_5"), tokens(30)
    serve(loop, prompt)
    pushed_out(loop)
    assert loop.cache.stats()["host"]["bytes"] > 0
    loop.cache.reset()
    assert loop.cache.stats()["host"] == {"blocks": 0, "bytes": 0, "suspended_bytes": 0, "offloaded": 0, "hits": 0}
    assert serve(loop, prompt)[1] == 0


def test_what_is_larger_than_the_budget_is_not_held():
    tier, copy = HostTier(100), HostCopy({"a": [torch.zeros(13, dtype=torch.int64)]})
    tier.put("large", copy)
    assert "large" not in tier
    tier.put("small", HostCopy({"a": [torch.zeros(12, dtype=torch.int64)]}))
    assert ("small" in tier, tier.nbytes) == (True, 96)


def test_a_negative_budget_is_refused():
    with pytest.raises(InputError, match=r"host_bytes is -1; give .* 0 for none"):
        loop_over("llama", host_bytes=-1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_from_cuda_copies_are_pinned_and_come_back():
    original = torch.randn(1000, device="cuda")
    copy = HostCopy({"a": [original]})
    ((device, held),) = copy._held["a"]
    assert held.is_pinned()
    assert device == original.device
    (back,) = copy.restore()["a"]
    assert torch.equal(back, original)
