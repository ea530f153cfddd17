import pytest
import torch

from decodekit.kernels.top_token import top_token


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 5), (3, 2048), (2, 5000)])
def test_is_the_first_of_the_largest(device, rows, vocab_size) -> None:
    from decodekit.kernels.top_token import triton

    torch.manual_seed(vocab_size)
    # Whole numbers, so that several are the largest.
    logits = torch.randn(rows, vocab_size, device=device).mul(2).round()
    for op in (top_token, triton.top_token):
        top, tokens = op(logits)
        assert torch.equal(top, logits.amax(-1))
        assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_nan_and_infinity_show(device) -> None:
    from decodekit.kernels.top_token import triton

    logits = torch.full((3, 40), -torch.inf, device=device)
    logits[1, 7], logits[2, 9], logits[2, 3] = torch.nan, torch.inf, 5.0
    for op in (top_token, triton.top_token):
        top, tokens = op(logits)
        assert torch.equal(torch.isfinite(top).cpu(), torch.tensor([False] * 3))
        assert tokens[2] == 9
        assert int(tokens[0]) < 40
