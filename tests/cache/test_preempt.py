"""Rows that are put aside come back bit for bit, wherever they were and whatever happened meanwhile."""

import gc

import pytest
import torch

from decodekit.cache.allocator import OutOfBlocks
from decodekit.core.compat import CACHE_KEY
from decodekit.core.errors import InputError
from tests.cache.families import forward
from tests.cache.test_host import FAMILIES, assert_equal, loop_over, pushed_out, stored, tokens

pytestmark = pytest.mark.integration


def go_on(loop, row):
    steps = [loop.step([row], [[token]]) for token in tokens(6, 7)]
    return torch.cat([*steps, loop.extend([row], [tokens(5, 8)])], dim=1)


@pytest.mark.parametrize(
    ("name", "kind", "host_bytes"),
    [
        *((name, None, host_bytes) for name in FAMILIES for host_bytes in (0, 5_000)),
        *((name, "int4", 1 << 20) for name in FAMILIES if name != "mamba2"),
        *(("llama", kind, 0) for kind in ("int8", "fp8", "int2")),
    ],
)
def test_a_row_goes_on_as_if_nothing_had_happened(name, kind, host_bytes):
    for length in (6, 24):
        mine, other = (loop_over(name, quantization=kind, host_bytes=host_bytes) for _ in range(2))
        for loop in (mine, other):
            loop.open(tokens(length))
            loop.prefill(0, tokens(length))
        blocks = stored(mine.cache, 0)
        suspended = mine.cache.suspend(0)
        assert mine.cache.rows == []
        assert [group.pool.used_blocks for group in mine.cache.groups] == [0] * len(mine.cache.groups)
        assert mine.cache.stats()["host"]["suspended_bytes"] == suspended.nbytes > 0
        pushed_out(mine)
        assert mine.cache.resume(suspended) == 0
        assert mine.cache.stats()["host"]["suspended_bytes"] == suspended.nbytes == 0
        assert_equal(stored(mine.cache, 0), blocks)
        assert torch.equal(go_on(mine, 0), go_on(other, 0))


@pytest.mark.parametrize("name", FAMILIES)
def test_it_rolls_back_as_before(name):
    """While rollbacks are expected, a row's past goes with it."""
    drafts = tokens(5, 3)
    loops = [loop_over(name, checkpoint=None) for _ in range(2)]
    for loop in loops:
        loop.cache.activate_past_recording()
        loop.open(tokens(21))
        loop.prefill(0, tokens(21))
        loop.cache.rollback([0])
        for token in drafts:
            loop.step([0], [[token]])
    mine, other = loops
    suspended = mine.cache.suspend(0)
    pushed_out(mine)
    mine.cache.resume(suspended)
    for loop in loops:
        assert loop.cache.rollback([3]) == [0]
    assert torch.equal(go_on(mine, 0), go_on(other, 0))


@pytest.mark.parametrize("name", FAMILIES)
def test_forks_and_neighbours_do_not_notice(name):
    loop = loop_over(name, num_blocks=40)
    prompt = tokens(21)
    loop.open(prompt)
    loop.prefill(0, prompt)
    loop.cache.fork([0, 0])
    loop.step([0, 1], [[3], [4]])
    suspended = loop.cache.suspend(0)
    loop.step([0], [[5]])
    row = loop.cache.resume(suspended)
    logits = loop.step([row, 0], [[6], [6]])
    for found, tail in zip(logits, ([3, 6], [4, 5, 6]), strict=True):
        expected = forward(loop.model, [prompt + tail])[0, -1]
        assert torch.allclose(found[-1], expected, atol=1e-4 * expected.abs().max())
    loop.cache.fork([1, 0, 1])  # a resumed row is as any other
    loop.cache.release([0, 1, 2])
    assert [group.pool.used_blocks for group in loop.cache.groups] == [0] * len(loop.cache.groups)


