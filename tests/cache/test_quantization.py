import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decodekit.cache.account import PRECISIONS, Account
from decodekit.cache.quantization import QuantizedStore
from decodekit.cache.shapes import LayerShape
from decodekit.core.errors import InputError
from decodekit.kernels.kv_quantize import BITS, dequantize, quantize

HEADS, KEY_DIM, VALUE_DIM = 2, 5, 7


def new_store(
    kind: str, *, num_blocks: int = 4, block_size: int = 4, dtype: torch.dtype = torch.float32
) -> QuantizedStore:
    return QuantizedStore(num_blocks, block_size, *tokens(0, dtype=dtype), kind)


def tokens(count: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn((count, HEADS, dim), generator=generator).to(dtype) for dim in (KEY_DIM, VALUE_DIM))
    return keys, values


def slots_of(block: int, start: int, stop: int, block_size: int = 4) -> Tensor:
    return torch.arange(start, stop) + block * block_size


def ids(*blocks: int) -> Tensor:
    return torch.tensor(blocks)


def read(store: QuantizedStore, slots: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = store.read(slots.unsqueeze(0))
    return keys[0], values[0]


def reference(keys: Tensor, values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """What a block of these tokens reads as once it is quantized: keys by channel, values by token."""
    rounded = [
        dequantize(*quantize(numbers, dim, kind), kind, numbers.shape[-1], numbers.dtype)
        for numbers, dim in ((keys, 0), (values, -1))
    ]
    return rounded[0], rounded[1]


def assert_equal(result: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_reads_what_quantized_blocks_hold_and_residual_blocks_exactly(
    block_size: int, dtype: torch.dtype, kind: str
) -> None:
    num_blocks = 9
    store = new_store(kind, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
    keys, values = tokens(num_blocks * block_size, dtype=dtype)
    keys[:, 1, 2], values[3:5] = 0.5, 0  # a constant channel, tokens of zeros
    keys[2, 0, 1] = 1e4
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(1))
    store.write(order, keys[order], values[order])
    sealed = ids(0, 2, 3, 8)
    store.seal(sealed)
    for block in sealed.tolist():
        span = slice(block * block_size, (block + 1) * block_size)
        keys[span], values[span] = reference(keys[span], values[span], kind)
    slots = torch.randint(len(keys), (3, 11), generator=torch.Generator().manual_seed(2))
    result = store.read(slots)
    assert result[0].dtype == result[1].dtype == dtype
    assert_equal(result, (keys[slots], values[slots]))


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 64])
def test_memory_of_4096_tokens(block_size: int, dim: int, kind: str) -> None:
    heads, length = 3, 4096
    keys, values = torch.randn((2, length, heads, dim), generator=torch.Generator().manual_seed(0)).bfloat16()
    store = QuantizedStore(length // block_size, block_size, keys, values, kind)
    store.write(torch.arange(length), keys, values)
    tail = length // block_size - 1  # not full yet, so it stays in full precision
    store.seal(torch.arange(tail))
    full = keys.nbytes + values.nbytes
    limits = {"int8": (0.60, 0.56), "fp8": (0.57, 0.54), "int4": (0.36, 0.31), "int2": (0.24, 0.19)}
    assert store.nbytes / full <= limits[kind][block_size == 64]

    account = Account(((LayerShape("full", heads, dim, dim), 1),), 2, 4, block_size, PRECISIONS[kind])
    (shape, _), *_ = account.layers
    quantized_block = block_size * account.token(shape) + account.scales(shape)
    places = 4 * (tail + 1)
    assert store.nbytes == (tail + 1) * quantized_block + full // (tail + 1) + places


@pytest.mark.parametrize("kind", BITS)
def test_rollback_into_a_quantized_block_keeps_the_tokens_before(kind: str) -> None:
    store = new_store(kind)
    store.write(slots_of(1, 0, 4), *tokens(4))
    store.seal(ids(1))
    before = read(store, slots_of(1, 0, 4))
    new = tokens(1, seed=1)
    store.write(slots_of(1, 2, 3), *new)
    assert_equal(read(store, slots_of(1, 0, 2)), [part[:2] for part in before])
    assert_equal(read(store, slots_of(1, 2, 3)), new)
    # Values keep their groups; keys err by half a step of what they had become.
    last = tokens(1, seed=2)
    store.write(slots_of(1, 3, 4), *last)
    exact = [torch.cat(parts) for parts in zip([part[:2] for part in before], new, last, strict=True)]
    store.seal(ids(1))
    assert_equal(read(store, slots_of(1, 0, 4)), reference(exact[0], exact[1], kind))
    assert_equal([read(store, slots_of(1, 0, 2))[1]], [before[1][:2]])


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_tokens_again_after_a_rollback_lose_nothing(dtype: torch.dtype, kind: str) -> None:
    store = new_store(kind, dtype=dtype)
    store.write(slots_of(1, 0, 4), *tokens(4, dtype=dtype))
    store.seal(ids(1))
    before = read(store, slots_of(1, 0, 4))
    for _ in range(3):
        store.write(slots_of(1, 3, 4), *(part[3:] for part in before))
        store.seal(ids(1))
        assert_equal(read(store, slots_of(1, 0, 4)), before)


@pytest.mark.parametrize("kind", BITS)
def test_a_copy_of_a_sealed_block_diverges_from_it(kind: str) -> None:
    store = new_store(kind)
    store.write(slots_of(0, 0, 4), *tokens(4))
    store.write(slots_of(2, 0, 2), *tokens(2, seed=1))
    store.seal(ids(0))
    sealed, residual = read(store, slots_of(0, 0, 4)), tokens(2, seed=1)
    store.copy(ids(0, 2), ids(1, 3))
    store.write(slots_of(1, 3, 4), *tokens(1, seed=2))
    store.write(slots_of(3, 1, 2), *tokens(1, seed=3))
    assert_equal(read(store, slots_of(0, 0, 4)), sealed)
    assert_equal(read(store, slots_of(1, 0, 3)), [part[:3] for part in sealed])
    assert_equal(read(store, slots_of(2, 0, 2)), residual)
    assert_equal(read(store, slots_of(3, 0, 1)), [part[:1] for part in residual])


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("sealed", [False, True])
def test_a_block_used_again_shows_nothing_of_its_past(sealed: bool, kind: str) -> None:
    store = new_store(kind)
    store.write(slots_of(0, 0, 4), *(part * 1e4 for part in tokens(4)))
    if sealed:
        store.seal(ids(0))
    new = tokens(4, seed=1)
    store.write(slots_of(0, 0, 1), *(part[:1] for part in new))
    store.write(slots_of(0, 1, 4), *(part[1:] for part in new))
    assert_equal(read(store, slots_of(0, 0, 4)), new)
    store.seal(ids(0))
    assert_equal(read(store, slots_of(0, 0, 4)), reference(*new, kind))


@pytest.mark.parametrize("kind", BITS)
def test_a_nan_stays_in_its_block(kind: str) -> None:
    clean, store = new_store(kind), new_store(kind)
    keys, values = tokens(8)
    clean.write(torch.arange(8), keys, values)
    keys[1, 0, 3] = values[2, 1, 4] = math.nan
    store.write(torch.arange(8), keys, values)
    for each in (clean, store):
        each.seal(ids(0, 1))
    keys, values = read(store, torch.arange(8))
    expected_keys, expected_values = read(clean, torch.arange(8))
    assert keys[1, 0, 3].isnan()
    assert values[2, 1, 4].isnan()
    hurt_keys, hurt_values = torch.zeros_like(keys, dtype=torch.bool), torch.zeros_like(values, dtype=torch.bool)
    hurt_keys[:4, 0, 3] = hurt_values[2, 1] = True
    assert_equal((keys[~hurt_keys], values[~hurt_values]), (expected_keys[~hurt_keys], expected_values[~hurt_values]))


def test_the_residual_pool_holds_what_is_not_sealed() -> None:
    store = new_store("int4", num_blocks=32)
    empty = store.nbytes
    block = sum(part.nbytes for part in tokens(4))
    store.write(torch.arange(32 * 4), *tokens(32 * 4))
    assert store.nbytes == empty + 32 * block
    store.seal(torch.arange(30))
    assert store.nbytes <= empty + 5 * block
    tail = tokens(32 * 4)
    assert_equal(read(store, slots_of(30, 0, 8)), [part[-8:] for part in tail])
    store.release(ids(30, 31))
    assert store.nbytes <= empty + block


def test_a_sequence_in_decode_never_holds_more_than_its_last_block() -> None:
    store = new_store("int4", num_blocks=8)
    empty = store.nbytes
    for token in range(32):
        store.write(ids(token), *tokens(1, seed=token))
        if token % 4 == 3:
            store.seal(ids(token // 4))
        assert store.nbytes <= empty + sum(part.nbytes for part in tokens(4))


def test_what_inference_mode_wrote_can_be_written_outside_and_needs_no_gradient() -> None:
    with torch.inference_mode():
        unsealed, store = new_store("int4"), new_store("int4")
        unsealed.write(slots_of(1, 0, 2), *tokens(2))
        store.write(slots_of(1, 0, 2), *tokens(2))
        for block in (0, 2, 3):
            store.write(slots_of(block, 0, 4), *tokens(4))
        store.seal(ids(0, 2, 3))
    keys, values = (part.requires_grad_() for part in tokens(2))
    for each in (unsealed, store):
        each.write(slots_of(1, 2, 4), keys, values)
    store.write(slots_of(0, 2, 4), keys, values)
    store.copy(ids(0, 1), ids(2, 3))
    store.seal(ids(1))
    assert not any(part.requires_grad for part in read(store, torch.arange(16)))


def test_what_is_sealed_stays_when_it_is_sealed_again() -> None:
    store = new_store("int4")
    store.write(slots_of(0, 0, 8), *tokens(8))
    store.seal(ids(0))
    before = read(store, slots_of(0, 0, 8))
    store.seal(ids(0))
    assert_equal(read(store, slots_of(0, 0, 8)), before)


def test_unknown_kinds_name_the_known() -> None:
    with pytest.raises(InputError, match=r"unknown quantization 'int3': did you mean .*int4"):
        new_store("int3")


class Model:
    """Blocks as lists of tokens, next to the store: what each token reads as."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        self.kind, self.dtype, self.seed = kind, dtype, 0
        self.store = new_store(kind, num_blocks=4, block_size=3, dtype=dtype)
        self.blocks: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(4)]
        self.sealed = [False] * 4

    def write(self, block: int, start: int, count: int) -> None:
        """A sequence goes on after its first ``start`` tokens: 0 uses the block anew, fewer than it has is a rollback."""
        held = self.blocks[block]
        start = min(start, len(held))
        count = min(count, 3 - start)
        if count:
            self.seed += 1
            scale = 10.0 ** (self.seed % 5 - 2)
            keys, values = (part * scale for part in tokens(count, seed=self.seed, dtype=self.dtype))
            self.store.write(slots_of(block, start, start + count, 3), keys, values)
            self.blocks[block] = [*held[:start], *zip(keys, values, strict=True)]
            self.sealed[block] = False

    def seal(self, blocks: list[int]) -> None:
        blocks = [block for block in blocks if len(self.blocks[block]) == 3]
        self.store.seal(torch.tensor(blocks, dtype=torch.long))
        for block in blocks:
            if not self.sealed[block]:
                keys, values = (torch.stack(parts) for parts in zip(*self.blocks[block], strict=True))
                self.blocks[block] = list(zip(*reference(keys, values, self.kind), strict=True))
                self.sealed[block] = True

    def copy(self, source: int, targets: list[int]) -> None:
        targets = [target for target in targets if target != source]
        if self.blocks[source] and targets:
            self.store.copy(torch.full((len(targets),), source), torch.tensor(targets))
            for target in targets:
                self.blocks[target], self.sealed[target] = [*self.blocks[source]], self.sealed[source]

    def free(self, block: int, release: bool) -> None:
        self.blocks[block], self.sealed[block] = [], False
        if release:
            self.store.release(ids(block))

    def check(self) -> None:
        slots = [block * 3 + offset for block, held in enumerate(self.blocks) for offset in range(len(held))]
        if slots:
            expected = [
                torch.stack(parts) for parts in zip(*(token for held in self.blocks for token in held), strict=True)
            ]
            assert_equal(read(self.store, torch.tensor(slots)), expected)


BLOCK, SOME = st.integers(0, 3), st.lists(st.integers(0, 3), unique=True, min_size=1)
OPERATIONS = st.one_of(
    st.tuples(st.just("write"), BLOCK, st.integers(0, 3), st.integers(1, 3)),
    st.tuples(st.just("seal"), SOME),
    st.tuples(st.just("copy"), BLOCK, SOME),
    st.tuples(st.just("free"), BLOCK, st.booleans()),
)


@settings(max_examples=150)
@given(
    kind=st.sampled_from(list(BITS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    operations=st.lists(OPERATIONS, max_size=20),
)
def test_any_history_reads_as_a_plain_model_says(kind: str, dtype: torch.dtype, operations: list[tuple]) -> None:
    model = Model(kind, dtype)
    for name, *arguments in operations:
        getattr(model, name)(*arguments)
        model.check()


@pytest.mark.parametrize("kind", BITS)
def test_grows_with_what_it_holds(kind):
    store = new_store(kind, num_blocks=2)
    keys, values = tokens(6)
    store.write(slots_of(0, 0, 6), keys, values)
    store.seal(ids(0))
    before = read(store, slots_of(0, 0, 6))
    store.grow(5)
    assert_equal(read(store, slots_of(0, 0, 6)), before)
    more = tokens(4, seed=1)
    store.write(slots_of(4, 0, 4), *more)
    store.seal(ids(4))
    assert_equal(read(store, slots_of(4, 0, 4)), reference(*more, kind))
    assert_equal(read(store, slots_of(0, 0, 6)), before)
