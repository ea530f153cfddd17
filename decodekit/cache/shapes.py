"""What each layer of a model keeps in its cache for one row, read from the model's config alone.

Sizes are those of what transformers 5.24 holds after a forward. MLA (DeepSeek-V2, arXiv:2405.04434) is stored there as
latents and expanded at every step; with DeepSeek's sparse attention, transformers 5.17 still stores it expanded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import CONFIG_MAPPING

from decodekit.core.errors import InputError

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "attention_head_dim"),
}
"""Names under which configs keep one number; the first that is there counts."""

_LEGACY_LAYER_TYPES = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "moe": "feed_forward",
    "mlp": "feed_forward",
}
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_ATTENTION = {"full_attention", "indexed_attention", "hybrid", *_WINDOWS}
_RECURRENT = {"linear_attention", "hybrid"}
_LAYER_TYPES = _ATTENTION | _RECURRENT | {"conv"}

_IRREGULAR = {
    "cpmant": "puts 32 tokens of its own before every prompt",
    "dory": "runs layers more than once",
    "dots3_note_text": "has sliding layers with latents of another size",
    "mimo_v2_flash": "has sliding layers with twice the K/V heads",
    "mistral_large4": "shares indexers between layers",
    "mllama_text_model": "keeps K/V of images",
}
"""Model types whose caches differ from what the usual fields say."""

# Mamba-2 and its kin under each family's names: heads, head width, state size, groups, convolution columns.
_MAMBA2 = (
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),  # Bamba, Falcon-H1, Granite 4
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),  # Nemotron-H
    ("n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv"),  # Zamba2
    ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"),  # Mamba-2
)


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps for one row, in elements.

    Attributes:
        kind: the layer's type as transformers names it; ``latent_attention`` where K/V are MLA's latents, ``shared_kv``
            where another layer's K/V are used, ``feed_forward`` where nothing is kept.
        heads: K/V heads; 1 for latents.
        key_dim: width of a head's key, or of the latent.
        value_dim: width of a head's value, or of the rotary key that lies beside the latent.
        index_dim: width of the indexer's key a token (DeepSeek sparse attention).
        kept: tokens that stay when there are more; ``None`` keeps all.
        state: of the recurrent state.
        conv: of the convolution's last columns.
    """

    kind: str
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    index_dim: int = 0
    kept: int | None = None
    state: int = 0
    conv: int = 0


