import torch

from decodekit.cache.gather import Group
from decodekit.cache.prefix import Prompt


def opened(group, lengths):
    tables = [group.pool.open(Prompt(())) for _ in lengths]
    for table, length in zip(tables, lengths, strict=True):
        group.pool.append(table, length)
        group.pool.commit(table, [0] * length)
        group.pool.slide(table, group.first_needed(length))
    return tables


def columns(group, tables, lengths, count):
    for table in tables:
        group.pool.append(table, count)
    write, read, chosen = group.slots(tables, lengths, count, [count] * len(tables)).on(torch.device("cpu"))
    assert chosen is None
    assert write.tolist() == read[:, -count:].flatten().tolist()
    return read.tolist()


def test_shorter_rows_are_padded_on_the_left_with_a_slot_of_their_own():
    group = Group([0], 16, 3, None)
    tables, lengths = opened(group, [7, 2, 0]), [7, 2, 0]
    rows = columns(group, tables, lengths, 2)
    for row, table, length in zip(rows, tables, lengths, strict=True):
        own = group.pool.slot_mapping(table, 0, length + 2)
        assert row == [own[0]] * (7 - length) + own


def test_a_window_shows_what_its_first_query_sees():
    group = Group([0], 32, 2, 5)
    tables, lengths = opened(group, [11, 3, 4]), [11, 3, 4]
    rows = columns(group, tables, lengths, 3)
    assert rows[0] == group.pool.slot_mapping(tables[0], 7, 14)
    assert rows[1] == group.pool.slot_mapping(tables[1], 0, 1) + group.pool.slot_mapping(tables[1], 0, 6)
    assert rows[2] == group.pool.slot_mapping(tables[2], 0, 7)


def test_slots_follow_the_tables():
    group = Group([0], 16, 2, None)
    tables = opened(group, [3])
    first = columns(group, tables, [3], 1)
    group.pool.commit(tables[0], [0])
    tables = [group.pool.fork(tables[0]), tables[0]]
    rows = columns(group, tables, [4, 4], 1)
    assert rows[0][:4] == rows[1][:4] == first[0]
    assert rows[0][4] != rows[1][4]
