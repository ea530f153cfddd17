"""A model's small operations as few kernels, for forwards of few rows on a GPU.

Between the matrix products of a layer transformers runs some thirty operations on a few kilobytes each; at the memory's speed
they would take nothing, one by one they take as long as the products. What is replaced computes the same, rounded at other
places.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from decodekit.core.shared import PerModel
from decodekit.kernels import triton_runs
from decodekit.kernels.linear import MOST_ROWS, gated_linear, linear
from decodekit.kernels.rms_norm import rms_norm
from decodekit.kernels.rotary import rotary

_HALVES = (torch.bfloat16, torch.float16)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_SILU = ("SiLU", "SiLUActivation")
_RESIDUAL_LAYERS = {f"{family}DecoderLayer" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")}
"""Layers that add attention and feed-forward to their input, each after a norm, and do nothing else."""
_ROTATION = "apply_rotary_pos_emb"
_CLOSE = 2e-2  # of two computations in half precision


@contextmanager
def fused(model: Any) -> Iterator[None]:
    """A context in which forwards of few rows of a half-precision model on a GPU run fused kernels; elsewhere nothing changes.

    Args:
        model: the model; a module whose forward was already replaced (hooks of accelerate, ...) is left alone.
    """
    # Modules that were added or replaced since (adapters) make another plan.
    modules = [*model.modules()]
    hooks = sum(len(own._forward_hooks) + len(own._forward_pre_hooks) for own in modules)
    plan = _PLANS.of(model, (hash(tuple(map(id, modules))), model.dtype, model.device, hooks))
    if not plan.made:
        plan.make(model)
    replaced = [(module, forward) for module, forward in plan.forwards if "forward" not in vars(module)]
    usual = {module: getattr(module, _ROTATION) for module in plan.rotations}
    for module, forward in replaced:
        vars(module)["forward"] = forward
    for module, rotation in plan.rotations.items():
        setattr(module, _ROTATION, rotation)
    try:
        yield
    finally:
        for module, _ in replaced:
            vars(module).pop("forward", None)
        for module, rotation in usual.items():
            setattr(module, _ROTATION, rotation)


class _Plan:
    """What is replaced in a model."""

    def __init__(self) -> None:
        self.made = False
        self.forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        self.rotations: dict[Any, Callable[..., Any]] = {}

    def make(self, model: nn.Module) -> None:
        self.made = True
        devices = {own.device for own in model.parameters()}
        if len(devices) != 1 or not triton_runs(next(iter(devices))):
            return  # kernels run on the current device
        linears: dict[nn.Module, _Linear] = {}
        for module in model.modules():
            if _is_plain(module):
                linears[module] = _Linear(module)
        self.forwards += linears.items()
        norms: dict[type, float | None] = {}
        for module in model.modules():
            children = dict(module.named_children())
            if type(module).__name__.endswith("RMSNorm"):
                self._norm(module, norms)
            elif all(children.get(name) in linears for name in _PROJECTIONS):
                self._together([children[name] for name in _PROJECTIONS])
                self._rotation(type(module).__module__)
            elif children.keys() == _GATED and type(children["act_fn"]).__name__ in _SILU:
                self._gate(module, children, linears)
        for layer in model.modules():
            if type(layer).__name__ in _RESIDUAL_LAYERS:
                self._residual(layer, linears)

    def _norm(self, module: Any, known: dict[type, float | None]) -> None:
        eps, weight = getattr(module, "variance_epsilon", getattr(module, "eps", None)), getattr(module, "weight", None)
        if eps is None or not isinstance(weight, Tensor) or weight.dtype not in _HALVES:
            return
        if type(module) not in known:
            given = _waves(4, len(weight), device=weight.device).to(weight.dtype)
            fits = [offset for offset in (0.0, 1.0) if _close(module(given), rms_norm(given, weight, eps, offset))]
            known[type(module)] = fits[0] if fits else None
        if (offset := known[type(module)]) is not None:
            self.forwards.append((module, partial(_norm, module, eps, offset)))

    def _together(self, layers: Sequence[Any]) -> None:
        shared = _Together(layers)
        self.forwards = [own for own in self.forwards if own[0] not in layers]
        self.forwards += [(layer, partial(shared, place)) for place, layer in enumerate(layers)]

    def _rotation(self, name: str) -> None:
        module = sys.modules[name]
        original = getattr(module, _ROTATION, None)
        if original is None or module in self.rotations:
            return

        def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
            fits = cos.shape[-1] == query.shape[-1] and cos.ndim == 3 and query.dtype in _HALVES
            if args or kwargs or not fits or not triton_runs(query.device) or query.shape[2] > MOST_ROWS:
                return original(query, key, cos, sin, *args, **kwargs)
            return rotary(query, key, cos, sin)

        query, key = (_waves(2, heads, 3, 8) for heads in (4, 2))
        angle = 3 * _waves(2, 3, 4)
        cos, sin = (torch.cat([part, part], dim=-1) for part in (angle.cos(), angle.sin()))
        try:
            pairs = zip(original(query, key, cos, sin), rotary(query, key, cos, sin), strict=True)
            same = all(_close(*pair) for pair in pairs)
        except Exception:  # it takes other arguments
            same = False
        if same:
            self.rotations[module] = rotate

    def _gate(self, module: nn.Module, children: Mapping[str, Any], linears: Mapping[nn.Module, _Linear]) -> None:
        gate, up = children["gate_proj"], children["up_proj"]
        if any(own not in linears for own in (gate, up, children["down_proj"])):
            return
        if gate.bias is None and up.bias is None and gate.weight.shape == up.weight.shape:
            self.forwards.append((module, partial(_feed_forward, module)))

    def _residual(self, layer: Any, linears: Mapping[nn.Module, _Linear]) -> None:
        attention, feed_forward = (linears.get(own) for own in (layer.self_attn.o_proj, layer.mlp.down_proj))
        if attention is not None and feed_forward is not None:
            self.forwards.append((layer, partial(_decode, layer, attention, feed_forward)))


_PLANS: PerModel[_Plan] = PerModel(_Plan)


def _is_plain(module: nn.Module) -> bool:
    """Whether it is a linear layer with weights as the kernel reads them."""
    if type(module) is not nn.Linear or type(module.weight.data) is not Tensor:
        return False
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return False
    weight = module.weight
    return weight.dtype in _HALVES and triton_runs(weight.device) and weight.is_contiguous()


def _close(left: Tensor, right: Tensor) -> bool:
    return bool((left.float() - right.float()).norm() <= _CLOSE * left.float().norm())


def _waves(*shape: int, device: torch.device | None = None) -> Tensor:
    """Numbers of all kinds without a random generator, whose state is the caller's."""
    count = torch.Size(shape).numel()
    return torch.arange(count, device=device).mul(0.7).sin().mul(2).reshape(shape)