def test_later_prompts_hit_a_resumed_row():
    loop = loop_over("llama", num_blocks=24, host_bytes=0)
    loop.open(tokens(21))
    loop.prefill(0, tokens(21))
    suspended = loop.cache.suspend(0)
    pushed_out(loop)
    pushed_out(loop)
    loop.cache.resume(suspended)
    loop.open(tokens(30))
    assert loop.cache.rows[1].num_cached == 20
    assert loop.cache.rows[1].tables[0].blocks == loop.cache.rows[0].tables[0].blocks[:5]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_without_room_it_stays_aside(name):
    loop, other = loop_over(name), loop_over(name)
    for each in (loop, other):
        each.open(tokens(21))
        each.prefill(0, tokens(21))
    suspended = loop.cache.suspend(0)
    loop.open(tokens(33, 1))
    loop.prefill(0, tokens(33, 1))
    before = loop.cache.stats()
    with pytest.raises(OutOfBlocks, match="6 blocks needed"):
        loop.cache.resume(suspended)
    assert loop.cache.stats() == before
    loop.cache.release([0])
    assert torch.equal(go_on(loop, loop.cache.resume(suspended)), go_on(other, 0))


@pytest.mark.parametrize("kind", [None, "int4"])
def test_the_stores_grow_for_it(kind):
    """Stores have room for the blocks that steps wrote to, and a row comes back into others."""
    loop, other = (loop_over("gemma3", num_blocks=200, quantization=kind) for _ in range(2))
    for each in (loop, other):
        each.open(tokens(21))
        each.prefill(0, tokens(21))
    blocks, suspended = stored(loop.cache, 0), loop.cache.suspend(0)
    loop.open(tokens(24, 1))
    loop.prefill(0, tokens(24, 1))
    room = loop.cache.groups[0].stored
    row = loop.cache.resume(suspended)
    assert max(block or 0 for block in loop.cache.rows[row].tables[0].blocks) >= room
    assert_equal(stored(loop.cache, row), blocks)
    assert torch.equal(go_on(loop, row), go_on(other, 0))


def test_a_write_that_fails_leaves_it_aside(monkeypatch):
    loop = loop_over("gemma3", quantization="int4")
    loop.open(tokens(21))
    loop.prefill(0, tokens(21))
    suspended = loop.cache.suspend(0)

    def failing(*_):
        raise MemoryError

    monkeypatch.setattr(loop.cache.store(1), "load", failing)
    with pytest.raises(MemoryError):
        loop.cache.resume(suspended)
    monkeypatch.undo()
    assert loop.cache.rows == []
    assert [group.pool.used_blocks for group in loop.cache.groups] == [0, 0]
    assert loop.cache.resume(suspended) == 0


def test_rows_of_generate_can_be_put_aside():
    loop, other = loop_over("llama"), loop_over("llama")
    ids = torch.tensor([tokens(9)])
    for each in (loop, other):
        each.model.generate(ids, **{CACHE_KEY: each.cache}, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    loop.cache.resume(loop.cache.suspend(0))
    assert torch.equal(forward(loop.model, [[5]], loop.cache), forward(other.model, [[5]], other.cache))


def test_a_row_is_resumed_once_by_its_own_cache():
    loop = loop_over("qwen3_5")
    with pytest.raises(InputError, match="row 0 is not open; the cache has 0 rows"):
        loop.cache.suspend(0)
    loop.open(tokens(9), tokens(5))
    loop.prefill(0, tokens(9))
    suspended = loop.cache.suspend(0)
    with pytest.raises(InputError, match="by another cache, or before this one was reset"):
        loop_over("qwen3_5").cache.resume(suspended)
    loop.cache.resume(suspended)
    with pytest.raises(InputError, match="resumed already"):
        loop.cache.resume(suspended)
    suspended = loop.cache.suspend(1)
    loop.cache.begin([0], [[3]])
    for move in (lambda: loop.cache.suspend(0), lambda: loop.cache.resume(suspended)):
        with pytest.raises(InputError, match="inside a step"):
            move()
    loop.cache.reset()
    with pytest.raises(InputError, match="before this one was reset; open its prompt again"):
        loop.cache.resume(suspended)


def test_who_lets_go_of_it_gives_it_up():
    loop = loop_over("llama")
    loop.open(tokens(9))
    loop.prefill(0, tokens(9))
    suspended = loop.cache.suspend(0)
    del suspended
    gc.collect()
    assert loop.cache.stats()["host"]["suspended_bytes"] == 0
