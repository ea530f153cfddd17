"""Fused layers compute what the model's own do; here by the ops' references."""

import copy
from threading import Barrier, Thread

import pytest
import torch
from transformers import FalconH1Config, FalconH1ForCausalLM
from transformers.models.llama import modeling_llama as llama

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


def replaced_in(model):
    with fused(model):
        return {name for name, own in model.named_modules() if "forward" in vars(own)}


class FeedForward(torch.nn.Module):
    """As many families have it, or with something more."""

    def __init__(self, more):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(32, 64, bias=False) for _ in range(2))
        self.down_proj, self.act_fn, self.more = torch.nn.Linear(64, 32, bias=False), torch.nn.SiLU(), more

    def forward(self, hidden):
        gate, up = self.more(self.gate_proj(hidden)), self.more(self.up_proj(hidden))
        return self.down_proj(self.act_fn(gate) * up)


@pytest.mark.usefixtures("fuses")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_feed_forward_that_does_more_is_left_alone(dtype) -> None:
    kinds = {
        "plain": lambda own: own,
        "scaled": lambda own: 1.1 * own,
        "clamped": lambda own: own.clamp(max=16.0),
        "loosely": lambda own: own.clamp(min=-50.0, max=50.0),
        "asked for more": lambda own, more: own,
    }
    for name, more in kinds.items():
        model = tiny_model("dense", layers=1).to(dtype)
        model.model.layers[0].mlp = FeedForward(more).to(dtype)
        assert ("model.layers.0.mlp" in replaced_in(model)) == (name == "plain"), name


@pytest.mark.usefixtures("fuses")
def test_falcon_h1_multiplies_within_its_feed_forward() -> None:
    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5}
    mamba = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
    config = FalconH1Config(**shape, **heads, **mamba, mlp_multipliers=[0.7, 1.6])
    torch.manual_seed(0)
    model = FalconH1ForCausalLM(config).to(torch.bfloat16).eval()
    exact, ids = copy.deepcopy(model).double(), torch.arange(6).reshape(2, 3)
    assert "model.layers.0.feed_forward" not in replaced_in(model)
    assert "model.layers.0.feed_forward.down_proj" in replaced_in(model)
    with torch.no_grad(), fused(model):
        logits, expected = model(ids, use_cache=False).logits.double(), exact(ids, use_cache=False).logits
    assert float((logits - expected).norm() / expected.norm()) < 3e-2


@pytest.mark.usefixtures("fuses")
def test_layers_are_known_by_what_they_compute(monkeypatch) -> None:
    layers = {f"model.layers.{number}" for number in range(4)}
    assert layers <= replaced_in(tiny_model("dense", dtype=torch.bfloat16))

    class LlamaDecoderLayer(llama.LlamaDecoderLayer):
        """Of the same name, from elsewhere."""

    model = tiny_model("dense", dtype=torch.bfloat16)
    model.model.layers[2].__class__ = LlamaDecoderLayer
    assert layers & replaced_in(model) == layers - {"model.layers.2"}

    def scaled(self, hidden, *, attention_mask=None, position_embeddings=None, **options):
        given = {"attention_mask": attention_mask, "position_embeddings": position_embeddings, **options}
        hidden = hidden + 0.8 * self.self_attn(hidden_states=self.input_layernorm(hidden), **given)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    monkeypatch.setattr(llama.LlamaDecoderLayer, "forward", scaled)
    assert not layers & replaced_in(tiny_model("dense", dtype=torch.bfloat16))


@pytest.mark.usefixtures("fuses")
def test_another_hook_makes_another_plan() -> None:
    model, called = tiny_model("dense", dtype=torch.bfloat16), []
    projection, activation = model.model.layers[0].mlp.up_proj, model.model.layers[1].mlp.act_fn
    for watched in (projection, activation, projection):
        handle = watched.register_forward_hook(lambda own, *given: called.append(own))
        with fused(model), torch.no_grad():
            assert not called  # what is tried, nobody sees
            model(torch.tensor([[1, 2]]))
        assert called.pop() is watched
        assert not called
        handle.remove()


@pytest.mark.usefixtures("fuses")
def test_threads_do_not_hand_each_other_what_is_added(monkeypatch) -> None:
    model = tiny_model("dense", dtype=torch.bfloat16)
    inputs = [torch.tensor([[1, 2, 3]]), torch.tensor([[40, 50, 60]])]
    with fused(model), torch.no_grad():
        expected = [model(ids).logits for ids in inputs]
    barrier, norm, found = Barrier(2), module.rms_norm, [None, None]

    def in_turn(*given):
        barrier.wait(20)  # both have said what is to be added
        return norm(*given)

    def forward(number):
        with fused(model), torch.no_grad():
            found[number] = model(inputs[number]).logits

    monkeypatch.setattr(module, "rms_norm", in_turn)
    threads = [Thread(target=forward, args=(number,)) for number in range(2)]
    for own in threads:
        own.start()
    for own in threads:
        own.join()
    assert all(map(torch.equal, found, expected))
    assert not any("forward" in vars(own) for own in model.modules())


@pytest.mark.usefixtures("fuses")
def test_a_call_that_ends_first_leaves_the_other_what_it_uses() -> None:
    model, usual = tiny_model("dense", dtype=torch.bfloat16), llama.apply_rotary_pos_emb
    ids = torch.tensor([[1, 2]])
    whole = replaced_in(model)
    first, second = fused(model), fused(model)
    with torch.no_grad():
        plain = model(ids).logits
        first.__enter__()
        expected = model(ids).logits
        second.__enter__()
        first.__exit__(None, None, None)
        assert {name for name, own in model.named_modules() if "forward" in vars(own)} == whole
        assert torch.equal(model(ids).logits, expected)
        # A layer that adds nothing itself: its residual is added all the same.
        for layer in model.model.layers:
            del layer.self_attn.o_proj.forward, layer.mlp.down_proj.forward
        torch.testing.assert_close(model(ids).logits, plain, rtol=0.05, atol=0.05 * float(plain.abs().max()))
        second.__exit__(None, None, None)
    assert not any("forward" in vars(own) for own in model.modules())
    assert llama.apply_rotary_pos_emb is usual
