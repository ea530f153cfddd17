"""A model with other decoder layers: a shallow copy that shares all weights, over a cache of its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from decodekit.core.compat import text_config
from decodekit.core.errors import Refused

_LINKS = {
    "is_heterogeneous": "have sizes of their own",
    "num_kv_shared_layers": "use the keys and values of others",
    "hidden_size_per_layer_input": "read embeddings of their own",
    "layers_to_share": "share weights",
    "hybrid_layer_ids": "share weights",
}
"""Config fields that tie layers to each other or to their number."""


def decoder_layers(model: Any) -> tuple[Any, str, nn.ModuleList]:
    """The decoder of a causal language model, and its layers with the name that it keeps them under.

    Raises:
        Refused: there is no one list of layers, or some depend on others.
    """
    config, decoder = text_config(model), model.get_decoder()
    for field, how in _LINKS.items():
        if getattr(config, field, None):
            raise Refused(f"layers of {type(model).__name__} {how} ({field}), so that none can be left out")
    found = [
        (name, child)
        for name, child in decoder.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers
    ]
    if len(found) != 1:
        raise Refused(
            f"{type(model).__name__} should keep its {config.num_hidden_layers} decoder layers in one list, found {len(found)}"
        )
    return decoder, *found[0]


def with_layers(model: Any, kept: Sequence[int]) -> Any:
    """The model with these of its layers only, in order; weights are shared, and the model itself stays as it is.

    Args:
        model: a causal language model.
        kept: which of its decoder layers, from 0.

    Raises:
        Refused: its layers depend on each other, or none of those that are kept counts tokens.
    """
    decoder, name, layers = decoder_layers(model)
    config, own = text_config(model), copy.deepcopy(model.config)
    recurrent = [kind == "linear_attention" for kind in getattr(config, "layer_types", None) or []]
    if any(recurrent) and not all(recurrent) and all(recurrent[layer] for layer in kept):
        raise Refused(
            f"layers {list(kept)} of {type(model).__name__} are all recurrent, and it needs one with attention to number "
            "positions; keep one"
        )
    shorter = own.get_text_config(decoder=True)
    for field, value in vars(config).items():
        # What a config lists by layer: layer_types, no_rope_layers, ...
        if isinstance(value, list) and len(value) == len(layers):
            setattr(shorter, field, [value[layer] for layer in kept])
    shorter.num_hidden_layers = len(kept)
    configs = {id(model.config): own, id(config): shorter}
    clones = nn.ModuleList(_clone(layers[layer], configs, place) for place, layer in enumerate(kept))
    return _replaced(model, {id(decoder): {name: clones}}, configs)


def _replaced(module: nn.Module, children: dict[int, dict[str, nn.Module]], configs: dict[int, Any]) -> Any:
    """A copy of a module, and of those on the way to one whose children are to be replaced."""
    clone = _shallow(module, configs)
    for name, child in module.named_children():
        if id(module) in children and name in children[id(module)]:
            clone._modules[name] = children[id(module)][name]
        elif any(id(inner) in children for inner in child.modules()):
            clone._modules[name] = _replaced(child, children, configs)
    return clone


def _clone(module: nn.Module, configs: dict[int, Any], place: int) -> nn.Module:
    """A copy of a decoder layer that uses the cache at another place."""
    clone = _shallow(module, configs)
    if "layer_idx" in vars(clone):
        clone.layer_idx = place
    for name, child in module.named_children():
        clone._modules[name] = _clone(child, configs, place)
    return clone


def _shallow(module: nn.Module, configs: dict[int, Any]) -> Any:
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    if (config := configs.get(id(vars(module).get("config")))) is not None:
        vars(clone)["config"] = config
    return clone
