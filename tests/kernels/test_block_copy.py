import pytest
import torch

from decodekit.kernels.block_copy import block_copy


@pytest.mark.parametrize(("block_size", "width"), [(3, 5), (16, 160), (1, 8)])
def test_kernel_equals_the_reference(device, block_size, width) -> None:
    from decodekit.kernels.block_copy import triton

    cache = torch.randn(3, 8 * block_size, width, device=device)
    source, target = torch.tensor([[0, 7], [2, 1], [2, 3]]).unbind(1)
    expected = cache.cpu().clone()
    block_copy(expected, source, target, block_size=block_size)
    assert torch.equal(expected[:, 7 * block_size :], cache.cpu()[:, :block_size])
    triton.block_copy(cache, source, target, block_size=block_size)
    assert torch.equal(cache.cpu(), expected)


def test_nothing_to_copy(device) -> None:
    from decodekit.kernels.block_copy import triton

    cache = torch.randn(1, 4, 2, device=device)
    before, none = cache.clone(), torch.empty(0, dtype=torch.int64)
    triton.block_copy(cache, none, none, block_size=2)
    assert torch.equal(cache, before)
