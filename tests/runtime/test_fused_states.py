"""Kernels of recurrences compute what transformers' functions do; here by the ops' references."""

import copy
import sys
from importlib.util import find_spec

import pytest
import torch
from transformers import DynamicCache
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from decodekit.cache.paged import PagedCache
from decodekit.runtime import fused as fused_module
from decodekit.runtime import fused_states as module
from decodekit.runtime.fused import fused
from tests.cache.families import family_model, forward

pytestmark = pytest.mark.skipif(find_spec("fla") is not None, reason="transformers runs fla then, which needs a GPU")

CONVOLUTION, DELTA = "causal_conv1d_update", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"]
MAMBA2 = ("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2")
FUNCTIONS = {
    "qwen3_5": [CONVOLUTION, *DELTA],
    "qwen3_next": [CONVOLUTION, *DELTA],
    "olmo_hybrid": [CONVOLUTION, *DELTA],
    **{name: [CONVOLUTION, "mamba_selective_state_update"] for name in ("mamba", "falcon_mamba", "jamba", "zamba")},
    **{name: [CONVOLUTION, "mamba2_selective_state_update"] for name in MAMBA2},
    "kimi_linear": [CONVOLUTION],
    "lfm2": [CONVOLUTION],
    "llama": [],
}
QUICK = ("qwen3_5", "zamba", "falcon_h1", "lfm2", "llama")
families = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FUNCTIONS]
OPS = {
    CONVOLUTION: "conv_step",
    DELTA[0]: "chunked_gated_delta",
    DELTA[1]: "gated_delta",
    "mamba_selective_state_update": "selective_state_step",
    "mamba2_selective_state_update": "selective_state_step",
}


@pytest.fixture
def fuses(monkeypatch):
    for own in (module, fused_module):
        monkeypatch.setattr(own, "triton_runs", lambda device: True)


@pytest.fixture
def calls(monkeypatch):
    """Names of the ops that are called."""
    called = set()

    def watched(name, op):
        def call(*arguments, **options):
            called.add(name)
            return op(*arguments, **options)

        return call

    for name in set(OPS.values()):
        monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    return called


def replaced(model):
    modules = {sys.modules[type(own).__module__] for own in model.modules()}
    return sorted(
        name for own in modules for name in OPS if getattr(vars(own).get(name), "__module__", "") == module.__name__
    )


def decoded(model, cache, ids):
    """Logits of a prompt and of steps of one token."""
    logits = [forward(model, ids[:, :70], cache)]
    logits += [forward(model, ids[:, at : at + 1], cache) for at in range(70, ids.shape[1])]
    return torch.cat(logits, 1)


