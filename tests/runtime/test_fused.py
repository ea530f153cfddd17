"""Fused layers compute what the model's own do; here by the ops' references."""

import copy

import pytest
import torch

from decodekit.runtime import fused as module
from decodekit.runtime.fused import fused
from decodekit.testing import tiny_model


@pytest.fixture
def fuses(monkeypatch):
    monkeypatch.setattr(module, "triton_runs", lambda device: True)


@pytest.mark.usefixtures("fuses")
@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_logits_are_those_of_the_model(family, rows) -> None:
    model = tiny_model(family, dtype=torch.bfloat16)
    exact = copy.deepcopy(model).double()
    ids = torch.arange(rows * 4).reshape(rows, 4) % 50
    with torch.no_grad():
        plain, expected = model(ids).logits.double(), exact(ids).logits
        with fused(model):
            replaced = [own for own in model.modules() if "forward" in vars(own)]
            logits = model(ids).logits.double()
    assert len(replaced) > 8
    assert not any("forward" in vars(own) for own in model.modules())
    usual = float((plain - expected).norm() / expected.norm())
    assert float((logits - expected).norm() / expected.norm()) < max(1e-2, 1.5 * usual)


@pytest.mark.usefixtures("fuses")
def test_adapters_hooks_and_single_precision_are_left_alone() -> None:
    model = tiny_model("dense", dtype=torch.bfloat16)
    called = []
    layer = model.model.layers[0].mlp.gate_proj
    handle = layer.register_forward_hook(lambda *arguments: called.append(1))
    with fused(model), torch.no_grad():
        model(torch.tensor([[1, 2]]))
        assert "forward" not in vars(layer)
    assert called
    handle.remove()
    model.model.layers[0].mlp.gate_proj = torch.nn.Sequential(layer, torch.nn.Identity())
    with fused(model), torch.no_grad():
        assert "forward" not in vars(model.model.layers[0].mlp)
    with fused(tiny_model("dense")) as nothing:
        assert nothing is None


def test_the_state_of_random_generators_is_the_callers(fuses) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    model = tiny_model("dense", dtype=torch.bfloat16)
    torch.manual_seed(5)
    with fused(model):
        assert torch.equal(torch.rand(1), expected)
