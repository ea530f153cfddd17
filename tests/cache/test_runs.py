"""A run takes blocks for steps to come, more of them as it goes on, and gives back what it did not use."""

import pytest
import torch

from decodekit.cache.allocator import OutOfBlocks
from decodekit.cache.paged import PagedCache
from decodekit.kernels.paged_attention import WorkShape
from tests.cache.families import Loop, family_model

BLOCK = 4


def rows_of(name, num_blocks=40):
    """Two rows whose last block is shared, and one of another prompt."""
    model = family_model(name)
    cache = PagedCache(model.config, num_blocks=num_blocks, block_size=BLOCK, preallocate=True)
    loop = Loop(model, cache)
    prompts = [[5, 6, 7, 8, 9, 10], [20, 21, 22]]
    for row, prompt in zip(loop.open(*prompts), prompts, strict=True):
        loop.prefill(row, prompt)
    cache.fork([0, 0, 1])
    return cache


def state(cache):
    tables = [[(table.length, *table.blocks) for table in row.tables] for row in cache.rows]
    return tables, [(group.pool.free_blocks, group.pool.cached_blocks) for group in cache.groups]


def blocks(tokens):
    return -(-tokens // BLOCK)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_run_that_was_extended_is_taken_back_whole(name) -> None:
    cache = rows_of(name)
    before = state(cache)
    run = cache.begin_run([0, 1, 2], [1, 2, 3], 5)
    run.extend(7)
    assert run.steps == 12
    assert state(cache) != before
    cache.abort()
    assert state(cache) == before
    cache.begin_run([0, 1, 2], [1, 2, 3], 5)  # nothing is left of the other
    cache.abort()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_an_extended_run_did_not_use_is_given_back(name) -> None:
    cache = rows_of(name)
    run = cache.begin_run([0, 1, 2], [1, 2, 3], 2)
    run.extend(3)
    run.extend(6)
    run.launched = 11
    assert run.finish([[1, 2, 3, 4, 5, 6, 7], [], [3, 9]]) == [True] * 3
    assert [row.length for row in cache.rows] == [13, 6, 5]
    assert [len(row.tables[0].blocks) for row in cache.rows] == [blocks(13), blocks(6), blocks(5)]
    cache.release([0, 1, 2])
    assert all(group.pool.stats()["used"] == 0 for group in cache.groups)


def test_what_was_launched_stays_where_there_are_no_blocks_for_more() -> None:
    cache = rows_of("llama", num_blocks=8)
    run = cache.begin_run([0, 1, 2], [1, 2, 3], 2)
    with pytest.raises(OutOfBlocks):
        run.extend(40)
    run.launched = 2
    assert run.finish([[1, 4], [2, 5], [3, 6]]) == [True] * 3
    assert [row.length for row in cache.rows] == [8, 8, 5]


def test_the_plan_of_an_extended_run_is_that_of_one_that_begins_there() -> None:
    cache = rows_of("llama")
    run = cache.begin_run([0, 1, 2], [1, 2, 3], 5)
    run.extend(3)
    extended = run.plan(3)
    run.launched = 8
    run.finish([[1, 2, 3, 4, 5]] * 3)
    [begun] = cache.begin_run([0, 1, 2], [5, 5, 5], 3).plan(3)
    assert WorkShape.of(extended[0]) == WorkShape.of(begun)
    for mine, its in zip((extended[0].members, extended[0].merges), (begun.members, begun.merges), strict=True):
        assert torch.equal(mine, its)
    cache.abort()
