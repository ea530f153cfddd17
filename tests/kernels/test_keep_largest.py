import math

import pytest
import torch

from decodekit.kernels.keep_largest import keep_largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("positions", "vocab_size"), [(1, 1), (1, 7), (3, 97), (5, 1023)])
@pytest.mark.parametrize("distinct", [1, 3, 10000])
def test_equals_a_stable_sort(dtype: torch.dtype, positions: int, vocab_size: int, distinct: int) -> None:
    torch.manual_seed(0)
    logits = torch.randint(0, distinct, (positions, vocab_size)).to(dtype)
    order = logits.sort(descending=True, stable=True).indices
    counts = torch.randint(1, vocab_size + 1, (positions, 1))
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, torch.arange(vocab_size) < counts)
    expected = logits.masked_fill(~kept, -math.inf)
    for size in (min(int(counts.max()) + 1, vocab_size), vocab_size):
        result = keep_largest(logits, counts, logits.topk(size).values)
        assert result.dtype == dtype
        assert torch.equal(result, expected)


def test_nan_stays_visible_and_in_its_row() -> None:
    logits = torch.tensor([[1.0, math.nan, 3.0, 2.0], [1.0, 4.0, 3.0, 2.0]])
    result = keep_largest(logits, torch.tensor([[2], [2]]), logits.topk(3).values)
    assert result[0].isnan().tolist() == [False, True, False, False]
    assert result[1].tolist() == [-math.inf, 4.0, 3.0, -math.inf]
