"""Reference runs of transformers 4.55.4, and the models that they are of."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parents[1] / "golden"
TINY = json.loads((FOLDER / "hf_decoders_tiny.json").read_text())["models"]
DEMO = json.loads((FOLDER / "hf_decoders_smollm2.json").read_text())


def golden_model(name: str, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    raw = json.loads((FOLDER / f"tiny_{name}.config.json").read_text())
    known = {
        key: raw[key]
        for key in raw
        if key not in ("architectures", "model_type", "torch_dtype", "transformers_version")
    }
    model = LlamaForCausalLM(LlamaConfig(**known))
    model.load_state_dict(load_file(FOLDER / f"tiny_{name}.safetensors"), strict=not known["tie_word_embeddings"])
    model.tie_weights()
    return model.to(dtype).eval()


def left_pad(prompts: list[list[int]], pad: int = 0) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]),
    }


def prompt_ids(text: str) -> torch.Tensor:
    """The ids of a prompt of the demo model's runs, [1, T]."""
    return torch.tensor([next(prompt["ids"] for prompt in DEMO["meta"]["prompts"] if prompt["text"] == text)])


def representative(values: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
    """All of them as parameters, those that are not kept marked as slow: runs of the demo model take seconds each."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]
