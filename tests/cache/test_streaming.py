"""Windows with sinks: logits of a dense reference in which every pair of tokens has its own distance."""

import math

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

import decodekit
from decodekit.cache.paged import PagedCache
from decodekit.cache.prefix import Prompt
from decodekit.core import compat
from decodekit.core.errors import InputError, Refused
from decodekit.testing import tiny_model
from tests.cache.families import FAMILIES, Loop, family_model, forward

pytestmark = pytest.mark.integration

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_OTHERS = {
    "Gemma": {"head_dim": 8},
    "Gemma2": FAMILIES["gemma2"][1],
    "Gemma3": FAMILIES["gemma3"][1],
    "GptOss": FAMILIES["gpt_oss"][1],
    "Granite": {},
    "Llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "Mistral": {"sliding_window": None},
    "Mixtral": {"sliding_window": None, "num_local_experts": 2},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "Phi": {"partial_rotary_factor": 0.5},
    "Phi3": {"sliding_window": None},
    "Qwen2": {},
    "Qwen2Moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "head_dim": 8},
    "Qwen3_5": FAMILIES["qwen3_5"][1],
    "Qwen3Next": FAMILIES["qwen3_next"][1],
    "StableLm": {"partial_rotary_factor": 0.25},
    "Starcoder2": {"sliding_window": None},
}


def family(prefix):
    config_class = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    own = _OTHERS[prefix]
    config = config_class(**{**_SHAPE, "num_hidden_layers": 4, **own})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    return model.eval().requires_grad_(False)


def tokens(count, seed=0):
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def rotate(vectors, angles):
    """[..., D] with pairs (i, i + n) turned by [..., n] radians, as complex numbers."""
    pairs = angles.shape[-1]
    turned = torch.complex(vectors[..., :pairs], vectors[..., pairs : 2 * pairs]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([turned.real, turned.imag, vectors[..., 2 * pairs :]], dim=-1)


@pytest.fixture
def reference():
    """Logits [n, V] of a model whose full attention sees sinks and a window, without any cache."""

    def run(model, ids, sinks, window):
        rotary = next(part for name, part in model.named_modules() if name.endswith("rotary_emb"))

        def attend(module, query, key, value, mask, scaling=None, softcap=None, s_aux=None, sliding_window=None, **_):
            types = getattr(module.config, "layer_types", None)
            frequencies = (
                rotary.inv_freq
                if hasattr(rotary, "inv_freq")
                else getattr(rotary, f"{types[module.layer_idx]}_inv_freq")
            )

            count, repeats = query.shape[2], query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
            scores = query.new_full((1, query.shape[1], count, count), -math.inf)
            for at in range(count):
                for to in range(at + 1):
                    near, dropped = at - to < (sliding_window or window), max(at + 1 - sinks - window, 0)
                    if near or (to < sinks and sliding_window is None):
                        # Where the window's first token follows the last sink, a sink is that much nearer.
                        moved = frequencies * (dropped if to < sinks and sliding_window is None else 0)
                        scores[..., at, to] = (
                            query[:, :, at] * rotate(key[:, :, to], moved.expand(*key.shape[:2], -1))
                        ).sum(-1)
            scores = scores * (scaling or query.shape[-1] ** -0.5)
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            if s_aux is not None:
                scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(-1, -1, count, 1)], dim=-1)
            weights = scores.softmax(-1)[..., :count]
            return (weights.to(value.dtype) @ value).transpose(1, 2), None

        AttentionInterface.register("streaming_reference", attend)
        AttentionMaskInterface.register("streaming_reference", AttentionMaskInterface()["sdpa"])
        with compat.attention(model, "streaming_reference"):
            return forward(model, [ids])[0]

    return run


def streamed(model, ids, chunks=(5, 100), **options):
    """Logits [n, V] through a cache with a window, in steps of up to so many tokens."""
    cache = PagedCache(model.config, **{"num_blocks": 64, "block_size": 4, **options})
    loop = Loop(model, cache)
    loop.open(ids)
    logits = []
    while (done := cache.rows[0].length) < len(ids):
        wanted = min(chunks[min(len(logits), len(chunks) - 1)], len(ids) - done)
        logits.append(loop.step([0], [ids[done : done + cache.max_query(0, wanted)]])[0])
    return torch.cat(logits), cache


@pytest.mark.parametrize("prefix", _OTHERS)
def test_logits_are_those_of_the_dense_reference(prefix, reference):
    model, ids = family(prefix), tokens(50)
    for sinks, window in ((4, 9), (0, 6), (3, 16), (1, 1)):
        found, _ = streamed(model, ids, sinks=sinks, window=window)
        expected = reference(model, ids, sinks, window)
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
