"""Quantized K/V in the cache, beside full-precision blocks whose numbers are rounded when they are sealed."""

import pytest
import torch

from decodekit.cache.paged import PagedCache
from decodekit.cache.storage import FullStore
from decodekit.core.compat import CACHE_KEY
from decodekit.core.errors import InputError, Refused
from decodekit.kernels.kv_quantize import BITS, dequantize, quantize
from decodekit.runtime.forward import RaggedForward
from decodekit.testing import tiny_model
from tests.cache.families import Loop, family_model, forward

pytestmark = pytest.mark.integration
SIZE = 4


class Rounded(FullStore):
    """Full precision; a sealed block's numbers become those that its codes would give back."""

    def __init__(self, num_blocks, keys, values, kind):
        super().__init__(num_blocks, SIZE, keys, values)
        self._kind = kind

    def seal(self, blocks):
        for block in blocks.tolist():
            for stored, dim in ((self.keys.transpose(0, 1), 1), (self.values.transpose(0, 1), 2)):  # [H, slots, D]
                part = stored[:, block * SIZE : (block + 1) * SIZE]
                part.copy_(dequantize(*quantize(part, dim, self._kind), self._kind, part.shape[2], part.dtype))


class RoundedCache(PagedCache):
    def _new_store(self, number, keys, values):
        return Rounded(self.groups[number].pool.num_blocks, keys, values, self.quantization)


def model_of(name):
    return tiny_model(name) if name in ("dense", "sliding", "hybrid") else family_model(name)


def loop_over(model, kind, cache=PagedCache, **options):
    options = {"num_blocks": 96, "block_size": SIZE, **options}
    return Loop(model, cache(model.config, quantization=kind, **options))


def tokens(count, seed=0):
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def rolled_back(loop, drop):
    """Drop tokens and forward again what a row cannot go back to."""
    before = [list(row.tokens) for row in loop.cache.rows]
    again = loop.cache.rollback(drop)
    for number, count in enumerate(again):
        if count:
            kept = len(before[number]) - drop[number]
            loop.extend([number], [before[number][kept - count : kept]])


def prefilled(loop):
    prompts = tokens(22), tokens(9, 1)
    loop.open(*prompts)
    return [loop.prefill(row, prompt) for row, prompt in enumerate(prompts)]


def forked(loop):
    yield from prefilled(loop)
    loop.cache.fork([0, 0, 1])
    for seed in range(6):
        yield loop.step([0, 1, 2], [[token] for token in tokens(3, seed)])


def reordered(loop):
    yield from forked(loop)
    loop.cache.reorder_cache(torch.tensor([2, 0, 2]))
    for seed in range(6):
        yield loop.step([2, 0, 1], [[token] for token in tokens(3, 9 + seed)])


def into_a_sealed_block(loop):
    yield from prefilled(loop)
    rolled_back(loop, [7, 6])
    for seed in range(7):
        yield loop.step([0, 1], [[token] for token in tokens(2, 9 + seed)])


def drafted(loop):
    yield from prefilled(loop)
    loop.cache.activate_past_recording()
    for seed in range(4):
        for token in tokens(5, 20 + seed):
            yield loop.step([0, 1], [[token], [token]])
        rolled_back(loop, [seed, 3])


def reused(loop):
    loop.cache.activate_past_recording()  # no block is sealed before its row is over
    yield from prefilled(loop)
    loop.cache.release([0, 1])
    prompt = [*tokens(22), 5, 6, 7]
    loop.open(prompt)
    assert loop.cache.rows[0].num_cached == 20
    yield loop.prefill(0, prompt)


def shared_with_a_draft(loop):
    """A prompt hits blocks of a row that still awaits its rollback, which is over first."""
    loop.cache.activate_past_recording()
    yield from prefilled(loop)
    prompt = [*tokens(22), 5, 6, 7]
    loop.open(prompt)
    yield loop.prefill(2, prompt)
    loop.cache.rollback([0] * 3)
    loop.cache.release([0])
    yield loop.step([1], [[5]])


def restored(loop):
    yield from prefilled(loop)
    snapshot = loop.cache.snapshot()
    for seed in range(5):
        yield loop.step([0, 1], [[token] for token in tokens(2, seed)])
    loop.cache.restore(snapshot)
    snapshot.release()
    yield loop.step([0, 1], [[8], [9]])


def interrupted(loop):
    yield from prefilled(loop)
    rolled_back(loop, [3, 0])
    for _ in range(2):
        loop.cache.begin([0, 1], [tokens(5, 3), tokens(5, 4)])
        loop.cache.abort()
    yield loop.step([0, 1], [tokens(5, 3), tokens(5, 4)])


