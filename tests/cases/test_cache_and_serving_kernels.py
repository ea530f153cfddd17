"""Faults of other projects' paged kernels and quantized caches, which must not happen here; each names its report."""

import functools

import pytest
import torch
import transformers

from decodekit.cache.paged import PagedCache
from decodekit.cache.quantization import QuantizedStore
from decodekit.integrations.doctor import examine
from decodekit.kernels.kv_quantize import BITS, dequantize, quantize
from decodekit.kernels.kv_write import kv_write
from decodekit.kernels.paged_attention import paged_attention
from decodekit.testing import tiny_model, tiny_tokenizer
from decodekit.testing.mutants import planted
from decodekit.testing.mutants.faults import FAULTS
from tests.cache.families import forward
from tests.cache.test_quantized_cache import SIZE, Rounded, RoundedCache
from tests.cases.test_cache_and_serving import loop_over, tokens
from tests.kernels.conftest import device  # noqa: F401
from tests.kernels.test_paged_attention import by_kernel, by_parts, dense, make

KINDS = tuple(BITS)


# --- paged kernels


def test_a_slot_beyond_32_bits_is_where_it_should_be(device) -> None:  # noqa: F811
    """https://github.com/vllm-project/vllm/pull/47671: the number of a block times a stride wrapped around."""
    heads, width, size = 2, 64, 16
    slots = 2**31 // (heads * width) + 4 * size
    # 4 GiB that are asked for and, but for a few pages, never touched.
    keys, values = (torch.empty(slots, heads, width, dtype=torch.float16, device=device) for _ in range(2))
    last = slots - size + torch.arange(5, device=device)
    new = torch.randn(2, 5, heads, width).half().to(device)
    assert int(last[0]) * keys.stride(0) >= 2**31
    if device == "cuda":
        kv_write(keys, values, last, *new)
    else:
        from decodekit.kernels.kv_write import triton

        triton.kv_write(keys, values, last, *new)
    assert torch.equal(keys[last], new[0])
    assert torch.equal(values[last], new[1])
    query = torch.randn(1, heads, width).half()
    arguments = (query, keys, values, torch.tensor([[slots // size - 1]]), torch.tensor([5]), torch.tensor([0, 1]))
    options = {"block_size": size, "scale": 0.1, "window": None}
    scores = torch.einsum("hd,thd->ht", query[0].float(), new[0].cpu().float()) * 0.1
    expected = torch.einsum("ht,thd->hd", scores.softmax(-1), new[1].cpu().float())
    torch.testing.assert_close(by_kernel(arguments, options, device)[0][0].float(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("window", [None, 3])
def test_rows_that_see_nothing_or_very_little(device, window) -> None:  # noqa: F811
    """https://github.com/flashinfer-ai/flashinfer/pull/4401: NaN without keys, zero with very negative scores."""
    arguments, options = make([0, 1, 40, 7], [0, 1, 2, 7], window=window, width=8, value_width=8, dtype=torch.float32)
    query, keys, *_ = arguments
    keys.copy_(torch.where(keys.isnan(), keys, -(keys.abs() + 1) * 3e4))
    query.copy_(query.abs() + 1)
    expected = dense(*arguments, **options).float()
    assert bool(expected.isfinite().all())
    for found in (
        paged_attention(*arguments, **options),
        by_parts(arguments, options),
        by_kernel(arguments, options, device)[0],
    ):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    nothing, options = make([0, 0], [0, 0], width=8, value_width=8, dtype=torch.float32)
    assert paged_attention(*nothing, **options).shape == (0, 4, 8)


@pytest.mark.parametrize("width", [8, 40, 64, 72, 80, 96, 112, 128, 192])
def test_heads_of_any_width(device, width) -> None:  # noqa: F811
    """https://github.com/sgl-project/sglang/pull/1281: widths that are no power of two failed, or read what lies behind."""
    arguments, options = make([9, 21], [2, 1], width=width, value_width=width, window=11, dtype=torch.float32)
    expected = dense(*arguments, **options).float()
    for found in (paged_attention(*arguments, **options), by_kernel(arguments, options, device)[0]):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_what_a_window_let_go_is_never_read() -> None:
    """https://github.com/kekzl/imp/pull/967: the kernel rounded the start of the window down, the eviction up."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.MistralConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
            sliding_window=10,
        )
        model = transformers.MistralForCausalLM(config).eval().requires_grad_(False)
    ids = tokens(60)
    expected = forward(model, [ids])[0]
    loop = loop_over(model, prefix_cache=False)
    loop.open(ids)
    for length, token in enumerate(ids):
        assert torch.allclose(loop.step([0], [[token]])[0, -1], expected[length], atol=1e-4)
        [table] = loop.cache.rows[0].tables
        behind = table.blocks[: max(0, length + 1 - 10) // 4]
        assert behind == [None] * len(behind)
        for store in loop.cache._stores.values():
            for block in range(len(store.keys) // 4):
                if block not in table.blocks:
                    store.keys[block * 4 : block * 4 + 4] = torch.nan
                    store.values[block * 4 : block * 4 + 4] = torch.nan


# --- quantized keys and values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("first", "then"), [(0.1, 10.0), (0.0, 1.0)])
def test_a_larger_token_does_not_clip(kind, first, then) -> None:
    """https://github.com/huggingface/transformers/pull/48677: the first tokens set the scale of all that came later."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(9, 2, 8, generator=generator).sign() * first
    numbers[4:] = torch.randn(5, 2, 8, generator=generator).sign() * then
    store = QuantizedStore(4, 3, numbers, numbers, kind)
    store.write(torch.arange(9), numbers, numbers)
    store.seal(torch.arange(3))
    for found, dim in zip(store.read(torch.arange(9).unsqueeze(0)), (0, -1), strict=True):
        groups = numbers.unflatten(0, (3, 3)) if dim == 0 else numbers
        axis = 1 if dim == 0 else -1
        step = (groups.amax(axis, keepdim=True) - groups.amin(axis, keepdim=True)) / (2 ** BITS[kind] - 1)
        bound = groups.abs() / 16 if kind == "fp8" else step / 2 + groups.abs().amax(axis, keepdim=True) * 2**-10
        assert bool(((found[0].view_as(groups) - groups).abs() <= bound + 1e-6).all())


OPERATIONS = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "crop": lambda cache: cache.crop(-2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_reach_what_is_quantized(operation, kind) -> None:
    """https://github.com/huggingface/transformers/pull/48700: they changed the tokens in full precision alone."""
    model, ids = tiny_model("dense", layers=2), torch.tensor([tokens(14, seed) for seed in range(3)])
    found = []
    for cache_class in (PagedCache, RoundedCache):
        cache = cache_class(model.config, num_blocks=64, block_size=SIZE, quantization=kind)
        forward(model, ids, cache)
        OPERATIONS[operation](cache)
        rows = len(cache.rows)
        found.append(forward(model, torch.tensor([tokens(3, 9)] * rows), cache))
        assert cache.get_seq_length() == (15 if operation == "crop" else 17)
    assert len(found[0]) == {"select": 1, "repeat": 6}.get(operation, 3)
    assert torch.allclose(*found, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_constant_channel_stays_what_it_is(kind, dtype) -> None:
    """https://github.com/openvinotoolkit/openvino/pull/37095: the inverse of its scale overflowed."""
    for value in (0.0, 3.14, -3.14, 6e4, 6e-8):
        numbers = torch.full((16, 2, 8), value, dtype=dtype)
        codes, scales = quantize(numbers, 0, kind)
        assert bool(scales.isfinite().all())
        found = dequantize(codes, scales, kind, 8, dtype)
        if kind == "fp8":
            torch.testing.assert_close(found, numbers, rtol=2**-4, atol=0)
        elif dtype != torch.float32:
            assert torch.equal(found, numbers)
        else:
            torch.testing.assert_close(found, numbers, rtol=2**-10, atol=2**-24)


class ByToken(Rounded):
    """Keys that share a scale by token, as a cache that knows nothing of outlier channels has them."""

    def seal(self, blocks):
        for block in blocks.tolist():
            for stored in (self.keys.transpose(0, 1), self.values.transpose(0, 1)):
                part = stored[:, block * SIZE : (block + 1) * SIZE]
                part.copy_(dequantize(*quantize(part, 2, self._kind), self._kind, part.shape[2], part.dtype))


class ByTokenCache(RoundedCache):
    def _new_store(self, number, keys, values):
        return ByToken(self.groups[number].pool.num_blocks, keys, values, self.quantization)


@pytest.fixture(scope="module")
def outlying():
    """A model whose keys have two channels that are 50 times as large as the others."""
    model = tiny_model("dense", layers=2)
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection, factor in ((attention.k_proj, 50.0), (attention.q_proj, 1 / 50)):
            heads = projection.weight.view(-1, 8, 32)
            heads *= 0.25  # scores in the range of a trained model's
            heads[:, [0, 4]] *= factor  # a pair that is rotated together, so that every score stays the same
    return model


def test_outlier_channels_of_keys_survive_4_bits(outlying) -> None:
    """https://github.com/huggingface/transformers/issues/35185: a scale a token left nothing of the other channels."""
    ids = [tokens(64, seed) for seed in range(4)]

    def divergence(cache_class, kind) -> float:
        total = 0.0
        for row in ids:
            cache = cache_class(outlying.config, num_blocks=64, block_size=SIZE, quantization=kind)
            found = torch.cat([forward(outlying, [[token]], cache)[0] for token in row]).log_softmax(-1)
            expected = forward(outlying, [row])[0].log_softmax(-1)
            total += float((expected.exp() * (expected - found)).sum(-1).mean()) / len(ids)
        return total

    measured = functools.partial(divergence, kind="int4")
    assert divergence(PagedCache, None) < 1e-6
    assert measured(PagedCache) <= 0.05
    assert measured(ByTokenCache) > 4 * measured(PagedCache)


def test_what_4_bits_lose_is_measured_and_named(outlying) -> None:
    """https://github.com/huggingface/transformers/issues/35185: nothing told that a model does not bear them."""

    def finding():
        return next(own for own in examine(outlying, tiny_tokenizer()) if own.law == "K/V as int4 = full precision")

    assert finding().status == "holds"
    [fault] = [own for own in FAULTS if own.name == "keys share a scale by token"]
    with planted(fault):
        found = finding()
    assert (found.status, found.avoid) == ("fails", "cache: {quantization: int4}")
    assert found.value > 1
