"""Rules that say so can be held by a CUDA graph: they give the same numbers without ever asking the device for one."""

import inspect
from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch
from torch.overrides import TorchFunctionMode

from decodekit import rules
from decodekit.core.protocols import Rule
from decodekit.testing import make_rows

RULES = [
    {"kind": "bad_words", "ids": [[4], [5, 6], [7, 8]]},
    {"kind": "dry", "sequence_breakers": [], "breaker_ids": [*range(40, 70)]},
    {"kind": "epsilon", "epsilon": 0.01},
    {"kind": "eta", "epsilon": 0.01},
    {"kind": "forced_tokens", "ids": {2: 5}},
    {"kind": "frequency_penalty", "penalty": 0.5},
    {"kind": "logit_bias", "bias": {3: 1.5}},
    {"kind": "min_length", "n": 4},
    {"kind": "min_p", "p": 0.1},
    {"kind": "no_repeat_ngram", "n": 2},
    {"kind": "presence_penalty", "penalty": 0.5},
    {"kind": "repetition_penalty", "penalty": 1.3},
    {"kind": "temperature", "t": 0.7},
    {"kind": "top_h", "h": 0.5},
    {"kind": "top_h", "h": 0.5, "mode": "compat"},
    {"kind": "top_k", "k": 7},
    {"kind": "top_p", "p": 0.8},
    {"kind": "typical", "p": 0.8},
]
OTHERS = {"mirostat", "watermark", "xtc"}
WAITS = {"item", "tolist", "numpy", "cpu", "nonzero", "unique", "isin", "masked_select", "tensor"}
WAITS |= {"__bool__", "__int__", "__float__", "__index__"}


class OnAGpu(TorchFunctionMode):
    """Tensors say that they lie on a GPU, and what would make the host wait for it is an error."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cuda.__get__:
            return True
        assert getattr(func, "__name__", "") not in WAITS, func
        return func(*args, **(kwargs or {}))


def classes():
    modules = [import_module(f"{rules.__name__}.{found.name}") for found in iter_modules(rules.__path__)]
    own = [value for module in modules for value in vars(module).values() if inspect.isclass(value)]
    return {cls.model_fields["kind"].default: cls for cls in own if issubclass(cls, Rule) and cls is not Rule}


def test_every_rule_is_one_or_the_other() -> None:
    known = classes()
    assert {kind for kind, cls in known.items() if not cls.capturable} == OTHERS
    assert {own["kind"] for own in RULES} | OTHERS == known.keys()


@pytest.mark.parametrize("options", RULES, ids=lambda own: own["kind"])
def test_nothing_waits_for_the_device(options) -> None:
    rule = classes()[options["kind"]](**options)
    histories = [[5, 6, 7, 5, 6], [1, 2, 1, 2, 1, 2, 1], [9, 50, 9]]
    rows = make_rows(histories, [3, 5, 1], eos=(1,))
    logits = torch.randn(3, 97).mul(4)
    expected = rule(rows, logits)
    with OnAGpu():
        found = rule(rows, logits)
    assert torch.equal(found, expected)
    assert options["kind"] in ("min_length", "forced_tokens") or not torch.equal(expected, logits)


def test_the_mode_notices_a_wait() -> None:
    with OnAGpu(), pytest.raises(AssertionError, match="item"):
        torch.zeros(1).item()
    with OnAGpu(), pytest.raises(AssertionError, match="bool"):
        bool(torch.zeros(1))


def test_a_rule_of_somebody_else_is_not_captured_unless_it_says_so() -> None:
    assert not Rule.capturable