def layer_shapes(config: Any) -> list[LayerShape]:
    """What each layer keeps, in the model's order.

    Args:
        config: what ``read_config`` gives.

    Raises:
        InputError: the architecture is not one whose cache is known; says what was looked for.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{_named(config)} is an encoder-decoder: give a causal (decoder-only) model's")
    if (reason := _IRREGULAR.get(getattr(config, "model_type", ""))) is not None:
        raise InputError(f"{_named(config)} {reason}: the size of its cache cannot be told from its config")
    if _get(config, "rescale_every") is not None:
        return [_rwkv(config)] * _need(config, "layers")
    types = _layer_types(config)
    # Head sizes may differ between layers (Gemma 4): newer configs give each layer a view of its own.
    views = getattr(config, "per_layer_config", None) or [config] * len(types)
    shapes = [_shape(view, kind) for view, kind in zip(views, types, strict=True)]
    # A layer that reuses the indexer of an earlier one keeps no indexer keys.
    indexers = _get(config, "indexer_types") or [None] * len(types)
    return [
        replace(shape, index_dim=0) if indexer == "shared" else shape
        for shape, indexer in zip(shapes, indexers, strict=True)
    ]


def read_config(config: Any) -> Any:
    """A decoder's config, from a transformers config, a dict, or the path of a ``config.json`` or its folder.

    A dict without a ``model_type`` that transformers knows is taken as it is, without any defaults.

    Raises:
        InputError: there is no such file, it is no config, or a model was given.
    """
    if isinstance(config, (str, PathLike)):
        config = _from_file(Path(config).expanduser())
    if isinstance(config, Mapping):
        config = _from_dict(config)
    elif not hasattr(config, "get_text_config"):
        raise InputError(
            f"{type(config).__name__} is no config: give a transformers config (a model's is model.config), a dict, "
            "or the path of a config.json"
        )
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _from_file(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"config {str(file)!r} cannot be read ({error.strerror}): give a config.json or its folder; "
            "for a Hub id give plan -m ID, or in Python AutoConfig.from_pretrained(id)"
        ) from error
    except ValueError as error:
        raise InputError(f"config {str(file)!r} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"config {str(file)!r} holds a {type(config).__name__}, not the mapping of a config.json")
    return config


def _from_dict(fields: Mapping[str, Any]) -> Any:
    if (model_type := fields.get("model_type")) in CONFIG_MAPPING:
        try:
            return CONFIG_MAPPING[model_type].from_dict(dict(fields))
        except Exception as error:  # strict configs raise classes of their own
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise InputError(f"config of a {model_type!r} is not valid: {' '.join(lines[:2])}") from error
    return _from_dict(fields["text_config"]) if "text_config" in fields else SimpleNamespace(**fields)


def _layer_types(config: Any) -> list[str]:
    types = _get(config, "layer_types", "layers_block_type")
    if types is None:
        layers = _need(config, "layers")
        if (interval := _get(config, "full_attention_interval")) is not None:
            types = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
        elif _get(config, "sliding_window") is not None and _get(config, "use_sliding_window") is not False:
            types = ["sliding_attention"] * layers
        elif _get(config, "attention_chunk_size") is not None:
            types = ["chunked_attention"] * layers
        else:
            types = ["full_attention"] * layers
    if "recurrent" in types:  # RecurrentGemma in transformers 5.17; its attention is local
        types = ["linear_attention" if kind == "recurrent" else "sliding_attention" for kind in types]
    types = [_LEGACY_LAYER_TYPES.get(kind, kind) for kind in types]
    shared = len(types) - (_get(config, "num_kv_shared_layers") or 0)
    return [kind if i < shared else "shared_kv" for i, kind in enumerate(types)]


def _shape(config: Any, kind: str) -> LayerShape:
    if kind in ("shared_kv", "feed_forward"):
        return LayerShape(kind)
    if kind == "conv":
        # LFM2's gated short convolution: no state but its last columns.
        return LayerShape(kind, conv=_need(config, "hidden") * _need(config, "conv_L_cache"))
    if kind not in _LAYER_TYPES:
        raise InputError(
            f"{_named(config)} has layers of type {kind!r}, whose cache is not known "
            f"(known: {', '.join(sorted(_LAYER_TYPES))})"
        )
    state, conv = _recurrent(config) if kind in _RECURRENT else (0, 0)
    if kind not in _ATTENTION:
        return LayerShape(kind, state=state, conv=conv)
    # transformers drops what the next token cannot see: with it, a window is full.
    kept = _need(config, _WINDOWS[kind]) - 1 if kind in _WINDOWS else None
    if kind == "indexed_attention" or _get(config, "kv_lora_rank") is not None:
        latent, rotary = _need(config, "kv_lora_rank"), _need(config, "qk_rope_head_dim")
        index = _need(config, "index_head_dim") if kind == "indexed_attention" else 0
        kind = "latent_attention" if kind == "full_attention" else kind
        return LayerShape(kind, 1, latent, rotary, index, kept, state, conv)
    heads, width = _kv_heads(config), _head_dim(config)
    return LayerShape(kind, heads, width, _get(config, "v_head_dim") or width, 0, kept, state, conv)


def _kv_heads(config: Any) -> int:
    # Falcon and GPTBigCode: one K/V head for all, whatever the other fields say; later Falcons are grouped.
    if _get(config, "multi_query") and not _get(config, "new_decoder_architecture"):
        return 1
    return _get(config, *_NAMES["kv_heads"]) or _need(config, "heads")


def _head_dim(config: Any) -> int:
    return _get(config, *_NAMES["head_dim"]) or _need(config, "hidden") // _need(config, "heads")


def _recurrent(config: Any) -> tuple[int, int]:
    """Elements of a recurrent layer's state and of its convolution."""
    if _get(config, "linear_num_value_heads") is not None:
        return _gated_delta(config)
    if (heads := _get(config, "linear_num_heads")) is not None:  # Kimi Delta Attention (Kimi-Linear)
        width = _need(config, "linear_head_dim")
        return heads * width**2, 3 * heads * width * _columns(config, "linear_conv_kernel_dim")
    if (width := _get(config, "lru_width")) is not None:  # RG-LRU (RecurrentGemma), which stores a column less
        return width, width * (_need(config, "conv1d_width") - 1)
    if _get(config, "linear_attn_alpha_factor") is not None:  # Lightning attention (MiniMax)
        return _need(config, "heads") * _head_dim(config) ** 2, 0
    for names in _MAMBA2:
        sizes = [_get(config, name) for name in names[:4]]
        if all(isinstance(size, int) for size in sizes):
            heads, width, state, groups = sizes
            return heads * width * state, (heads * width + 2 * groups * state) * _columns(config, names[4])
    if (state := _get(config, "mamba_d_state")) is not None:  # Mamba inside Jamba and Zamba
        inner = _need(config, "mamba_expand") * _need(config, "hidden")
        return inner * state, inner * _columns(config, "mamba_d_conv")
    if (state := _get(config, "state_size")) is not None:  # Mamba, FalconMamba
        inner = _need(config, "intermediate_size")
        return inner * state, inner * _columns(config, "conv_kernel")
    known = ["linear_num_value_heads", "linear_num_heads", "lru_width", *(names[0] for names in _MAMBA2)]
    raise InputError(
        f"{_named(config)} has recurrent layers, but nothing gives the size of their state "
        f"(looked for {', '.join([*known, 'mamba_d_state', 'state_size'])})"
    )


