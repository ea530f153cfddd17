"""The op against a dense softmax in float64, over caches whose unused slots are NaN: a read outside shows."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decodekit.kernels.paged_attention import (
    FixedWork,
    WorkShape,
    next_split,
    paged_attention,
    plan_parts,
    plan_work,
)


def make(
    lengths,
    counts,
    *,
    block_size=4,
    heads=4,
    key_heads=2,
    width=5,
    value_width=5,
    window=None,
    shared=(),
    dtype=torch.float64,
    seed=0,
):
    """Random rows in shuffled blocks; ``shared`` lists (rows, full blocks at the beginning that they have in common)."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in lengths]
    blocks = sum(needed) + 3
    order = iter(torch.randperm(blocks, generator=generator).tolist())
    table = torch.full((len(lengths), max(needed, default=0)), -1)
    keys = torch.full((blocks * block_size, key_heads, width), torch.nan, dtype=dtype)
    values = torch.full((blocks * block_size, key_heads, value_width), torch.nan, dtype=dtype)
    for row, length in enumerate(lengths):
        for block in range(needed[row]):
            donors = [rows[0] for rows, common in shared if row in rows[1:] and block < common]
            table[row, block] = table[donors[0], block] if donors else next(order)
        for token in range(length):
            slot = int(table[row, token // block_size]) * block_size + token % block_size
            if torch.isnan(keys[slot, 0, 0]):
                keys[slot] = torch.randn(keys.shape[1:], generator=generator, dtype=dtype)
                values[slot] = torch.randn(values.shape[1:], generator=generator, dtype=dtype)
    if window is not None:
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            table[row, : max(0, length - count - window + 1) // block_size] = -1
    start = torch.tensor([0, *itertools.accumulate(counts)])
    query = torch.randn(sum(counts), heads, width, generator=generator, dtype=dtype) * 2
    arguments = (query, keys, values, table, torch.tensor(lengths), start)
    return arguments, {"block_size": block_size, "scale": width**-0.5, "window": window}


def dense(query, keys, values, table, lengths, start, *, block_size, scale, window=None, softcap=None, sinks=None):
    output = torch.zeros(*query.shape[:2], values.shape[-1], dtype=torch.float64)
    group = query.shape[1] // keys.shape[1]
    for row, length in enumerate(lengths.tolist()):
        first, stop = start[row : row + 2].tolist()
        for place, head in itertools.product(range(first, stop), range(query.shape[1])):
            position = length - stop + place
            seen = range(max(0, position - window + 1) if window else 0, position + 1)
            if not seen:
                continue
            slots = [int(table[row, token // block_size]) * block_size + token % block_size for token in seen]
            scores = keys[slots, head // group].double() @ query[place, head].double() * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            output[place, head] = scores.softmax(-1)[: len(slots)] @ values[slots, head // group].double()
    return output


def by_parts(arguments, options, min_shared=1):
    """The op with every shared run attended apart."""
    tables = {name: options[name] for name in ("block_size", "window")}
    return paged_attention(*arguments, **options, parts=plan_parts(*arguments[3:], **tables, min_shared=min_shared))


@st.composite
def batches(draw):
    rows = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, 70), min_size=rows, max_size=rows))
    counts = [draw(st.integers(0, min(length, 9)) | st.just(length)) for length in lengths]
    block_size = draw(st.sampled_from([1, 3, 16]))
    key_heads = draw(st.integers(1, 3))
    members = sorted(draw(st.sets(st.integers(0, rows - 1))))
    common = min((lengths[row] - counts[row] for row in members), default=0) // block_size
    window = draw(st.none() | st.integers(1, 20))
    arguments, options = make(
        lengths,
        counts,
        block_size=block_size,
        heads=key_heads * draw(st.integers(1, 3)),
        key_heads=key_heads,
        width=draw(st.sampled_from([1, 5, 8])),
        value_width=draw(st.sampled_from([3, 5, 8])),
        window=window,
        shared=[(members, draw(st.integers(0, common)))],
        seed=draw(st.integers(0, 99)),
    )
    options["softcap"] = draw(st.none() | st.just(1.5))
    if draw(st.booleans()):
        options["sinks"] = torch.randn(arguments[0].shape[1], dtype=torch.float64)
    return arguments, options


@settings(max_examples=150)
@given(batches())
def test_equals_dense_attention(batch) -> None:
    arguments, options = batch
    expected = dense(*arguments, **options)
    torch.testing.assert_close(paged_attention(*arguments, **options), expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(by_parts(arguments, options), expected, atol=1e-12, rtol=1e-12)


@settings(max_examples=50)
@given(batches())
def test_a_row_does_not_depend_on_its_neighbours(batch) -> None:
    (query, keys, values, table, lengths, start), options = batch
    together = by_parts((query, keys, values, table, lengths, start), options)
    for row in range(len(lengths)):
        own = slice(*start[row : row + 2].tolist())
        count = own.stop - own.start
        arguments = query[own], keys, values, table[row : row + 1], lengths[row : row + 1], torch.tensor([0, count])
        torch.testing.assert_close(together[own], paged_attention(*arguments, **options), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_computes_in_float32_at_least(dtype, options) -> None:
    arguments, more = make([70, 3, 41], [1, 3, 20], width=64, value_width=64, dtype=dtype)
    output = paged_attention(*arguments, **more, **options)
    assert output.dtype == dtype
    # What remains is the rounding of the output, and of the probabilities in torch's fused kernel.
    tolerance = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), dense(*arguments, **more, **options), atol=tolerance, rtol=tolerance)


def test_left_pads_and_empty_rows_are_zeros_also_beside_sinks() -> None:
    arguments, options = make([5, 0, 2], [3, 0, 2])
    query, keys, values, table, lengths, _ = arguments
    padded = torch.cat([query[:3], torch.full((4, 4, 5), torch.nan), query[3:]])
    start = torch.tensor([0, 3, 6, 9])
    for sinks in (None, torch.ones(4, dtype=torch.float64)):
        output = paged_attention(padded, keys, values, table, lengths, start, **options, sinks=sinks)
        assert not output[3:7].any()
        expected = dense(*arguments, **options, sinks=sinks)
        torch.testing.assert_close(output[[0, 1, 2, 7, 8]], expected, atol=1e-12, rtol=1e-12)


def test_no_rows() -> None:
    arguments, options = make([], [])
    assert paged_attention(*arguments, **options).shape == (0, 4, 5)


def sizes(parts):
    """(groups, queries, keys) of each part."""

    def keys(part):
        return part.slots.stop - part.slots.start if isinstance(part.slots, slice) else part.slots.shape[1]

    return [(*part.queries.shape, keys(part)) for part in parts]


def test_a_shared_prefix_is_read_once_at_every_depth() -> None:
    # All five begin with 4 blocks; the first three have 6 more in common; the last two nothing else.
    shared = [([0, 1, 2, 3, 4], 4), ([0, 1, 2], 10)]
    arguments, options = make([43, 42, 41, 18, 19], [1, 1, 1, 1, 1], shared=shared)
    parts = plan_parts(*arguments[3:], block_size=4, min_shared=1)
    assert sorted(sizes(parts)) == sorted([(1, 5, 16), (1, 3, 24), (4, 1, 3), (1, 1, 1)])
    torch.testing.assert_close(by_parts(arguments, options), dense(*arguments, **options), atol=1e-12, rtol=1e-12)


def test_short_shared_runs_wait_for_deeper_ones() -> None:
    shared = [([0, 1, 2], 1), ([0, 1], 10)]
    arguments, options = make([41, 41, 41], [1, 1, 1], shared=shared)
    parts = plan_parts(*arguments[3:], block_size=4, min_shared=40)
    assert sorted(sizes(parts)) == sorted([(1, 2, 40), (2, 1, 1), (1, 1, 41)])
    torch.testing.assert_close(by_parts(arguments, options, 40), dense(*arguments, **options), atol=1e-12, rtol=1e-12)


def test_forked_rows_in_float32_equal_themselves_without_the_shared_part() -> None:
    arguments, options = make(
        [300] * 16,
        [1] * 16,
        block_size=16,
        shared=[(list(range(16)), 18)],
        width=64,
        value_width=64,
        dtype=torch.float32,
    )
    apart = by_parts(arguments, options, None)
    torch.testing.assert_close(paged_attention(*arguments, **options), apart, atol=1e-6, rtol=1e-6)


def test_long_prompts_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decodekit.kernels.paged_attention.plan._SCORES", 20 * 30)
    for window in (None, 11):
        arguments, options = make([70, 68, 70], [70, 60, 1], window=window, shared=[([1, 2], 2)])
        parts = plan_parts(*arguments[3:], block_size=4, window=window, min_shared=1)
        assert max(groups * count * keys for groups, count, keys in sizes(parts)) <= 16 * 70
        torch.testing.assert_close(by_parts(arguments, options), dense(*arguments, **options), atol=1e-12, rtol=1e-12)


def test_adjoining_blocks_are_not_copied() -> None:
    table = torch.tensor([[3, 4, 5], [7, 1, 2]])
    apart = plan_parts(table, torch.tensor([9, 10]), torch.tensor([0, 1, 3]), block_size=4)
    assert [part.slots if isinstance(part.slots, slice) else None for part in apart] == [slice(12, 21), None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(4, 3, 5)}, "3 query heads cannot share 2 K/V heads evenly"),
        ({"query": torch.zeros(4, 4, 6)}, "queries are 6 wide and keys 5"),
        ({"query": torch.zeros(4, 20)}, r"should be \[N, Hq, D\]"),
        ({"sinks": torch.zeros(2)}, r"sinks have shape \[2\]; 4 query heads need \[4\]"),
        ({"lengths": torch.tensor([9, 5, 1])}, "R rows need R lengths"),
        ({"lengths": torch.tensor([9, 13])}, "row 1 has 13 tokens, its block_table 3 blocks of 4"),
        ({"table": torch.tensor([[1, 2, 3], [4, -1, -1]])}, "no block for token 4 of row 1"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message) -> None:
    (query, keys, values, table, lengths, start), options = make([9, 5], [2, 2])
    tensors = {"query": query, "keys": keys, "values": values, "table": table, "lengths": lengths, "start": start}
    sinks = change.pop("sinks", None)
    with pytest.raises(ValueError, match=message):
        paged_attention(*(tensors | change).values(), **options, sinks=sinks)


def by_kernel(arguments, options, device, **more):
    """The Triton kernel, on the GPU or interpreted."""
    from decodekit.kernels.paged_attention import triton

    query, keys, values, *tables = arguments
    cut = {"block_size": options["block_size"], "window": options["window"]}
    work = plan_work(*tables, **cut, group=query.shape[1] // keys.shape[1], device=device)
    more = {name: option.to(device) if isinstance(option, torch.Tensor) else option for name, option in more.items()}
    on_device = (tensor.to(device) for tensor in (query, keys, values))
    return triton.paged_attention(*on_device, work, **options, **more).cpu(), work


@pytest.fixture
def short_splits(monkeypatch):
    monkeypatch.setattr("decodekit.kernels.paged_attention.work.SPLITS", (32, 64))


LONG_AND_SHORT = [70, 3, 41, 0, 90], [1, 2, 20, 0, 70]
"""Rows whose keys are cut, in one part, with many queries, empty, and with more queries than one item has."""


@pytest.mark.usefixtures("short_splits", "unwritten")
@pytest.mark.parametrize(
    ("shape", "more"),
    [
        ({}, {}),
        ({"heads": 6, "width": 5, "value_width": 7, "block_size": 3}, {"softcap": 1.5}),
        ({"heads": 8, "key_heads": 1, "width": 24, "value_width": 24, "window": 11}, {"sinks": torch.randn(8)}),
        (
            {"heads": 7, "key_heads": 7, "block_size": 16, "shared": [([0, 4], 4)]},
            {"softcap": 2.0, "sinks": torch.randn(7)},
        ),
    ],
)
def test_kernel_equals_dense_attention(device, shape, more) -> None:
    arguments, options = make(*LONG_AND_SHORT, dtype=torch.float32, **shape)
    output, _ = by_kernel(arguments, options, device, **more)
    torch.testing.assert_close(output.double(), dense(*arguments, **options, **more), atol=2e-6, rtol=2e-6)


@pytest.mark.usefixtures("short_splits", "unwritten")
def test_kernel_reads_a_shared_prefix_once_and_changes_no_bit_of_a_row(device, monkeypatch) -> None:
    if device == "cpu":
        # numpy's products depend on the shape of a tile, a GPU's do not.
        monkeypatch.setattr("decodekit.kernels.paged_attention.work.TILES", (16, 16))
    shared = [([0, 1, 2], 16), ([0, 1], 24)]
    arguments, options = make([100, 103, 70], [1, 2, 1], shared=shared, dtype=torch.float32)
    query, keys, values, table, lengths, start = arguments
    together, work = by_kernel(arguments, options, device)
    items = [item for _, own in work.items for item in own.tolist()]
    # (first key, stop, queries): 64 tokens for all, 32 more for two, the rest alone.
    assert sorted((item[1], item[2], item[4]) for item in items) == [
        (0, 32, 4), (32, 64, 4), (64, 70, 1), (64, 96, 3), (96, 100, 1), (96, 103, 2),
    ]  # fmt: skip
    for row in range(3):
        own = slice(*start[row : row + 2].tolist())
        alone = query[own], keys, values, table[row : row + 1], lengths[row : row + 1], start[row : row + 2] - own.start
        assert torch.equal(by_kernel(alone, options, device)[0], together[own])


@pytest.mark.usefixtures("unwritten")
def test_kernel_left_pads_are_zeros_and_blocks_a_window_let_go_are_not_read(device) -> None:
    arguments, options = make([50, 2], [1, 2], window=7, dtype=torch.float32)
    query, keys, values, table, lengths, _ = arguments
    assert (table[0, :10] == -1).all()
    padded = torch.cat([query[:1], torch.full((3, 4, 5), torch.nan), query[1:]])
    arguments = padded, keys, values, table, lengths, torch.tensor([0, 1, 6])
    output, _ = by_kernel(arguments, options, device, sinks=torch.ones(4))
    assert not output[1:4].any()
    expected = dense(query, keys, values, table, lengths, torch.tensor([0, 1, 3]), **options, sinks=torch.ones(4))
    torch.testing.assert_close(output[[0, 4, 5]].double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("length", "parts"),
    [
        (128, 1),
        (511, 4),
        (512, 2),
        (513, 3),
        (1023, 4),
        (1024, 2),
        (4096, 8),
        (8191, 16),
        (8192, 8),
        (16384, 8),
        (32768, 8),
        (131072, 32),
    ],
)
def test_parts_depend_on_the_length_alone(length, parts) -> None:
    table, start = torch.arange(-(-length // 16))[None], torch.tensor([0, 1])
    work = plan_work(table, torch.tensor([length]), start, block_size=16, group=4)
    assert [len(items) for _, items in work.items] == [parts]
    assert work.num_parts == (parts if parts > 1 else 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([9, 5, 1])}, "R rows need R lengths"),
        ({"lengths": torch.tensor([9, 13])}, "row 1 has 13 tokens, its block_table 3 blocks of 4"),
        ({"table": torch.tensor([[1, 2, 3], [4, -1, -1]])}, "no block for token 4 of row 1"),
    ],
)
def test_work_needs_a_block_for_every_token(change, message) -> None:
    (_, _, _, table, lengths, start), _ = make([9, 5], [2, 2])
    with pytest.raises(ValueError, match=message):
        plan_work(*({"table": table, "lengths": lengths} | change).values(), start, block_size=4, group=1)


@pytest.mark.usefixtures("short_splits", "unwritten")
@pytest.mark.parametrize("window", [None, 20])
def test_a_plan_for_the_steps_ahead_changes_no_bit_of_them(device, monkeypatch, window) -> None:
    if device == "cpu":
        monkeypatch.setattr("decodekit.kernels.paged_attention.work.TILES", (16, 16))
    from decodekit.kernels.paged_attention import triton

    # Shared whole splits, a row alone, and one that is not there; all come to another block, the longer ones to another split.
    now, ahead = [44, 46, 10, 0], 5
    shape = {"heads": 2, "key_heads": 1, "shared": [([0, 1], 8)]}
    arguments, options = make([length + ahead for length in now], [1] * 4, **shape, dtype=torch.float32)
    options["window"] = window
    query, keys, values, table, lengths, start = arguments
    on_device = [tensor.to(device) for tensor in (query, keys, values)]
    cut = {"block_size": options["block_size"], "window": window, "group": 2}
    lengths = torch.tensor(now)
    plan = plan_work(table.clamp(min=0), lengths, start, **cut, ahead=ahead, device="cpu")
    assert any(item[4] > 1 for _, own in plan.items for item in own.tolist()) == (window is None)
    fixed = FixedWork(WorkShape.of(plan).roomy(table.shape[1] + 3, growth=1.5), 2, torch.device(device))
    assert fixed.shape.holds(WorkShape.of(plan))
    fixed.load(plan)
    for grown in (1, ahead):
        fixed.work.grown.fill_(grown)
        work = plan_work(table, lengths + grown * (lengths > 0), start, **cut, device=device)
        expected = triton.paged_attention(*on_device, work, **options)
        assert torch.equal(triton.paged_attention(*on_device, fixed.work, **options), expected)


@pytest.mark.parametrize("length", [1, 511, 512, 600, 1023, 1024, 8191, 8192, 16383, 16384, 32768, 200_000])
def test_the_next_split_is_where_the_cuts_move(length) -> None:
    def size(length):
        table, start = torch.arange(-(-length // 16) + 1)[None], torch.tensor([0, 1])
        work = plan_work(table, torch.tensor([length]), start, block_size=16, group=4)
        return int(work.items[0][1][0, 8])

    after = next_split(length)
    if after is None:
        assert size(length) == size(2 * length)
    else:
        assert size(length) == size(after - 1) != size(after)


@pytest.mark.usefixtures("short_splits", "unwritten")
@pytest.mark.parametrize("window", [None, 150])
def test_joined_splits_change_no_bit(device, monkeypatch, window) -> None:
    if device == "cpu":
        monkeypatch.setattr("decodekit.kernels.paged_attention.work.TILES", (16, 16))
    arguments, options = make([200, 90, 130, 3], [1, 1, 2, 1], shared=[([0, 1], 8)], dtype=torch.float32)
    options["window"] = window
    apart, work = by_kernel(arguments, options, device)
    monkeypatch.setattr("decodekit.kernels.paged_attention.work._ENOUGH", 2)
    joined, fewer = by_kernel(arguments, options, device)
    assert sum(len(own) for _, own in fewer.items) < sum(len(own) for _, own in work.items)
    assert torch.equal(apart, joined)
