"""Weights of draft heads: read without pickle, and tied to the model that they were trained for."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from decodekit.core.compat import text_config
from decodekit.core.errors import InputError, Refused

FINGERPRINT = "decodekit_target"
"""Under this name ``config.json`` of a head holds the fingerprint of its model."""

_ROWS = 64


def fingerprint(model: Any) -> dict[str, Any]:
    """What tells a model from others: its shape, and a hash of some rows of its output embedding as bfloat16."""
    config = text_config(model)
    weight = model.get_output_embeddings().weight
    rows = torch.linspace(0, len(weight) - 1, _ROWS, dtype=torch.float64).long().to(weight.device)
    sample = weight.detach()[rows].to("cpu", torch.bfloat16).contiguous().view(torch.int16)
    return {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": len(weight),
        "sha256": hashlib.sha256(sample.numpy().tobytes()).hexdigest(),
    }


def check_target(model: Any, config: Mapping[str, Any], path: Path, kind: str) -> None:
    """Refuse a head that was trained for another model.

    Args:
        model: the target.
        config: the head's ``config.json``; published ones have no fingerprint, and only their sizes are compared.
        path: of the head, for the message.
        kind: of the drafter.

    Raises:
        Refused: names what differs.
    """
    own = fingerprint(model)
    theirs = config.get(FINGERPRINT) or {name: config[name] for name in ("hidden_size", "vocab_size") if name in config}
    for name, value in theirs.items():
        if own.get(name) != value:
            raise Refused(
                f"drafter {kind!r}: the head in {str(path)!r} was trained for another model: its {name} is {value}, the "
                f"target's {own.get(name)}; give a head of this model"
            )


def read_config(path: Path) -> dict[str, Any]:
    """The ``config.json`` of a head: of its folder, or beside its file; empty where there is none.

    Raises:
        InputError: it is not JSON.
    """
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{str(file)!r} is not JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def read_tensors(path: Path, pattern: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names match from their beginning, on the CPU.

    Args:
        path: a ``.safetensors``, ``.pt`` or ``.bin`` file, or a folder of such. Only tensors are read of the latter two, no
            pickled code.
        pattern: a regular expression.

    Raises:
        InputError: there is no such file, it is damaged, or it holds more than tensors.
    """
    if path.is_dir():
        files = sorted(path.glob("*.safetensors")) or sorted([*path.glob("*.pt"), *path.glob("*.bin")])
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise InputError(
            f"no weights of a head in {str(path)!r}; give a folder or file with *.safetensors, *.pt or *.bin "
            "(for a Hub id: hf download ID --local-dir FOLDER)"
        )
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            found |= _safetensors(file, pattern) if file.suffix == ".safetensors" else _torch_file(file, pattern)
        except Exception as error:  # of damaged bytes torch's unpickler raises what it comes across, such as IndexError
            [line, *_] = str(error).strip().splitlines() or [type(error).__name__]
            raise InputError(f"{str(file)!r} is damaged or holds more than tensors: {line}"[:300]) from error
    return found


def load_weights(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Put the tensors of a checkpoint into a module.

    Raises:
        InputError: some are missing, unknown, or of another shape.
    """
    wanted = module.state_dict()
    for what, names in (("lacks", wanted.keys() - tensors.keys()), ("has unknown", tensors.keys() - wanted.keys())):
        if names:
            raise InputError(f"the head in {str(path)!r} {what} {', '.join(sorted(names)[:5])}; is it of another kind?")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise InputError(
                f"the head in {str(path)!r}: {name} is {tuple(tensor.shape)}, expected {tuple(wanted[name].shape)}"
            )
    module.load_state_dict(tensors)


def _safetensors(file: Path, pattern: str) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys() if re.match(pattern, name)}  # noqa: SIM118


def _torch_file(file: Path, pattern: str) -> dict[str, Tensor]:
    content = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"expected a mapping of tensors, got {type(content).__name__}")
    return {name: tensor for name, tensor in content.items() if re.match(pattern, name)}
