"""Tiny random models of many architectures, with weights so wide that a wrong cache shows in the logits."""

import functools
import inspect

import torch
import transformers

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_HEAD = {"head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA2 = {"mamba_d_state": 8, "mamba_d_head": 8, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
# Their one-token forward does not clamp time steps from below, as that of several tokens does.
_NO_CLAMP = {"time_step_min": 1e-9}
_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_LINEAR = ["linear_attention", "full_attention"] * 2
_SLIDING = ["sliding_attention", "full_attention"] * 2

# Class prefix and what its config says beside the common shape.
FAMILIES = {
    "llama": ("Llama", {"num_key_value_heads": 1}),
    "bloom": ("Bloom", {"n_layer": 3, "n_head": 4}),
    "falcon": ("Falcon", {"alibi": False, "multi_query": True}),
    "mistral": ("Mistral", {**_HEAD, "sliding_window": 7}),
    "gemma2": ("Gemma2", {**_HEAD, "sliding_window": 7, "layer_types": _SLIDING, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3", {**_HEAD, "sliding_window": 7, "layer_types": _SLIDING, "query_pre_attn_scalar": 8}),
    "gpt_oss": ("GptOss", {**_HEAD, "sliding_window": 7, "num_local_experts": 4, "layer_types": _SLIDING}),
    "deepseek_v2": (
        "DeepseekV2",
        {**_MLA, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 4},
    ),
    "deepseek_v3": ("DeepseekV3", {**_MLA, "n_routed_experts": 4, "first_k_dense_replace": 4, "n_group": 1}),
    "qwen3_5": ("Qwen3_5", {**_HEAD, **_DELTA, "layer_types": _LINEAR}),
    "qwen3_next": (
        "Qwen3Next",
        {**_HEAD, **_DELTA, **_EXPERTS, "layer_types": _LINEAR, "mlp_only_layers": [0, 1, 2, 3]},
    ),
    "olmo_hybrid": ("OlmoHybrid", {**_DELTA, "layer_types": _LINEAR, "linear_num_key_heads": 4}),
    "kimi_linear": (
        "KimiLinear",
        {
            **_MLA,
            **_EXPERTS,
            "layer_types": _LINEAR,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "first_k_dense_replace": 4,
        },
    ),
    "mamba": ("Mamba", {"state_size": 8, "time_step_rank": 4}),
    "falcon_mamba": ("FalconMamba", {"state_size": 8, "time_step_rank": 4}),
    "mamba2": ("Mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}),
    "jamba": (
        "Jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 2},
    ),
    "bamba": ("Bamba", {**_MAMBA2, "attn_layer_indices": [1, 3]}),
    "falcon_h1": ("FalconH1", {**_MAMBA2, "mamba_d_ssm": 64}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {**_MAMBA2, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 48},
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba", "attention"],
            **_NO_CLAMP,
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
            **_HEAD,
        },
    ),
    "zamba": (
        "Zamba",
        {"mamba_d_state": 8, "mamba_dt_rank": 4, "n_mamba_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "zamba2": (
        "Zamba2",
        {
            "mamba_d_state": 8,
            "mamba_headdim": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "chunk_size": 8,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            **_NO_CLAMP,
            "num_mem_blocks": 1,
        },
    ),
    "inkling": (
        "Inkling",
        {
            **_HEAD,
            "swa_head_dim": 8,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "sliding_window_size": 7,
            "d_rel": 4,
            "rel_extent": 16,
            "layer_types": ["hybrid_sliding", "hybrid"] * 2,
            "mlp_layer_types": ["dense"] * 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "logits_mup_width_multiplier": 1.0,
        },
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}),
}
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


@functools.cache
def family_model(name):
    """A model of one family, in evaluation mode."""
    prefix, own = FAMILIES[name]
    config_class = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    config = config_class(**{**_SHAPE, **own})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
        for parameter, weight in model.named_parameters():
            if weight.dim() > 1 and weight.std() < 0.1 and "A_log" not in parameter:
                torch.nn.init.normal_(weight, std=0.3)
    return model.eval().requires_grad_(False)


def forward(model, input_ids, cache=None, **inputs):
    """Logits [R, q, V], with ``cache`` under the name that this model has for it."""
    parameters = inspect.signature(model.forward).parameters
    known = {name: value for name, value in inputs.items() if name in parameters}
    if cache is not None:
        known[next(name for name in CACHE_NAMES if name in parameters)] = cache
    return model(torch.as_tensor(input_ids), use_cache=cache is not None, **known).logits


class Loop:
    """Forwards named rows of a paged cache, as few tokens a step as the model needs, and keeps their logits."""

    def __init__(self, model, cache):
        self.model, self.cache = model, cache

    def open(self, *prompts):
        """Rows for prompts; gives their numbers."""
        return self.cache.open([list(prompt) for prompt in prompts])

    def step(self, rows, tokens):
        """One step; logits [R, q, V]."""
        with self.cache.begin(rows, tokens) as step:
            return forward(
                self.model, tokens, self.cache, attention_mask=step.attention_mask, position_ids=step.position_ids
            )

    def extend(self, rows, tokens):
        """Forward [R][q] tokens in as many steps as it takes; logits [R, q, V]."""
        logits, done = [], 0
        while done < len(tokens[0]):
            count = min(self.cache.max_query(row, len(tokens[0]) - done) for row in rows)
            logits.append(self.step(rows, [ids[done : done + count] for ids in tokens]))
            done += count
        return torch.cat(logits, dim=1)

    def prefill(self, row, prompt):
        """Forward what the cache does not have of a prompt; logits of those tokens, [q, V]."""
        return self.extend([row], [list(prompt)[self.cache.rows[row].length :]])[0]
