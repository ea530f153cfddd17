"""Models, heads and calls for the tests of drafters that run them."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import decodekit
from decodekit.core.checkpoints import FINGERPRINT, fingerprint
from decodekit.core.types import Output
from decodekit.drafters.eagle import EagleHead, head_config
from decodekit.drafters.medusa import make_heads
from decodekit.drafters.mtp import MtpHead
from decodekit.testing import tiny_model, tiny_tokenizer

FEW = 7
"""So few tokens that random heads and other models' drafts are often right: pad, EOS, BOS, newline, space, a, b."""

PROMPTS = ["ab ba", "a", "aab\nbba ab "]

EAGLE_LAYER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


OPEN = {"suppress_tokens": [0, 1, 2]}
"""No row ends early, and only four tokens are left."""


def few(family: Any) -> Any:
    """A tiny model of few tokens, in float64; of seeds whose greedy tokens vary."""
    return tiny_model(family, vocab_size=FEW, dtype=torch.float64, seed=5 if family == "sliding" else 0)


def near(model: Any, noise: float = 0.1) -> Any:
    """A model that often says the same as another."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for weight in other.parameters():
        weight.data += noise * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return other


def decode(
    model: Any, drafter: Any = None, prompts: Any = PROMPTS, *, models: Any = None, **recipe: Any
) -> list[Output]:
    """Texts decoded by a recipe of these parts, with what the drafter is."""
    generation = {"max_new_tokens": 14, **recipe.pop("generation", {})}
    parts = {**recipe, "generation": generation} | ({} if drafter is None else {"drafter": drafter})
    return decodekit.load(parts).bind(models=models or {}).run(model, tiny_tokenizer(), prompts)


def ids(outputs: list[Output]) -> list[list[int]]:
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [output.token_ids for output in outputs]


def accepted(outputs: list[Output]) -> int:
    """How many drafted tokens were accepted, of a drafter that never failed."""
    assert all("drafter_error" not in output.stats for output in outputs), outputs[0].stats
    return sum(output.stats["accepted_tokens"] for output in outputs)


def medusa_head(folder: Path, model: Any, *, heads: int = 3, name: str = "medusa_lm_head.pt") -> Path:
    folder.mkdir(exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = make_heads(32, model.get_output_embeddings().weight.shape[0], heads, 1).state_dict()
    if name.endswith(".pt"):
        torch.save(weights, folder / name)
    else:
        save_file(weights, folder / name)
    (folder / "config.json").write_text(json.dumps({FINGERPRINT: fingerprint(model)}))
    return folder


def eagle_head(folder: Path, model: Any) -> Path:
    folder.mkdir(exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = EagleHead(head_config(EAGLE_LAYER, 32))
    weights = {name.removeprefix("decoder."): tensor for name, tensor in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**EAGLE_LAYER, FINGERPRINT: fingerprint(model)}))
    return folder


QWEN = {
    "embedding_norm": "pre_fc_norm_embedding",
    "hidden_norm": "pre_fc_norm_hidden",
    "fc": "fc",
    "norm": "norm",
    "layer": "layers.0",
}
DEEPSEEK = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm"}


def mtp_head(folder: Path, model: Any, names: dict[str, str], prefix: str) -> Path:
    folder.mkdir(exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = MtpHead(model, model.config.num_hidden_layers - 1)
    weights = {}
    for name, tensor in head.state_dict().items():
        outer, _, inner = name.partition(".")
        weights[".".join(part for part in (prefix, names.get(outer, ""), inner) if part)] = tensor.clone()
    save_file(weights, folder / "model.safetensors")
    return folder
