import torch

from decodekit.kernels.kv_write import reference


def caches(slots, heads, width, value_width, dtype, device):
    """Keys and values as views of head-major storage, full of NaN, and that storage."""
    stored = [torch.full((heads, slots, size), torch.nan, dtype=dtype, device=device) for size in (width, value_width)]
    return [part.transpose(0, 1) for part in stored]


def test_writes_its_slots_and_no_other(device) -> None:
    from decodekit.kernels.kv_write import triton

    for heads, width, value_width, dtype in [
        (3, 5, 7, torch.bfloat16),
        (1, 64, 64, torch.float32),
        (9, 130, 16, torch.float16),
    ]:
        # A column of the slots of all rows, as in a step of one token: it does not adjoin.
        slots = torch.tensor([[40, 1], [3, 2], [0, 5], [17, 6]], device=device)[:, 0]
        # Numbers of every dtype: the interpreter rounds in its own way.
        keys, values = (torch.randint(-99, 99, (4, heads, size), device=device) / 8 for size in (width, value_width))
        written, expected = (caches(48, heads, width, value_width, dtype, device) for _ in range(2))
        triton.kv_write(*written, slots, keys.transpose(0, 1).contiguous().transpose(0, 1), values)
        reference.kv_write(*expected, slots, keys, values)
        for own, other in zip(written, expected, strict=True):
            torch.testing.assert_close(own, other, atol=0, rtol=0, equal_nan=True)
            assert own[slots].isfinite().all()


def test_no_tokens(device) -> None:
    from decodekit.kernels.kv_write import triton

    keys, values = caches(8, 2, 4, 4, torch.float32, device)
    none = torch.empty(0, 2, 4, device=device)
    triton.kv_write(keys, values, torch.empty(0, dtype=torch.int64, device=device), none, none)
    assert keys.isnan().all()