@pytest.mark.usefixtures("fuses")
@pytest.mark.parametrize("name", families)
def test_logits_are_those_of_the_model(calls, name) -> None:
    model = family_model(name)
    ids = torch.randint(3, 97, (3, 75), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = decoded(model, DynamicCache(config=model.config), ids)
        with fused(model):
            assert replaced(model) == FUNCTIONS[name]
            calls.clear()
            found = decoded(model, DynamicCache(config=model.config), ids)
            assert calls == {OPS[own] for own in FUNCTIONS[name]}
            paged = decoded(model, PagedCache(model.config, num_blocks=96, block_size=4), ids)
    assert not replaced(model)
    for own in (found, paged):
        assert float((own - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.usefixtures("fuses")
@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_the_kernels_themselves_take_what_the_models_give(calls, monkeypatch, name) -> None:
    for op in ("gated_delta", "conv_step", "selective_state_step"):
        monkeypatch.setattr(f"decodekit.kernels.{op}.triton_runs", lambda device: True)
    model, ids = (
        copy.deepcopy(family_model(name)),
        torch.randint(3, 97, (2, 72), generator=torch.Generator().manual_seed(2)),
    )
    decoder = next(own for own in model.modules() if hasattr(own, "layers"))
    decoder.layers = decoder.layers[:1]  # one that recurs; the kernels are interpreted
    with torch.no_grad():
        expected = decoded(model, DynamicCache(config=model.config), ids)
        with fused(model):
            found = decoded(model, DynamicCache(config=model.config), ids)
    assert calls == {OPS[own] for own in FUNCTIONS[name]}
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.usefixtures("fuses")
@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_half_precision_is_as_exact_as_the_model(calls, name) -> None:
    model = copy.deepcopy(family_model(name))
    ids = torch.randint(3, 97, (2, 75), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = decoded(model, DynamicCache(config=model.config), ids)
        model.bfloat16()
        plain = decoded(model, DynamicCache(config=model.config), ids)
        with fused(model):
            found = decoded(model, DynamicCache(config=model.config), ids)
    assert calls == {OPS[own] for own in FUNCTIONS[name]}
    usual, own = (float((logits - exact).norm() / exact.norm()) for logits in (plain, found))
    assert own < max(1e-2, 1.5 * usual)


@pytest.mark.usefixtures("fuses")
def test_double_precision_stays_as_it_is() -> None:
    model = copy.deepcopy(family_model("mamba2")).double()
    ids = torch.arange(3, 78)[None]
    with torch.no_grad():
        expected = decoded(model, DynamicCache(config=model.config), ids)
        with fused(model):
            assert torch.equal(decoded(model, DynamicCache(config=model.config), ids), expected)


@pytest.mark.usefixtures("fuses")
def test_functions_that_compute_something_else_are_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(module, "_SWAPS", {})
    usual = (
        qwen.causal_conv1d_update,
        qwen.torch_recurrent_gated_delta_rule,
        modeling_mamba2.mamba2_selective_state_update,
    )

    def scaled(*arguments, **options):
        return 1.1 * usual[0](*arguments, **options)

    def unchanged(query, key, value, initial_state, **options):
        return usual[1](query, key, value, initial_state=initial_state, **options)[0], initial_state

    def more(*arguments, more, **options):
        return usual[2](*arguments, **options)

    monkeypatch.setattr(qwen, CONVOLUTION, scaled)
    monkeypatch.setattr(qwen, DELTA[1], unchanged)
    monkeypatch.setattr(modeling_mamba2, "mamba2_selective_state_update", more)
    with fused(model := family_model("qwen3_5")):
        assert replaced(model) == [DELTA[0]]
        assert qwen.causal_conv1d_update is scaled
    with fused(model := family_model("mamba2")):
        assert replaced(model) == [CONVOLUTION]


@pytest.mark.usefixtures("fuses")
def test_what_the_kernels_do_not_take_goes_to_the_function_itself(calls) -> None:
    given = {name: next(kind.tries(None)) for name, kind in module._kinds().items()}
    expanded = torch.zeros(1, 16, 4).expand(2, -1, -1)
    unlike = {
        CONVOLUTION: [
            {"activation": "gelu"},
            {"conv_state": expanded},
            {"conv_state": torch.zeros(2, 16, 5)},
            {"hidden_states": torch.zeros(2, 16, 1).double()},
        ],
        DELTA[0]: [{"cu_seqlens": torch.tensor([0, 2])}, {"value": given[DELTA[0]]["value"].double()}],
        DELTA[1]: [{"cu_seqlens": torch.tensor([0, 2])}, {"initial_state": None}, {"output_final_state": False}],
        "mamba_selective_state_update": [
            {"state_batch_indices": torch.arange(2)},
            {"state": torch.zeros(1, 8, 16).expand(2, -1, -1)},
        ],
    }
    for name, changes in unlike.items():
        for change in [{}, *changes]:
            received = []

            def original(*arguments, received=received, **options):
                received.append({**options, "all": arguments})
                return "original"

            calls.clear()
            result = module._kinds()[name].replace(original)(**{**given[name], **change})
            assert isinstance(result, str) == bool(change), (name, change)
            assert calls == ({OPS[name]} if not change else set())
            for key, value in change.items():
                passed = [*received[0]["all"], *received[0].values()]
                assert any(own is value for own in passed), key


@pytest.mark.usefixtures("fuses")
def test_arguments_in_the_order_of_the_function_itself(calls) -> None:
    usual = modeling_mamba2.mamba2_selective_state_update
    given = next(module._selection_tries(4, 8)(torch.device("cpu")))
    state, other = given["state"].clone(), given["state"].clone()
    rest = [given[name] for name in ("hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus")]
    assert torch.equal(module._selection(usual)(state, *rest), usual(other, *rest))
    assert torch.equal(state, other)
    assert not calls


def test_no_kernels_without_a_gpu(calls) -> None:
    model = family_model("mamba2")
    with torch.no_grad(), fused(model):
        assert not replaced(model)
        decoded(model, DynamicCache(config=model.config), torch.arange(3, 78)[None])
    assert not calls
