import pytest
import torch

from decodekit.kernels.apply_bitmask import apply_bitmask


def test_a_clear_bit_excludes_its_token() -> None:
    logits = torch.zeros(2, 70)
    apply_bitmask(logits, torch.tensor([[-1, -1, -1], [0b101, 1 << 30, 1]], dtype=torch.int32))
    assert logits[0].isfinite().all()
    assert logits[1].isfinite().nonzero().flatten().tolist() == [0, 2, 62, 64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 33, 5000])
def test_kernel_equals_the_reference(device, dtype, vocab_size) -> None:
    from decodekit.kernels.apply_bitmask import triton

    logits = torch.randn(3, vocab_size).to(dtype)
    words = torch.randint(-(2**31), 2**31, (3, (vocab_size + 31) // 32), dtype=torch.int64).int()
    own = logits.to(device)
    triton.apply_bitmask(own, words.to(device))
    apply_bitmask(logits, words)
    assert torch.equal(own.cpu(), logits)