def _gated_delta(config: Any) -> tuple[int, int]:
    """Gated DeltaNet (Yang et al., 2024, arXiv:2412.06464): Qwen3-Next, Qwen3.5, OLMo-Hybrid."""
    heads, key_dim = _need(config, "linear_num_value_heads"), _need(config, "linear_key_head_dim")
    value_dim, columns = _need(config, "linear_value_head_dim"), _columns(config, "linear_conv_kernel_dim")
    if not columns:
        return heads * key_dim * value_dim, 0
    channels = 2 * _need(config, "linear_num_key_heads") * key_dim + heads * value_dim
    return heads * key_dim * value_dim, channels * columns


def _rwkv(config: Any) -> LayerShape:
    """RWKV-4 (Peng et al., 2023, arXiv:2305.13048): numerator, denominator, maximum; two shifted tokens."""
    width = _need(config, "hidden")
    return LayerShape("linear_attention", state=3 * width, conv=2 * width)


def _columns(config: Any, name: str) -> int:
    """Columns of a convolution: as many as its kernel is wide, though the next step reads one less; 0 if not given."""
    return _get(config, name) or 0


def _get(config: Any, *names: str) -> Any:
    """The first of the fields that is there."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _need(config: Any, name: str) -> int:
    """A field, or the number that ``_NAMES`` knows under several names."""
    names = _NAMES.get(name, (name,))
    value = _get(config, *names)
    if not isinstance(value, int):
        found = "" if value is None else f", found {value!r}"
        raise InputError(
            f"{_named(config)} does not say how large its cache is: looked for {' or '.join(names)}{found}"
        )
    return value


def _named(config: Any) -> str:
    return f"config of model type {getattr(config, 'model_type', None) or 'unknown'!r}"
