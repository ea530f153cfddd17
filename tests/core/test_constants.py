import torch

from decodekit.core.constants import constant, holding

CPU = torch.device("cpu")


def test_constants_are_made_once_a_dtype() -> None:
    table = constant(((1, 2), (3, 4)), CPU, torch.int64)
    assert table.tolist() == [[1, 2], [3, 4]]
    assert constant(((1, 2), (3, 4)), CPU, torch.int64) is table
    assert constant((1, 2), CPU, torch.float32).dtype == torch.float32
    assert constant((1, 2), CPU, torch.float64).dtype == torch.float64


def test_whoever_holds_them_keeps_them_when_others_take_their_place() -> None:
    held: list[torch.Tensor] = []
    with holding(held):
        first = constant((7, 7, 7), CPU, torch.int64)
    for number in range(300):
        constant((number,), CPU, torch.int64)
    assert constant((7, 7, 7), CPU, torch.int64) is not first
    assert len(held) == 1
    assert held[0] is first
