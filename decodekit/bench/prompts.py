"""The prompts of a benchmark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from decodekit.core.errors import InputError

DEFAULT = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short story about a robot that learns to paint.",
    "List three uses of a paper clip.",
    "How do vaccines work?",
    "Tell me about the history of the bicycle, and what changed when it was invented.",
    "Translate to German: The weather is nice today.",
    "What should I cook with rice, eggs and spinach?",
)


def read_prompts(path: Path | None, limit: int | None) -> list[str]:
    """The ``prompt`` of every line of a JSONL file, or the built-in prompts.

    Raises:
        InputError: the file cannot be read, or a line has no prompt; names the line.
    """
    if path is None:
        return list(DEFAULT[:limit])
    prompts = []
    for number, row in enumerate(read_rows(path, limit), start=1):
        if "prompt" not in row:
            raise InputError(f"{path}:{number}: expected a JSON object with the key 'prompt'")
        prompts.append(str(row["prompt"]))
    return prompts


def read_rows(path: Path | None, limit: int | None) -> list[dict[str, Any]]:
    """The JSON objects of a JSONL file.

    Raises:
        InputError: there is no file, it cannot be read, or a line is no object; names the line.
    """
    if path is None:
        raise InputError("this suite needs a data file: give --data FILE")
    try:
        # Not splitlines: it also cuts at U+2028 and others, which JSON leaves as they are.
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeError) as error:
        raise InputError(f"the data file {str(path)!r} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines[:limit], start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number}: expected a JSON object: {error}") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
        rows.append(row)
    if not rows:
        raise InputError(f"the data file {str(path)!r} has no line; give a JSON object a line")
    return rows


def token_prompts(tokenizer: Any, prompts: Sequence[str], rows: int, length: int) -> torch.Tensor:
    """[rows, length] ids: the texts end to end, each row beginning with another one."""
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in prompts]
    filled = []
    for row in range(rows):
        turned = [token for text in ids[row % len(ids) :] + ids[: row % len(ids)] for token in text]
        filled.append((turned * (length // len(turned) + 1))[:length])
    return torch.tensor(filled)
