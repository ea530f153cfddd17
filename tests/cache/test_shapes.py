"""The ledger's sizes against what transformers really stores, for tiny random models of each family."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, LlamaConfig, T5Config

import decodekit
from decodekit.cache.shapes import LayerShape, layer_shapes, read_config
from decodekit.core.compat import CACHE_KEY
from decodekit.core.errors import InputError

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
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "num_key_value_heads": 4},
    "gpt_bigcode": {"n_embd": 32, "n_head": 4, "n_layer": 2, "num_key_value_heads": 1},
    "falcon": {"num_kv_heads": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "num_key_value_heads": 4},
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
        "head_dim": 8,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 1,
        "moe_topk": 2,
        **MLA,
    },
    "deepseek_v32": {**MLA, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8},
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


def stored_bytes(found: Any) -> int:
    """Bytes of all tensors in a cache, a layer or a collection of them; private ones, such as window sizes, left out."""
    if isinstance(found, torch.Tensor):
        return found.numel() * found.element_size()
    if isinstance(found, dict):
        return sum(stored_bytes(value) for name, value in found.items() if not str(name).startswith("_"))
    if isinstance(found, (list, tuple)):
        return sum(map(stored_bytes, found))
    return stored_bytes(vars(found)) if type(found).__name__.endswith(("Cache", "Layer")) else 0


@torch.no_grad()
def cache_bytes(config: Any, *, tokens: int, batch: int) -> int:
    """What a forward leaves behind."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    input_ids = torch.randint(3, 60, (batch, tokens))
    if config.model_type == "recurrent_gemma":
        # Its modules keep the states, and the cache it makes is not returned.
        cache = DynamicCache(config=config)
        model(input_ids=input_ids, **{CACHE_KEY: cache})
        states = [getattr(module, "conv1d_state", None) for module in model.modules()]
        states += [getattr(module, "recurrent_states", None) for module in model.modules()]
        return stored_bytes([cache, *states])
    outputs = model(input_ids=input_ids, use_cache=True)
    names = (CACHE_KEY, "cache_params", "state")
    return stored_bytes(next(cache for name in names if (cache := outputs.get(name)) is not None))


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_equal_what_transformers_stores(family):
    if family == "deepseek_v32" and CACHE_KEY == "past_key_values":
        pytest.skip("transformers 5.17 stores the keys and values of sparse attention expanded")
    config = tiny_config(family)
    # MiniMax's lightning attention keeps its state in the model's dtype.
    plan = decodekit.ledger(
        config, 20, 2, dtype="bfloat16", block_size=1, state_dtype="bfloat16" if family == "minimax" else "float32"
    )
    assert plan.total_bytes == cache_bytes(config, tokens=20, batch=2)


def test_latents_of_sparse_attention_have_indexer_keys_beside_them():
    assert set(layer_shapes(tiny_config("deepseek_v32"))) == {LayerShape("indexed_attention", 1, 16, 8, index_dim=16)}


def test_a_reused_indexer_keeps_no_keys():
    fields = {"layer_types": ["indexed_attention"] * 2, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "index_head_dim": 4}
    shapes = layer_shapes(SimpleNamespace(**fields, indexer_types=["full", "shared"]))
    assert [shape.index_dim for shape in shapes] == [4, 0]


def test_layers_that_reuse_keys_and_values_keep_none():
    config = {"num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 4, "num_kv_shared_layers": 1}
    assert [shape.kind for shape in layer_shapes(read_config(config))] == [*["full_attention"] * 2, "shared_kv"]


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"sliding_window": 8}, ["sliding_attention"] * 2),
        ({"sliding_window": 8, "use_sliding_window": False}, ["full_attention"] * 2),
        ({"attention_chunk_size": 8}, ["chunked_attention"] * 2),
        ({"layers_block_type": ["attention", "moe"]}, ["full_attention", "feed_forward"]),
    ],
)
def test_a_dict_says_what_its_layers_are(fields, kinds):
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 4, **fields}
    assert [shape.kind for shape in layer_shapes(read_config(config))] == kinds


def test_sources_of_a_config_are_read_alike(tmp_path):
    config = LlamaConfig(num_hidden_layers=3, num_key_value_heads=4)
    config.save_pretrained(tmp_path)
    expected = layer_shapes(config)
    for source in (config, config.to_dict(), tmp_path, tmp_path / "config.json", str(tmp_path)):
        assert layer_shapes(read_config(source)) == expected


def test_the_decoder_of_a_config_of_several_models_counts():
    decoder = {"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 8}
    shapes = layer_shapes(read_config({"model_type": "no such model", "text_config": decoder}))
    assert shapes == [LayerShape("full_attention", 1, 8, 8)] * 2
    assert (
        len(layer_shapes(read_config(CONFIG_MAPPING["qwen3_5"]())))
        == CONFIG_MAPPING["qwen3_5_text"]().num_hidden_layers
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "nonesuch"}, r"'nonesuch'.*looked for num_hidden_layers or n_layer"),
        ({"num_hidden_layers": 2}, "looked for num_attention_heads or n_head"),
        ({"layer_types": ["linear_attention"]}, "nothing gives the size of their state.*linear_num_value_heads"),
        ({"layer_types": ["compressed_sparse_attention"]}, "'compressed_sparse_attention'.*known: chunked_attention"),
        ({"model_type": "llama", "num_hidden_layers": "two"}, "config of a 'llama' is not valid.*num_hidden_layers"),
        (CONFIG_MAPPING["mllama"](), "keeps K/V of images"),
        (T5Config(), "encoder-decoder"),
        (torch.nn.Linear(1, 1), "Linear is no config: .*model.config"),
        ("no/such/folder", r"'no/such/folder' cannot be read.*AutoConfig.from_pretrained"),
    ],
)
def test_what_cannot_be_counted_says_why(config, message):
    with pytest.raises(InputError, match=message):
        layer_shapes(read_config(config))


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "holds a list")])
def test_a_file_that_is_no_config_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=message):
        read_config(tmp_path)
