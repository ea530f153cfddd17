"""The laws of the cache on real weights: SmolLM2 135M, and Gemma 3 270M with its windows of 512 tokens.

Logits reach some tens here, and in fp32 two orders of the same sums differ by some 1e-5 of the largest: tolerances are
relative to the largest logit.
"""

import pytest
import torch
from transformers import DynamicCache

from decodekit.cache.paged import PagedCache
from decodekit.core.compat import CACHE_KEY
from tests.cache.families import Loop, forward
from tests.gemma import load_gemma

pytestmark = pytest.mark.integration
TEXT = (
    "The lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote down the weather in a small blue "
    "book: wind from the west, a low grey sky, two ships far out. One night the lamp would not burn. She carried a "
    "lantern to the rocks instead and stood there until morning, and the ships went by without harm. "
)


@pytest.fixture(scope="module", params=["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def real(request):
    """A model and its tokenizer."""
    return request.getfixturevalue("demo") if request.param == "smollm2" else load_gemma()


@pytest.fixture(scope="module", autouse=True)
def threads():
    """These models are large enough for more than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(real):
    return real[0]


@pytest.fixture(scope="module")
def ids(real):
    """Three texts of 64 tokens."""
    whole = real[1](TEXT * 3, return_tensors="pt").input_ids[0]
    return torch.stack([whole[start : start + 64] for start in (0, 31, 77)])


@pytest.fixture(scope="module")
def expected(model, ids):
    """Logits without a cache, [3, 64, V]."""
    return forward(model, ids)


def loop_over(model, **options):
    return Loop(model, PagedCache(model.config, **{"num_blocks": 64, **options}))


def assert_close(found, expected, tolerance=1e-4):
    """Relative to the largest logit; the greedy tokens are the same."""
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def segments(model, cache, ids, lengths, mask=None):
    logits, start = [], 0
    for stop in torch.tensor(lengths).cumsum(0).tolist():
        seen = torch.ones_like(ids) if mask is None else mask
        positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, start:stop]
        inputs = {"attention_mask": seen[:, :stop], "position_ids": positions}
        logits.append(forward(model, ids[:, start:stop], cache, **inputs))
        start = stop
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(
    ("rows", "lengths"),
    [
        pytest.param(1, [32] + [1] * 32, id="steps", marks=pytest.mark.slow),
        pytest.param(3, [20, 25, 19], id="segments-3", marks=pytest.mark.slow),
        pytest.param(1, [20, 25, 19], id="segments"),
        pytest.param(3, [32] + [1] * 32, id="steps-3", marks=pytest.mark.slow),
    ],
)
def test_segments_and_single_steps(model, ids, expected, rows, lengths):
    found = segments(model, loop_over(model).cache, ids[:rows], lengths)
    assert_close(found, segments(model, DynamicCache(config=model.config), ids[:rows], lengths), 1e-5)
    assert_close(found, expected[:rows])


@pytest.mark.slow
def test_left_padded(model, ids, expected):
    pads = torch.tensor([0, 9, 23])
    padded = torch.stack([row.roll(int(count)) for row, count in zip(ids, pads, strict=True)])
    mask = (torch.arange(64) >= pads.unsqueeze(1)).long()
    found, dynamic = (
        segments(model, cache, padded, [32] + [1] * 8, mask)
        for cache in (loop_over(model).cache, DynamicCache(config=model.config))
    )
    for row, count in enumerate(pads.tolist()):
        assert_close(found[row, count:], dynamic[row, count:], 1e-5)
        assert_close(found[row, count:], expected[row, : 40 - count])


@pytest.mark.slow
def test_fork_then_diverge(model, ids, expected):
    loop = loop_over(model)
    prompt = ids[0, :40].tolist()
    loop.open(prompt)
    loop.prefill(0, prompt)
    loop.cache.fork([0, 0])
    other = ids[1, :24].tolist()
    found = loop.extend([0, 1], [ids[0, 40:].tolist(), other])
    assert_close(found[0], expected[0, 40:])
    assert_close(found[1], forward(model, [prompt + other])[0, 40:])


@pytest.mark.slow
def test_rollback_then_continue(model, ids, expected):
    loop = loop_over(model)
    loop.open(ids[0, :50].tolist(), ids[1, :31].tolist())
    loop.prefill(0, ids[0, :50].tolist())
    loop.prefill(1, ids[1, :31].tolist())
    loop.extend([0, 1], [ids[2, :7].tolist(), ids[2, 7:14].tolist()])
    assert loop.cache.rollback([17, 9]) == [0, 0]
    tails = [ids[0, 40:52].tolist(), ids[1, 29:41].tolist()]
    found = loop.extend([0, 1], tails)
    assert_close(found[0], expected[0, 40:52])
    assert_close(found[1], expected[1, 29:41])


@pytest.mark.slow
def test_a_second_call_on_a_filled_cache(model, ids, expected):
    loop = loop_over(model)
    first, second = ids[0].tolist(), [*ids[0, :50].tolist(), *ids[1, :9].tolist()]
    loop.open(first)
    assert_close(loop.prefill(0, first), expected[0])
    loop.cache.release([0])
    loop.open(second)
    assert loop.cache.rows[0].num_cached == 48
    assert_close(loop.prefill(0, second), forward(model, [second])[0, 48:])


@pytest.mark.slow
def test_rows_of_any_length_and_several_queries_at_absolute_positions(model, ids, expected):
    loop = loop_over(model)
    lengths = [17, 40, 3]
    loop.open(*(ids[row, :length].tolist() for row, length in enumerate(lengths)))
    for row, length in enumerate(lengths):
        loop.prefill(row, ids[row, :length].tolist())
    step = [ids[row, length : length + 9].tolist() for row, length in enumerate(lengths)]
    found = loop.extend([0, 1, 2], step)
    for row, length in enumerate(lengths):
        assert_close(found[row], expected[row, length : length + 9])


@pytest.mark.slow
def test_suspended_and_evicted_to_the_host(model, ids, expected):
    loop = loop_over(model, num_blocks=5, host_bytes=1 << 30)
    first, second = ids[0, :60].tolist(), ids[1, :60].tolist()
    loop.open(first)
    loop.prefill(0, first)
    suspended = loop.cache.suspend(0)
    loop.open(second)
    assert_close(loop.prefill(0, second), expected[1, :60])
    loop.cache.release([0])
    loop.cache.resume(suspended)
    assert_close(loop.extend([0], [ids[0, 60:].tolist()])[0], expected[0, 60:])
    loop.cache.release([0])
    loop.open(ids[1].tolist())
    assert loop.cache.rows[0].num_cached == 48
    assert_close(loop.prefill(0, ids[1].tolist()), expected[1, 48:])


def test_greedy_tokens_of_generate(model, ids):
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    inputs = {"input_ids": ids[:, :24], "attention_mask": torch.ones((3, 24), dtype=torch.long)}
    found = model.generate(**inputs, **options, **{CACHE_KEY: loop_over(model).cache})
    assert torch.equal(found, model.generate(**inputs, **options))


@pytest.mark.slow
def test_past_the_window():
    """A window of 512 tokens has slid by 88; then rollback, fork and a prompt that begins alike."""
    model, tokenizer = load_gemma()
    window = model.config.sliding_window
    ids = tokenizer(TEXT * 9, return_tensors="pt").input_ids[0, :620].tolist()
    assert window == 512
    expected = forward(model, [ids])[0]
    loop = loop_over(model, num_blocks=90, block_size=16)
    loop.open(ids[:600])
    found = torch.cat([loop.extend([0], [ids[:250]])[0], loop.extend([0], [ids[250:600]])[0]])
    assert_close(found, expected[:600])
    sliding = next(group for group in loop.cache.groups if group.window)
    assert sliding.pool.used_blocks == 33
    assert_close(loop.extend([0], [ids[600:605]])[0], expected[600:605])
    assert_close(torch.cat([loop.step([0], [[token]])[0] for token in ids[605:609]]), expected[605:609])
    dynamic = segments(model, DynamicCache(config=model.config), torch.tensor([ids[:609]]), [250, 350, 5, 1, 1, 1, 1])
    assert_close(found, dynamic[0, :600], 1e-5)
    assert loop.cache.rollback([1]) == [0]
    loop.cache.fork([0, 0])
    both = loop.extend([0, 1], [ids[608:612], ids[:4]])
    assert_close(both[0], expected[608:612])
    assert_close(both[1], forward(model, [ids[:608] + ids[:4]])[0, 608:])
    loop.cache.release([0, 1])
    loop.open(ids)
    assert loop.cache.rows[0].num_cached == 608
    assert_close(loop.prefill(0, ids), expected[608:])
