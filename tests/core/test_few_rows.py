from pathlib import Path

import pytest
import torch
from torch import nn

from decodekit.core import few_rows as module
from decodekit.core.few_rows import few_rows


@pytest.fixture
def swapping(monkeypatch):
    """As on a CPU that is not Intel's."""
    monkeypatch.setattr(module, "swapping_pays", lambda: True)


def expected(layer: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(hidden, layer.weight, layer.bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1), (2, 1), (1, 3), (5, 1), (2, 3), (5,), (), (2, 0), (11,), (3, 7), (16,), (5, 9)], ids=str
)
@pytest.mark.usefixtures("swapping")
@torch.no_grad()
def test_a_layer_gives_the_same_numbers(bias, shape) -> None:
    generator = torch.Generator().manual_seed(0)
    layer, hidden = nn.Linear(7, 11, bias=bias), torch.randn(*shape, 7, generator=generator)
    with few_rows(layer):
        found = layer(hidden)
    torch.testing.assert_close(found, expected(layer, hidden))
    assert found.is_contiguous()


@pytest.mark.parametrize(
    ("threads", "rows", "swapped"),
    [(1, 0, 0), (1, 1, 1), (1, 2, 1), (1, 9, 1), (1, 10, 0), (2, 10, 1), (2, 33, 1), (2, 64, 1), (2, 65, 0)],
)
@pytest.mark.usefixtures("swapping")
@torch.no_grad()
def test_only_few_rows_are_swapped(monkeypatch, threads, rows, swapped) -> None:
    calls = []
    mm = torch.mm
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(module.torch, "mm", lambda *given: calls.append(given) or mm(*given))
    with few_rows(layer := nn.Linear(7, 11, bias=False)):
        layer(torch.randn(rows, 7))
    assert len(calls) == swapped


@pytest.mark.parametrize(
    ("cpu", "mkl", "pays"),
    [("GenuineIntel", True, False), ("AuthenticAMD", True, True), ("AuthenticAMD", False, False)],
)
def test_operands_are_swapped_by_mkl_on_cpus_of_other_makers(monkeypatch, cpu, mkl, pays) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"vendor_id\t: {cpu}")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    assert module.swapping_pays.__wrapped__() is pays


def test_nothing_is_replaced_where_it_does_not_pay(monkeypatch) -> None:
    monkeypatch.setattr(module, "swapping_pays", lambda: False)
    with few_rows(layer := nn.Linear(3, 3)):
        assert "forward" not in vars(layer)


@pytest.mark.usefixtures("swapping")
def test_layers_are_as_before_afterwards_and_others_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    hooked = nn.Linear(3, 3)
    hooked.forward = lambda hidden: hidden
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).double(), Own(3, 3), hooked])
    with few_rows(model):
        assert ["forward" in vars(layer) for layer in model] == [True, False, False, True]
    assert ["forward" in vars(layer) for layer in model] == [False, False, False, True]
