"""The ledger's sizes against what transformers really stores, for tiny random models of each family."""

import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, T5Config

import decodekit
from decodekit import InputError
from decodekit.cache.shapes import layer_shapes, read_config

pytestmark = pytest.mark.integration

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "head_dim": 16,
}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_n_groups": 2}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_group": 1,
    "topk_group": 1,
    **EXPERTS,
}
GEMMA4 = {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "vocab_size_per_layer_input": 64}

FAMILIES = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2},
    "gpt_bigcode": {"n_embd": 32, "n_head": 4, "n_layer": 2, "num_key_value_heads": 1},
    "falcon": {"num_kv_heads": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1},
    },
    "mistral": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "head_dim": 12, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n_text": {
        "sliding_window": 8,
        "head_dim": 8,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "altup_num_inputs": 2,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, **GEMMA4},
    "llama4_text": {"attention_chunk_size": 8, "head_dim": 8, "intermediate_size_mlp": 32, **EXPERTS},
    "gpt_oss": {"sliding_window": 8, "head_dim": 8, **EXPERTS},
    "deepseek_v2": {"topk_method": "greedy", **MLA},
    "deepseek_v3": MLA,
    "minicpm3": MLA,
    "longcat_flash": {
        "num_layers": 2,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 1,
        "moe_topk": 2,
        **MLA,
    },
    "qwen3_5_text": {**HYBRID, **DELTA},
    "qwen3_next": {**HYBRID, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "olmo_hybrid": {**HYBRID, "linear_key_head_dim": 8, "linear_value_head_dim": 12},
    "kimi_linear": {**HYBRID, **MLA, "linear_head_dim": 8, "linear_num_heads": 4},
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 8, **EXPERTS},
    "bamba": {"attn_layer_indices": [1], **MAMBA2},
    "falcon_h1": {"mamba_d_ssm": 64, **MAMBA2},
    "granitemoehybrid": {"shared_intermediate_size": 16, **HYBRID, **MAMBA2, **EXPERTS},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "head_dim": 8,
    },
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 2, "mamba_d_state": 8},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 4, "mamba_d_state": 8},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "rwkv": {},
    "recurrent_gemma": {"lru_width": 40, "attention_window_size": 8},
    "minimax": {**HYBRID, **EXPERTS, "block_size": 8},
}


def tiny_config(family: str, **fields):
    return CONFIG_MAPPING[family](**{**BASE, **FAMILIES.get(family, {}), **fields})


def stored_bytes(found, seen: set[int]) -> int:
    """Bytes of all tensors that lie in an object, each once; attributes of private names left out."""
    if isinstance(found, torch.Tensor):
        new = id(found) not in seen
        seen.add(id(found))
        return found.numel() * found.element_size() if new else 0
    if isinstance(found, dict):
        return sum(stored_bytes(value, seen) for value in found.values())
    if isinstance(found, (list, tuple)):
        return sum(stored_bytes(value, seen) for value in found)
    if hasattr(found, "layers") or hasattr(found, "is_initialized"):
        return stored_bytes({name: value for name, value in vars(found).items() if not name.startswith("_")}, seen)
    if hasattr(found, "conv_states"):
        return stored_bytes([found.conv_states, found.recurrent_states], seen)
    return 0


@torch.no_grad()
def cache_bytes(config, *, tokens: int, batch: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """What a forward leaves in the cache, and in the model's own buffers where RecurrentGemma keeps its states."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    before = {id(buffer) for buffer in model.buffers()} | {id(parameter) for parameter in model.parameters()}
    caches = []
    # RecurrentGemma makes a cache of its own and does not return it.
    model.get_decoder().register_forward_hook(lambda _, args, kwargs, out: caches.append(out), with_kwargs=True)
    for layer in model.modules():
        if type(layer).__name__ == "RecurrentGemmaSdpaAttention":
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: caches.extend(value for value in (*args, *kwargs.values())), with_kwargs=True
            )
    model(input_ids=torch.randint(3, 60, (batch, tokens)), use_cache=True)
    names = ("cache", "past_key_values", "cache_params", "state")
    held = [value for out in caches for name in names if (value := getattr(out, name, None)) is not None]
    held += [value for value in caches if hasattr(value, "get_seq_length")]
    for layer in model.modules():
        held += [getattr(layer, name) for name in ("conv1d_state", "recurrent_states") if hasattr(layer, name)]
    return stored_bytes(held, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_equal_what_transformers_stores(family):
    config = tiny_config(family)
    # MiniMax's lightning attention keeps its state in the model's dtype.
    plan = decodekit.ledger(
        config, 20, 2, dtype="bfloat16", block_size=1, state_dtype="bfloat16" if family == "minimax" else "float32"
    )
    assert plan.total_bytes == cache_bytes(config, tokens=20, batch=2)