def _rows(hidden: Tensor) -> int:
    return hidden.shape[:-1].numel()


class _Linear:
    """The forward of a linear layer; ``residual`` is added to the next one's result."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.residual: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        residual, self.residual = self.residual, None
        weight, bias = self._layer.weight, self._layer.bias
        if (rows := _rows(hidden)) > MOST_ROWS or hidden.dtype != weight.dtype:
            output = nn.functional.linear(hidden, weight, bias)
            return output if residual is None else residual + output
        added = None if residual is None else residual.reshape(rows, -1)
        output = linear(hidden.reshape(rows, -1), [weight], [bias], added)
        return output.view(*hidden.shape[:-1], -1)


class _Together:
    """The forwards of linear layers that are given the same rows one after the other: the first computes all."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._given: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def __call__(self, place: int, hidden: Tensor) -> Tensor:
        own = self._layers[place]
        if (rows := _rows(hidden)) > MOST_ROWS or hidden.dtype != own.weight.dtype:
            return nn.functional.linear(hidden, own.weight, own.bias)
        if hidden is not self._given:
            weights, biases = [own.weight for own in self._layers], [own.bias for own in self._layers]
            whole = linear(hidden.reshape(rows, -1), weights, biases).view(*hidden.shape[:-1], -1)
            self._given, self._parts = hidden, whole.split([len(weight) for weight in weights], dim=-1)
        part = self._parts[place]
        if place == len(self._layers) - 1:
            self._given, self._parts = None, ()
        return part


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


def _decode(layer: Any, attention: _Linear, feed_forward: _Linear, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    attention.residual = hidden_states
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
    feed_forward.residual = attended
    output: Tensor = layer.mlp(layer.post_attention_layernorm(attended))
    return output
