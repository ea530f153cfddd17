"""A model's small operations as few kernels, for forwards of few rows on a GPU.

Between the matrix products of a layer transformers runs some thirty operations on a few kilobytes each; at the memory's speed
they would take nothing, one by one they take as long as the products. What is replaced computes the same, rounded at other
places.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from decodekit.core.shared import PerModel
from decodekit.core.swaps import Replacement, Swap, swapped
from decodekit.kernels import triton_runs
from decodekit.kernels.linear import MOST_ROWS, gated_linear, linear
from decodekit.kernels.rms_norm import rms_norm
from decodekit.kernels.rotary import rotary
from decodekit.runtime.agreement import CLOSE, close, waves
from decodekit.runtime.capture import fingerprint, hooked, is_hooked
from decodekit.runtime.fused_states import state_swaps

_HALVES = (torch.bfloat16, torch.float16)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_SILU = ("SiLU", "SiLUActivation")
_RESIDUAL_LAYERS = {
    f"transformers.models.{family.lower()}.modeling_{family.lower()}.{family}DecoderLayer"
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
}
"""Layers that add attention and feed-forward to their input, each after a norm, and do nothing else."""
_ROTATION = "apply_rotary_pos_emb"
_CLOSE_LAYERS = 5e-2  # of several, each from the last one's result
_PEAKS = (4.0, 64.0)
"""Largest numbers that an activation is tried with: some layers clamp them, and half precision holds the second's square."""


@contextmanager
def fused(model: Any) -> Iterator[None]:
    """A context in which forwards of few rows of a half-precision model on a GPU run fused kernels; elsewhere nothing changes.

    Norms and rotations run theirs for any number of rows, recurrences in single precision, too.

    Args:
        model: the model; a module whose forward was already replaced (hooks of accelerate, ...) is left alone.
    """
    if not triton_runs(model.device):
        yield
        return
    # Modules that were added or replaced since (adapters), and other hooks, make another plan.
    with swapped(_PLANS.of(model).swaps(model, fingerprint(model))):
        yield


class _Plans:
    """What is replaced in a model, as it is now."""

    def __init__(self) -> None:
        self._made: tuple[int, list[Swap]] | None = None

    def swaps(self, model: nn.Module, key: int) -> list[Swap]:
        made = self._made
        if made is None or made[0] != key:
            plan = _Plan()
            with torch.no_grad():
                plan.make(model)
            made = self._made = key, [*map(_forward_swap, plan.forwards.items()), *plan.functions]
        return made[1]


