"""The kernel over quantized blocks, against dense attention over the numbers that the store itself gives back."""

import pytest
import torch

from decodekit.cache.quantization import QuantizedStore
from decodekit.kernels.kv_quantize import BITS
from decodekit.kernels.paged_attention import paged_attention, plan_work, why_torch

from .test_paged_attention import dense, make

SHARED = [([0, 1], 6)]


def quantized(arguments, block_size, kind, device="cpu", filling=()):
    """The K/V in a store, and all its numbers: blocks of these rows' last tokens, and those of ``filling``, are not sealed."""
    query, keys, values, table, lengths, start = arguments
    store = QuantizedStore(len(keys) // block_size, block_size, keys[:1].to(device), values[:1].to(device), kind)
    sealed = set()
    for row, length in enumerate(lengths.tolist()):
        blocks = table[row, : -(-length // block_size)]
        tokens = torch.arange(length)
        there = blocks[tokens // block_size] >= 0
        slots = (blocks[tokens // block_size] * block_size + tokens % block_size)[there]
        store.write(slots.to(device), keys[slots].to(device), values[slots].to(device))
        sealed |= set(blocks[: length // block_size].tolist())
    store.seal(torch.tensor(sorted(sealed - {-1, *filling})))
    numbers = [torch.full_like(part, torch.nan) for part in (keys, values)]
    for row, length in enumerate(lengths.tolist()):
        slots = [
            int(table[row, token // block_size]) * block_size + token % block_size
            for token in range(length)
            if table[row, token // block_size] >= 0
        ]
        if slots:
            chosen = torch.tensor(slots)
            for part, read in zip(numbers, store.read(chosen.to(device)[None]), strict=True):
                part[chosen] = read[0].cpu()
    return store, (query, *numbers, table, lengths, start)


def by_kernel(store, arguments, options, device, **more):
    from decodekit.kernels.paged_attention import triton

    query, _, _, *tables = arguments
    cut = {"block_size": options["block_size"], "window": options["window"]}
    work = plan_work(*tables, **cut, group=query.shape[1] // store.keys.shape[1], device=device)
    more = {name: option.to(device) if isinstance(option, torch.Tensor) else option for name, option in more.items()}
    return triton.paged_attention(query.to(device), store.keys, store.values, work, **options, **more).cpu()


@pytest.fixture
def short_splits(monkeypatch):
    monkeypatch.setattr("decodekit.kernels.paged_attention.work.SPLITS", (32, 64))


CASES = [
    ({"shared": SHARED, "heads": 2, "key_heads": 1}, {}, BITS),
    # Codes that do not fill their last byte, and a window that begins within a block.
    (
        {"heads": 6, "width": 7, "value_width": 5, "block_size": 8, "window": 13},
        {"sinks": torch.randn(6)},
        ("int4", "int2"),
    ),
    ({"heads": 4, "key_heads": 1, "width": 16, "value_width": 24, "block_size": 16}, {"softcap": 2.0}, ("int8", "fp8")),
]


@pytest.mark.usefixtures("short_splits", "unwritten")
@pytest.mark.parametrize(
    ("kind", "shape", "more"),
    [
        pytest.param(kind, shape, more, marks=[] if kind in quick else pytest.mark.slow)
        for shape, more, quick in CASES
        for kind in BITS
    ],
)
def test_equals_dense_attention_over_the_numbers_of_the_store(device, kind, shape, more) -> None:
    arguments, options = make([36, 33, 3, 0, 66], [1, 2, 3, 0, 24], dtype=torch.float32, **shape)
    store, exact = quantized(arguments, options["block_size"], kind, device, filling={int(arguments[3][4, 3])})
    expected = dense(*exact, **options, **more)
    output = by_kernel(store, arguments, options, device, **more)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(expected, dense(*arguments, **options, **more), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("short_splits", "unwritten")
@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_a_row_is_the_same_to_the_bit_beside_others(device, kind, monkeypatch) -> None:
    if device == "cpu":
        monkeypatch.setattr("decodekit.kernels.paged_attention.work.TILES", (16, 16))
    arguments, options = make([100, 103, 70], [1, 2, 1], shared=[([0, 1, 2], 16), ([0, 1], 24)], dtype=torch.float32)
    store, (query, keys, values, table, lengths, start) = quantized(arguments, 4, kind, device)
    together = by_kernel(store, arguments, options, device)
    for row in range(3):
        own = slice(*start[row : row + 2].tolist())
        alone = query[own], keys, values, table[row : row + 1], lengths[row : row + 1], start[row : row + 2] - own.start
        assert torch.equal(by_kernel(store, alone, options, device), together[own])


@pytest.mark.parametrize("kind", ["int8", "int2"])
def test_plain_torch_reads_the_numbers_of_the_store(kind) -> None:
    arguments, options = make([70, 41, 3], [1, 2, 3], dtype=torch.float64, shared=SHARED)
    arguments = tuple(part.float() if part.is_floating_point() else part for part in arguments)
    store, exact = quantized(arguments, 4, kind)
    query, _, _, *tables = exact
    output = paged_attention(query, store.keys, store.values, *tables, **options)
    assert torch.equal(output, paged_attention(*exact, **options))


@pytest.mark.parametrize(("size", "reason"), [(4, None), (64, None), (12, "12 tokens"), (128, "128 tokens")])
def test_the_kernel_reads_blocks_of_some_sizes(monkeypatch, size, reason) -> None:
    monkeypatch.setattr("decodekit.kernels.paged_attention.triton_runs", lambda device: True)
    query = torch.zeros(1, 2, 8)
    store = QuantizedStore(2, size, query, query, "int8")
    assert why_torch(query, store.keys, store.values) == (reason and f"quantized blocks of {reason}")
    assert why_torch(query.half(), store.keys, store.values) == "K/V kept in torch.float32"
