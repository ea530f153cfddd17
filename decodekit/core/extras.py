"""What some plugins need beyond the base installation: optional packages, and other models by id or path."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

from decodekit.core.errors import InputError


def optional_module(name: str, *, extra: str, used_by: str) -> Any:
    """A module of an optional dependency.

    Raises:
        InputError: it is not installed; says how to get it.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise InputError(f"{used_by} needs {package}: pip install 'decodekit[{extra}]' ({error})") from error


@lru_cache(maxsize=4)
def load_other_model(name: str, loader: str, used_by: str) -> tuple[Any, Any]:
    """A model that is not the one being decoded, in evaluation mode, and its tokenizer; loaded once a process.

    Args:
        name: a Hugging Face id or a local folder.
        loader: the transformers class that loads it, such as ``AutoModel``.
        used_by: the option that names it, for the message.

    Raises:
        InputError: it cannot be loaded.
    """
    import transformers
    from safetensors import SafetensorError

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = getattr(transformers, loader).from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(f"{used_by}: cannot load {name!r} as {loader}: {reason}; give an id or a folder") from error
    return model.eval().requires_grad_(False), tokenizer