class _Plan:
    """What is replaced in a model: forwards and functions that gave the same numbers as its own."""

    def __init__(self) -> None:
        self._linears: set[nn.Module] = set()
        self.forwards: dict[nn.Module, Replacement] = {}
        self.functions: list[Swap] = []

    def make(self, model: nn.Module) -> None:
        devices = {own.device for own in model.parameters()}
        if len(devices) != 1 or not triton_runs(next(iter(devices))):
            return  # kernels run on the current device
        self._linears = set(filter(_is_plain, model.modules()))
        self.forwards |= {module: Replacement(_linear, module) for module in self._linears}
        norms: dict[type, float | None] = {}
        names: set[str] = set()
        for module in model.modules():
            children = dict(module.named_children())
            if type(module).__name__.endswith("RMSNorm"):
                self._norm(module, norms)
            elif all(children.get(name) in self._linears for name in _PROJECTIONS):
                together = _Together([children[name] for name in _PROJECTIONS])
                self.forwards |= together.forwards
                names.add(type(module).__module__)
            elif children.keys() == _GATED and type(children["act_fn"]).__name__ in _SILU:
                self._gate(module, children)
        for layer in model.modules():
            if f"{type(layer).__module__}.{type(layer).__qualname__}" in _RESIDUAL_LAYERS and not hooked(layer):
                self._residual(layer)
        self.functions = [swap for name in sorted(names) if (swap := _rotation(sys.modules[name])) is not None]
        self.functions += state_swaps(model, next(iter(devices)))

    def _norm(self, module: Any, known: dict[type, float | None]) -> None:
        eps, weight = getattr(module, "variance_epsilon", getattr(module, "eps", None)), getattr(module, "weight", None)
        if eps is None or not isinstance(weight, Tensor) or weight.dtype not in _HALVES:
            return
        if type(module) not in known:
            given = waves(4, len(weight), device=weight.device).to(weight.dtype)
            fits = [own for own in (0.0, 1.0) if _agree(module, Replacement(_norm, module, eps, own), [given])]
            known[type(module)] = fits[0] if fits else None
        if (offset := known[type(module)]) is not None:
            self.forwards[module] = Replacement(_norm, module, eps, offset)

    def _gate(self, module: nn.Module, children: Mapping[str, Any]) -> None:
        gate, up, down, activation = (children[name] for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))
        if not self._linears.issuperset({gate, up, down}) or is_hooked(activation):
            return
        if gate.bias is not None or up.bias is not None or gate.weight.shape != up.weight.shape:
            return
        given = waves(4, gate.in_features, device=gate.weight.device).to(gate.weight.dtype)
        largest = torch.stack([nn.functional.linear(given, own.weight).abs().max() for own in (gate, up)]).max()
        forward = Replacement(_feed_forward, module)
        if _agree(module, forward, [(given * (peak / largest)).to(given.dtype) for peak in _PEAKS]):
            self.forwards[module] = forward

    def _residual(self, layer: Any) -> None:
        ends = layer.self_attn.o_proj, layer.mlp.down_proj
        if not self._linears.issuperset(ends):
            return
        # One token a row: attention over itself alone is its value, whatever queries and keys round to.
        whole = waves(3, 1, ends[0].out_features, device=ends[0].weight.device).to(ends[0].weight.dtype)
        turn = whole.new_ones(3, 1, layer.self_attn.head_dim)
        options = {"attention_mask": None, "position_embeddings": (turn, torch.zeros_like(turn))}
        parts = [_forward_swap(own) for own in self.forwards.items() if own[0] in set(layer.modules())]
        forward = Replacement(_decode, layer, *ends)
        # What is added to a small input is most of the output.
        if _agree(layer, forward, [whole, whole / 64], parts, apart=_CLOSE_LAYERS, **options):
            self.forwards[layer] = forward


_PLANS: PerModel[_Plans] = PerModel(_Plans)
_ROTATIONS: dict[Any, Swap] = {}


def _forward_swap(own: tuple[nn.Module, Replacement]) -> Swap:
    return Swap(own[0], "forward", own[1])


def _rotation(module: Any) -> Swap | None:
    """The rotation of a module of Python, which all models of a family share."""
    original = getattr(module, _ROTATION, None)
    if original is None or module in _ROTATIONS:
        return _ROTATIONS.get(module)

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        fits = cos.shape[-1] == query.shape[-1] and cos.ndim == 3 and query.dtype in _HALVES
        if args or kwargs or not fits or not triton_runs(query.device):
            return original(query, key, cos, sin, *args, **kwargs)
        return rotary(query, key, cos, sin)

    query, key = (waves(2, heads, 3, 8) for heads in (4, 2))
    angle = 3 * waves(2, 3, 4)
    cos, sin = (torch.cat([part, part], dim=-1) for part in (angle.cos(), angle.sin()))
    try:
        pairs = zip(original(query, key, cos, sin), rotary(query, key, cos, sin), strict=True)
        same = all(close(*pair) for pair in pairs)
    except Exception:  # it takes other arguments
        same = False
    return _ROTATIONS.setdefault(module, Swap(module, _ROTATION, rotate, original)) if same else None


def _is_plain(module: nn.Module) -> bool:
    """Whether it is a linear layer with weights as the kernel reads them."""
    if type(module) is not nn.Linear or type(module.weight.data) is not Tensor or is_hooked(module):
        return False
    weight = module.weight
    return weight.dtype in _HALVES and triton_runs(weight.device) and weight.is_contiguous()


