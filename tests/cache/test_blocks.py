import pytest

from decodekit.cache.allocator import OutOfBlocks
from decodekit.cache.blocks import BlockPool, Copy
from decodekit.cache.prefix import Prompt
from decodekit.core.errors import InputError
from tests.cache.interrupts import Interrupted, failing_take, interrupted, state


def compute(pool, tokens, **other):
    """Open a sequence and write all of its prompt."""
    table = pool.open(Prompt(tokens, **other))
    write(pool, table, tokens[table.length :])
    return table


def write(pool, table, tokens):
    copies = pool.append(table, len(tokens))
    pool.commit(table, tokens)
    return copies


def test_shared_prompts_hits_and_evictions():
    pool = BlockPool(16, 4)
    shared = list(range(12))
    first, second = [*shared, *range(100, 107)], [*shared, *range(200, 205)]
    tables = [compute(pool, first), compute(pool, second)]
    assert (pool.used_blocks, pool.stats()["hits"]) == (7, 3)
    for table in tables:
        pool.release(table)
    assert (pool.used_blocks, pool.cached_blocks, pool.free_blocks) == (0, 5, 11)
    again = compute(pool, first)
    assert (pool.used_blocks, pool.stats()["hits"]) == (5, 7)
    pool.release(again)
    for number in range(4):
        compute(pool, [1000 * number + place for place in range(1000, 1016)])
    assert (pool.used_blocks, pool.stats()["evictions"], pool.stats()["peak"]) == (16, 5, 16)


