import gc
import random
import tracemalloc

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from decodekit.cache.allocator import OutOfBlocks
from decodekit.cache.blocks import BlockPool
from decodekit.cache.prefix import Prompt
from tests.cache.machine import SEARCH, PoolMachine


@pytest.mark.parametrize("examples", [100, pytest.param(3000, marks=pytest.mark.slow)])
def test_invariants_hold(examples):
    run_state_machine_as_test(PoolMachine, settings=settings(SEARCH, max_examples=examples))


def run(pool: BlockPool, rng: random.Random, operations: int) -> None:
    """Random requests that share prefixes, fork, roll back, slide, and are preempted when there is no room."""
    tables = []
    for _ in range(operations):
        table = rng.choice(tables) if tables else None
        match rng.randrange(8):
            case 0 | 1 if len(tables) < 12:
                prompt = Prompt([rng.randrange(2)] * rng.randrange(1, 30) + [rng.randrange(50)], salt=rng.choice("ab"))
                tables.append(table := pool.open(prompt))
                tokens = prompt.tokens[table.length :]
            case 2 if table and table.committed == table.length and len(tables) < 12:
                tables.append(pool.fork(table))
                continue
            case 3 if table:
                pool.truncate(table, rng.randint(table.slid * pool.block_size, table.length))
                continue
            case 4 if table:
                pool.slide(table, max(table.committed - 12, 0), sinks=3)
                continue
            case 5 if table:
                tables.remove(table)
                pool.release(table)
                continue
            case _ if table:
                tokens = [rng.randrange(50)] * rng.randrange(1, 6)
            case _:
                continue
        try:
            pool.append(table, len(tokens))
            pool.commit(table, tokens)
        except OutOfBlocks:
            tables.remove(table)
            pool.release(table)
    for table in tables:
        pool.release(table)


def drain(pool: BlockPool) -> None:
    """Leave nothing of what was before."""
    assert pool.used_blocks == 0
    assert pool.free_blocks + pool.cached_blocks == pool.num_blocks
    table = pool.open(Prompt([-1]))
    pool.append(table, pool.num_blocks * pool.block_size)
    pool.release(table)
    assert pool.free_blocks == pool.num_blocks
    assert len(pool._index) == 0


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 8])
def test_nothing_leaks_in_100_000_operations(window):
    pool, rng = BlockPool(48, 4, window=window), random.Random(0)
    tracemalloc.start()
    sizes = []
    for _ in range(20):
        run(pool, rng, 5_000)
        drain(pool)
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert min(pool.stats()[name] for name in ("hits", "misses", "evictions", "copies")) > 1000
    assert sizes[-1] - sizes[1] < 9_000, "a tenth of a byte an operation: what dicts keep in reserve, not a leak"
