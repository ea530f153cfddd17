import pytest
import torch

from decodekit.kernels.repetition_penalty import penalize_repeated

LOGITS = torch.tensor([[2.0, -2.0, 0.0, 1.0, -1.0], [-4.0, 4.0, 8.0, -torch.inf, 1.0]])
# An id that the logits do not reach, and columns behind the last token.
TOKENS = torch.tensor([[0, 0, 7, 1, 4, 4], [1, 3, 1, 2, 4, 4]])


@pytest.mark.parametrize(
    ("start", "stop", "penalty", "expected"),
    [
        (None, [4, 3], 2.0, [[1.0, -4.0, 0.0, 1.0, -1.0], [-4.0, 2.0, 8.0, -torch.inf, 1.0]]),
        ([3, 3], [4, 5], 2.0, [[2.0, -4.0, 0.0, 1.0, -1.0], [-4.0, 4.0, 4.0, -torch.inf, 0.5]]),
        (None, [2, 0], 0.5, [[4.0, -2.0, 0.0, 1.0, -1.0], [-4.0, 4.0, 8.0, -torch.inf, 1.0]]),
    ],
)
def test_tokens_that_occurred_are_penalized_once(device, start, stop, penalty, expected) -> None:
    from decodekit.kernels.repetition_penalty import triton

    given = [None if own is None else torch.tensor(own, device=device) for own in (start, stop)]
    logits, tokens = LOGITS.to(device), TOKENS.to(device)
    for op in (penalize_repeated, triton.penalize_repeated):
        assert op(logits, tokens, *given, penalty).tolist() == expected
    assert torch.equal(logits.cpu(), LOGITS)


def test_long_histories_and_strided_inputs(device) -> None:
    from decodekit.kernels.repetition_penalty import reference, triton

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 2, 100, generator=generator)[:, 0]
    tokens = torch.randint(0, 120, (3, 1300), generator=generator)[:, :1200]
    start, stop = torch.tensor([0, 500, 1100]), torch.tensor([20, 513, 1150])
    given = [tensor.to(device) for tensor in (logits, tokens, start, stop)]
    expected = reference.penalize_repeated(logits, tokens, start, stop, 1.3)
    torch.testing.assert_close(triton.penalize_repeated(*given, 1.3).cpu(), expected)
