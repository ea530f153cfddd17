import pytest
import torch

from decodekit.cache.storage import FullStore


def filled(blocks=5, size=3, dtype=None):
    keys, values = torch.randn(blocks * size, 2, 4), torch.randn(blocks * size, 2, 6)
    store = FullStore(blocks, size, keys[:1], values[:1], dtype)
    slots = torch.randperm(blocks * size)
    store.write(slots, keys[slots], values[slots])
    return store, keys, values


def test_reads_what_was_written():
    store, keys, values = filled()
    slots = torch.tensor([[0, 14, 7, 7], [3, 3, 1, 2]])
    found = store.read(slots)
    assert torch.equal(found[0], keys[slots])
    assert torch.equal(found[1], values[slots])
    assert torch.equal(store.keys, keys)
    assert torch.equal(store.values, values)


def test_copies_whole_blocks():
    store, keys, _ = filled()
    store.copy(torch.tensor([0, 3]), torch.tensor([4, 1]))
    assert torch.equal(store.keys[12:], keys[:3])
    assert torch.equal(store.keys[3:6], keys[9:12])
    assert torch.equal(store.keys[:3], keys[:3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keeps_another_dtype_and_gives_the_models(dtype):
    store, keys, _ = filled(dtype=dtype)
    found, _ = store.read(torch.arange(15)[None])
    assert found.dtype == torch.float32
    assert torch.equal(found[0], keys.to(dtype).float())
    assert store.nbytes == 15 * 2 * (4 + 6) * 2


def test_grows_with_what_it_holds():
    store, keys, values = filled()
    store.grow(4)  # it has five
    assert store.keys.shape[0] == 15
    store.grow(7)
    store.write(torch.tensor([20, 15]), keys[:2], values[:2])
    found = store.read(torch.tensor([[*range(15), 20, 15]]))
    assert torch.equal(found[0][0], torch.cat([keys, keys[:2]]))
    assert torch.equal(found[1][0], torch.cat([values, values[:2]]))