@pytest.mark.parametrize("size", [1, 2, 7, 16, 256])
def test_n_tokens_have_ceil_blocks_and_append_changes_only_the_last(size):
    pool = BlockPool(300 // size + 2, size)
    table = pool.open(Prompt([]))
    for length in range(1, 300):
        before = table.blocks
        assert write(pool, table, [length % 3]) == []
        assert len(table.blocks) == -(-length // size)
        assert table.blocks[: len(before)] == before
        assert pool.slot_mapping(table, length - 1, length) == [table.blocks[-1] * size + (length - 1) % size]


def test_900_and_300_tokens_have_75_blocks():
    pool = BlockPool(100, 16)
    table = compute(pool, [1] * 900)
    for _ in range(300):
        write(pool, table, [2])
    assert pool.used_blocks == len(table.blocks) == 75


def test_forks_share_until_they_diverge_then_all_but_the_last_owner_copy():
    pool = BlockPool(100, 16)
    root = compute(pool, list(range(203)))
    forks = [root, *(pool.fork(root) for _ in range(4))]
    assert pool.used_blocks == 13
    shared = root.blocks[-1]
    for number, table in enumerate(forks[:-1], 1):
        assert write(pool, table, [7]) == [Copy(shared, table.blocks[-1])]
        assert table.blocks[:-1] == forks[-1].blocks[:-1]
        assert pool.used_blocks == 13 + number
    assert write(pool, forks[-1], [8]) == []
    assert forks[-1].blocks[-1] == shared
    assert pool.stats()["copies"] == 4


def test_in_a_step_of_forks_the_longest_writes_in_place_and_all_can_have_it_back():
    pool = BlockPool(16, 4)
    first = compute(pool, list(range(7)))
    shorter, last = pool.fork(first), pool.fork(first)
    pool.truncate(shorter, 5)
    shared, lengths = first.blocks[-1], [7, 5, 7]
    copies = pool.append_together([first, shorter, last], 2)
    assert copies == [[Copy(shared, first.blocks[1])], [Copy(shared, shorter.blocks[1])], []]
    assert [table.length for table in (first, shorter, last)] == [9, 7, 9]
    assert pool.used_blocks == 6
    for table, length, copied in zip([first, shorter, last], lengths, copies, strict=True):
        pool.retract(table, length, copied)
    assert [table.length for table in (first, shorter, last)] == lengths
    assert first.blocks == shorter.blocks == last.blocks
    assert pool.used_blocks == 2


def test_a_step_has_room_for_all_tables_or_for_none():
    pool = BlockPool(5, 2)
    tables = [compute(pool, [number] * 2) for number in range(3)]
    before = state(pool, *tables)
    with pytest.raises(OutOfBlocks, match="3 blocks needed, 2 free"):
        pool.append_together(tables, 1)
    assert state(pool, *tables) == before
    assert pool.append_together(tables[1:], 1) == [[], []]


def test_a_full_hit_leaves_a_token_to_compute():
    pool = BlockPool(8, 4)
    pool.release(compute(pool, list(range(8))))
    assert pool.resumable(Prompt(list(range(8)))) == [0, 4]
    assert pool.open(Prompt(list(range(8)))).num_cached == 4
    assert pool.open(Prompt(list(range(9)))).num_cached == 8


def test_only_committed_full_blocks_are_hit():
    pool = BlockPool(8, 4)
    table = pool.open(Prompt(list(range(8))))
    pool.append(table, 8)
    pool.commit(table, [0, 1, 2])
    assert pool.resumable(Prompt(list(range(9)))) == [0]
    pool.commit(table, [3, 4])
    assert pool.resumable(Prompt(list(range(9)))) == [0, 4]


def test_equal_content_is_cached_once_and_the_older_block_is_hit():
    pool = BlockPool(8, 2)
    first, second = (pool.open(Prompt([5, 6, 7])) for _ in range(2))
    for table in (first, second):
        write(pool, table, [5, 6, 7])
    assert first.blocks[0] != second.blocks[0]
    third = pool.open(Prompt([5, 6, 7]))
    assert third.blocks == first.blocks[:1]
    for table in (first, second, third):
        pool.release(table)
    assert pool.cached_blocks == 1


def test_what_nobody_else_needs_is_rolled_back_in_place():
    pool = BlockPool(8, 4)
    table = compute(pool, list(range(8)))
    pool.truncate(table, 6)
    assert pool.cached_blocks == 0
    assert write(pool, table, [9, 9]) == []
    assert pool.resumable(Prompt([0, 1, 2, 3, 4, 5, 6, 7, 8])) == [0, 4]
    assert pool.resumable(Prompt([0, 1, 2, 3, 4, 5, 9, 9, 8])) == [0, 4, 8]


def test_a_sealed_block_that_another_has_hit_is_copied_when_rolled_back_into():
    pool = BlockPool(8, 4)
    table = compute(pool, list(range(8)))
    other = pool.open(Prompt(list(range(9))))
    pool.truncate(table, 6)
    assert write(pool, table, [9, 9]) == [Copy(other.blocks[1], table.blocks[1])]
    assert pool.open(Prompt(list(range(9)))).num_cached == 8


def test_rolling_back_over_blocks_keeps_the_chain():
    pool = BlockPool(16, 2)
    table = compute(pool, [1, 2, 3, 4, 5, 6, 7])
    pool.truncate(table, 3)
    write(pool, table, [9, 8])
    assert pool.resumable(Prompt([1, 2, 3, 9, 8])) == [0, 2, 4]
    assert table.committed == table.length == 5


def test_the_window_lets_go_of_whole_blocks_and_keeps_sinks():
    pool = BlockPool(16, 4)
    table = compute(pool, list(range(30)))
    pool.slide(table, 18, sinks=1)
    assert [block is None for block in table.blocks] == [False, True, True, True, False, False, False, False]
    pool.slide(table, 5, sinks=1)
    assert pool.used_blocks == 5
    assert len(pool.slot_mapping(table, 16, 30)) == 14
    with pytest.raises(InputError, match="let go of block 3"):
        pool.slot_mapping(table, 15, 17)
    with pytest.raises(InputError, match="can go back from 30 to 16"):
        pool.truncate(table, 15)
    pool.truncate(table, 16)
    write(pool, table, [1])
    assert pool.used_blocks == 2


def test_a_long_stream_keeps_its_blocks_constant():
    pool = BlockPool(8, 16, prefix_cache=False)
    table = pool.open(Prompt([]))
    for step in range(20_000):
        write(pool, table, [step])
        pool.slide(table, max(table.length - 60, 0), sinks=4)
    assert pool.stats()["peak"] <= 6


def test_with_a_window_only_its_last_blocks_are_needed():
    pool = BlockPool(7, 4, window=6)
    table = compute(pool, list(range(24)))
    pool.slide(table, 19)
    compute(pool, [50] * 20)  # takes the free block and evicts the four that slid out
    table_again = pool.open(Prompt(list(range(30))))
    assert table_again.num_cached == 24
    assert table_again.blocks == [None, None, None, None, *table.blocks[4:]]
    with pytest.raises(InputError, match=r"begin with \[0, 24\] tokens"):
        pool.open(Prompt(list(range(30))), depth=8)


def test_admission_counts_what_is_shared_and_what_would_be_evicted():
    pool = BlockPool(6, 4)
    table = compute(pool, list(range(13)))
    assert pool.can_admit(Prompt(list(range(13))), 7)  # 3 shared, 2 of its own
    assert not pool.can_admit(Prompt(list(range(13))), 8)
    pool.release(table)
    assert pool.can_admit(Prompt(list(range(13))), 11)
    assert not pool.can_admit(Prompt(list(range(13))), 12)
    assert not pool.can_admit(Prompt([9]), 24)
    assert BlockPool(6, 4, window=9).can_admit(Prompt([9]), 10_000)


def test_out_of_blocks_says_what_there_is_and_takes_nothing():
    pool = BlockPool(4, 4)
    pool.release(compute(pool, [1] * 4))
    table = compute(pool, [2] * 8)
    before = state(pool, table)
    with pytest.raises(OutOfBlocks, match=r"^3 blocks needed, 1 free and 1 evictable of 4; ") as error:
        pool.append(table, 9)
    assert (error.value.needed, error.value.free, error.value.evictable) == (3, 1, 1)
    assert state(pool, table) == before
    assert pool.can_allocate(2)
    assert not pool.can_allocate(3)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("index", range(5))
def test_failing_at_any_allocation_restores_what_was_evicted(index, late):
    pool = BlockPool(6, 2)
    pool.release(compute(pool, [1] * 6))
    table = pool.fork(original := compute(pool, [2]))
    before = state(pool, table, original)
    with failing_take(pool, index, late), pytest.raises(Interrupted):
        pool.append(table, 8)
    assert state(pool, table, original) == before
    assert pool.append(table, 8) == [Copy(original.blocks[0], table.blocks[0])]


OPERATIONS = {
    "open": lambda pool, table: pool.open(Prompt([1, 1, 1, 1, 1])),
    "append, the last block shared": lambda pool, table: pool.append(table, 5),
    "append, the last block sealed": lambda pool, table: [pool.truncate(table, 3), pool.append(table, 4)][1],
    "commit": lambda pool, table: [pool.append(table, 5), pool.commit(table, [4] * 5)][1],
    "fork": lambda pool, table: pool.fork(table),
    "truncate": lambda pool, table: pool.truncate(table, 1),
    "slide": lambda pool, table: pool.slide(table, 4),
    "release": lambda pool, table: pool.release(table),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_interrupted_before_any_line_an_operation_did_nothing_or_all(name):
    """Every line at which Ctrl-C could arrive; where an operation is made of two, between them is a place as well."""

    def build():
        pool = BlockPool(9, 2)
        pool.release(compute(pool, [1] * 6))
        table = compute(pool, [2] * 5)
        if "shared" in name:
            pool.fork(table)
        return pool, table

    def shape(pool, table):
        """The state without the identity of its objects."""
        references, chains, *rest, holders, tables = state(pool, table)
        sealed = [None if chain is None else chain.contents for chain in chains]
        fields = [{**table, "chain": None, "generation": table["generation"] > 0} for table in tables]
        return references, sealed, *rest, sorted(holders.values()), fields

    allowed = [shape(*(untouched := build()))]
    pool, table = build()
    if "sealed" in name:
        pool.truncate(table, 3)
    elif name == "commit":
        pool.append(table, 5)
    allowed.append(shape(pool, table))
    pool, table = build()
    OPERATIONS[name](pool, table)
    allowed.append(shape(pool, table))
    at_line = 0
    while True:
        at_line += 1
        pool, table = build()
        try:
            with interrupted(at_line):
                OPERATIONS[name](pool, table)
            break
        except Interrupted:
            assert shape(pool, table) in allowed
    assert at_line > 8
    assert shape(pool, table) == allowed[-1]
    assert shape(*untouched) == allowed[0]


def test_released_reset_and_foreign_tables_are_refused():
    pool = BlockPool(8, 4)
    table = compute(pool, [1] * 6)
    with pytest.raises(InputError, match="another pool"):
        BlockPool(8, 4).append(table, 1)
    pool.release(table)
    pool.release(table)
    for operation in (
        lambda: pool.append(table, 1),
        lambda: pool.commit(table, []),
        lambda: pool.fork(table),
        lambda: pool.truncate(table, 0),
        lambda: pool.slide(table, 0),
        lambda: pool.slot_mapping(table, 0, 0),
    ):
        with pytest.raises(InputError, match="this table was released"):
            operation()
    table = compute(pool, [1] * 6)
    pool.reset()
    assert (pool.free_blocks, pool.cached_blocks, pool.stats()["hits"]) == (8, 0, 0)
    pool.release(table)
    with pytest.raises(InputError, match="before a reset"):
        pool.append(table, 1)
    assert pool.free_blocks == 8


def test_a_fork_needs_all_tokens_committed():
    pool = BlockPool(8, 4)
    table = compute(pool, [1] * 6)
    pool.append(table, 2)
    with pytest.raises(InputError, match="2 tokens are not committed"):
        pool.fork(table)
    pool.truncate(table, 6)
    assert pool.fork(table).committed == 6


def test_without_prefix_cache_nothing_is_kept():
    pool = BlockPool(8, 4, prefix_cache=False)
    table = compute(pool, [1] * 9)
    pool.truncate(table, 6)
    assert write(pool, pool.fork(table), [2]) != []
    pool.release(table)
    assert pool.cached_blocks == 0
    assert pool.open(Prompt([1] * 9)).num_cached == 0
    assert pool.stats()["misses"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0; a pool has at least 1 block"),
        ({"block_size": 0}, "block_size is 0; a block has 1 to 256 tokens"),
        ({"block_size": 257}, "block_size is 257; a block has 1 to 256 tokens"),
        ({"window": 0}, "window is 0; a query sees at least 1 token"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        BlockPool(**{"num_blocks": 4, **arguments})


def test_blocks_that_only_a_lost_table_names_are_taken_back():
    pool = BlockPool(9, 2)
    kept = compute(pool, [1, 2, 3])
    pool.fork(kept)
    compute(pool, [7, 8, 9, 7])
    pool.reclaim([kept])
    assert pool.used_blocks == 2
    assert [pool._allocator.references[block] for block in kept.blocks] == [1, 1]
    assert pool.resumable(Prompt([7, 8, 9, 7, 0]))[-1] == 4, "what they held can still be hit"
    pool.release(kept)
    pool.reclaim([])
    assert pool.used_blocks == 0