SCENARIOS = [forked, reordered, into_a_sealed_block, drafted, reused, shared_with_a_draft, restored, interrupted]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("name", ["dense", "sliding", "hybrid", "deepseek_v3"])
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_logits_are_those_of_blocks_rounded_when_sealed(name, kind, scenario):
    mine, reference = (loop_over(model_of(name), kind, cache) for cache in (PagedCache, RoundedCache))
    for own, expected in zip(scenario(mine), scenario(reference), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("name", ["dense", "sliding", "hybrid"])
def test_released_rows_hold_nothing_in_full_precision(name, scenario):
    loop = loop_over(model_of(name), "int4")
    for group in loop.cache.groups:
        group.stored = group.pool.num_blocks  # no store grows
    loop.open([5])
    loop.prefill(0, [5])
    loop.cache.release([0])
    empty = loop.cache.stats()["kv_bytes"]
    for _ in scenario(loop):
        pass
    assert loop.cache.stats()["kv_bytes"] > empty
    loop.cache.release(range(len(loop.cache.rows)))
    assert places(loop) == 0
    assert loop.cache.stats()["kv_bytes"] == empty


def places(loop):
    """Blocks that lie in the stores' residual pools."""
    return sum(int((store._places >= 0).sum()) for store in loop.cache._stores.values())


def test_a_reset_and_a_failed_step_hold_nothing_either():
    loop = loop_over(model_of("dense"), "int4")
    prefilled(loop)
    before = places(loop)
    step = loop.cache.begin([0, 1], [tokens(9, 3), tokens(9, 4)])
    inputs = {"attention_mask": step.attention_mask, "position_ids": step.position_ids}
    forward(loop.model, [tokens(9, 3), tokens(9, 4)], loop.cache, **inputs)
    assert places(loop) > before
    loop.cache.abort()
    assert places(loop) == before
    loop.cache.reset()
    assert places(loop) == 0


def test_each_row_has_at_most_one_block_in_full_precision():
    loop = loop_over(model_of("dense"), "int4")
    prefilled(loop)
    layers = len(loop.cache._stores)
    for token in tokens(20, 5):
        loop.step([0, 1], [[token], [token]])
        unfilled = sum(row.length % SIZE > 0 for row in loop.cache.rows)
        assert places(loop) == layers * unfilled


def errors_of(kind):
    """Mean difference of the logits from full precision, over 40 single steps after a prompt."""
    logits = []
    for each in (None, kind):
        loop = loop_over(model_of("dense"), each)
        loop.open(tokens(30))
        loop.prefill(0, tokens(30))
        logits.append(torch.cat([loop.step([0], [[token]]) for token in tokens(40, 1)]))
    return float((logits[0] - logits[1]).abs().mean() / logits[0].std())


def test_more_bits_are_nearer_to_full_precision():
    int8, fp8, int4, int2 = (errors_of(kind) for kind in ("int8", "fp8", "int4", "int2"))
    assert 0 < int8 < 0.02
    assert int8 < fp8 < int2
    assert 4 * int8 < int4 < int2 / 2


@pytest.mark.parametrize("kind", BITS)
def test_copies_of_a_row_say_the_same(kind):
    loop = loop_over(model_of("dense"), kind)
    loop.open(tokens(22))
    loop.prefill(0, tokens(22))
    loop.cache.fork([0] * 3)
    for token in tokens(20, 1):
        logits = loop.step([0, 1, 2], [[token]] * 3)
        assert torch.equal(logits[0], logits[1])
        assert torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("kind", BITS)
def test_no_row_depends_on_another(kind):
    logits = []
    for seed in (1, 2):
        loop = loop_over(model_of("dense"), kind)
        loop.open(tokens(22), tokens(22, seed))
        loop.extend([0, 1], [tokens(22), tokens(22, seed)])
        logits.append(torch.stack([loop.step([0, 1], [[5], [token]]) for token in tokens(12, seed)]))
    assert torch.equal(logits[0][:, 0], logits[1][:, 0])
    assert not torch.equal(logits[0][:, 1], logits[1][:, 1])


def test_generate_takes_it_as_any_cache():
    model = model_of("dense")
    cache = PagedCache(model.config, num_blocks=96, block_size=SIZE, quantization="int8")
    reference = RoundedCache(model.config, num_blocks=96, block_size=SIZE, quantization="int8")
    prompt = torch.tensor([tokens(10), tokens(10, 1)])
    found, expected = (
        model.generate(prompt, **{CACHE_KEY: each}, max_new_tokens=12, do_sample=False, num_beams=2, pad_token_id=0)
        for each in (cache, reference)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("name", ["dense", "sliding"])
def test_the_kernel_reads_the_blocks_where_they_lie(name, kind, monkeypatch):
    """Full blocks, one that is filling, and one that a rollback went back into."""
    model = tiny_model(name, layers=2)  # with a window and without; the kernel is interpreted
    mine, gathered = (loop_over(model, kind) for _ in range(2))
    for loop in (mine, gathered):
        prefilled(loop)
        rolled_back(loop, [3, 2])
    monkeypatch.setattr("decodekit.kernels.paged_attention.triton_runs", lambda device: True)
    direct = RaggedForward(mine.model, mine.cache)
    # The first step seals the longer row's block, the second begins another.
    for seed in range(2):
        new = [[token] for token in tokens(2, seed)]
        found, expected = direct([0, 1], new, direct=True).logits, gathered.step([0, 1], new)
        torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    assert mine.cache.paths == {"triton"}


def test_attention_in_plain_torch_has_them_gathered():
    loop = loop_over(model_of("dense"), "int8")
    prefilled(loop)
    with pytest.raises(Refused, match="no GPU with Triton: quantized K/V are to be gathered"):
        RaggedForward(loop.model, loop.cache)([0, 1], [[5], [6]], direct=True)
    assert [row.length for row in loop.cache.rows] == [22, 9]


def test_wrong_quantizations_are_refused():
    config = model_of("dense").config
    with pytest.raises(InputError, match=r"unknown quantization 'int3'.*int2"):
        PagedCache(config, num_blocks=4, quantization="int3")
    with pytest.raises(InputError, match=r"quantization 'int8' beside dtype torch\.bfloat16.*one of them"):
        PagedCache(config, num_blocks=4, quantization="int8", dtype=torch.bfloat16)
    with pytest.raises(Refused, match="this model keeps none, only states"):
        PagedCache(family_model("mamba").config, num_blocks=4, quantization="int8")