def _agree(
    module: nn.Module,
    forward: Replacement,
    inputs: Sequence[Tensor],
    parts: Sequence[Swap] = (),
    apart: float = CLOSE,
    **options: Any,
) -> bool:
    """Whether a module's own forward and another, with its parts replaced too, give the same numbers."""
    try:
        for given in inputs:
            expected = type(module).forward(module, given, **options)
            with swapped(parts):
                if not close(expected, forward(given, **options), apart):
                    return False
    except Exception:  # it takes other arguments
        return False
    return True


def _rows(hidden: Tensor) -> int:
    return hidden.shape[:-1].numel()


class _Passed(threading.local):
    """What forwards of one thread hand to the next ones.

    Attributes:
        residuals: a linear layer, what is added to its next result.
        together: linear layers, the rows that they were given and what they make of them.
    """

    def __init__(self) -> None:
        self.residuals: dict[nn.Module, Tensor] = {}
        self.together: tuple[_Together, Tensor, tuple[Tensor, ...]] | None = None


_PASSED = _Passed()


def _linear(layer: Any, hidden: Tensor) -> Tensor:
    residual = _PASSED.residuals.pop(layer, None)
    weight, bias = layer.weight, layer.bias
    if not 0 < (rows := _rows(hidden)) <= MOST_ROWS or hidden.dtype != weight.dtype:
        output = nn.functional.linear(hidden, weight, bias)
        return output if residual is None else residual + output
    added = None if residual is None else residual.reshape(rows, -1)
    output = linear(hidden.reshape(rows, -1), [weight], [bias], added)
    return output.view(*hidden.shape[:-1], -1)


class _Together:
    """Linear layers that are given the same rows one after the other: the first computes all."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self.forwards = {layer: Replacement(self._forward, place) for place, layer in enumerate(layers)}

    def _forward(self, place: int, hidden: Tensor) -> Tensor:
        own = self._layers[place]
        if (rows := _rows(hidden)) > MOST_ROWS or hidden.dtype != own.weight.dtype:
            return nn.functional.linear(hidden, own.weight, own.bias)
        passed = _PASSED.together
        if passed is None or passed[0] is not self or passed[1] is not hidden:
            weights, biases = [layer.weight for layer in self._layers], [layer.bias for layer in self._layers]
            whole = linear(hidden.reshape(rows, -1), weights, biases).view(*hidden.shape[:-1], -1)
            passed = self, hidden, whole.split([len(weight) for weight in weights], dim=-1)
        _PASSED.together = None if place == len(self._layers) - 1 else passed
        return passed[2][place]


def _norm(module: Any, eps: float, offset: float, hidden: Tensor) -> Tensor:
    return rms_norm(hidden, module.weight, eps, offset)


def _feed_forward(module: Any, hidden: Tensor) -> Tensor:
    gate, up = module.gate_proj.weight, module.up_proj.weight
    if (rows := _rows(hidden)) > MOST_ROWS:
        opened, passed = nn.functional.linear(hidden, gate), nn.functional.linear(hidden, up)
        result: Tensor = module.down_proj(nn.functional.silu(opened) * passed)
        return result
    result = module.down_proj(gated_linear(hidden.reshape(rows, -1), gate, up).view(*hidden.shape[:-1], -1))
    return result


def _decode(layer: Any, attention: nn.Module, feed_forward: nn.Module, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    normed = layer.input_layernorm(hidden_states)
    attended = _adding(hidden_states, attention, lambda: layer.self_attn(hidden_states=normed, **kwargs)[0])
    return _adding(attended, feed_forward, lambda: layer.mlp(layer.post_attention_layernorm(attended)))


def _adding(residual: Tensor, last: nn.Module, call: Callable[[], Tensor]) -> Tensor:
    """A call's result and the residual, which the linear layer that it ends with adds; another forward of that does not."""
    _PASSED.residuals[last] = residual
    try:
        output = call()
    finally:
        left = _PASSED.residuals.pop(last, None)
    return output if left is None else left + output
