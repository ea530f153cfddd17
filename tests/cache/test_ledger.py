import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, LlamaConfig

import decodekit
from decodekit.core.compat import CACHE_KEY
from decodekit.core.errors import InputError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

DENSE = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
QWEN_0_8B = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
# Without a model type nothing is filled in, so that there is no convolution.
HYBRID = {
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


@pytest.mark.parametrize(("kv_heads", "expected"), [(32, 64 * GIB), (8, 16 * GIB)])
def test_keys_and_values_follow_the_formula(kv_heads, expected):
    plan = decodekit.ledger({**DENSE, "num_key_value_heads": kv_heads}, 16_384, 8)
    assert plan.total_bytes == 2 * 32 * 8 * kv_heads * 16_384 * 128 * 2 == expected


def test_fewer_bits_divide():
    assert decodekit.ledger(DENSE, 32_768, 8, dtype=torch.bfloat16).total_bytes == 32 * GIB
    assert decodekit.ledger(DENSE, 32_768, 8, dtype="fp8").total_bytes == 16 * GIB
    for quantization, codes in {"int8": 16 * GIB, "fp8": 16 * GIB, "int4": 8 * GIB, "int2": 4 * GIB}.items():
        plan = decodekit.ledger(DENSE, 32_768, 8, quantization=quantization)
        assert plan.kv_bytes_per_token * 32_768 * 8 == codes
        assert plan.total_bytes == codes + plan.scale_bytes_per_block * plan.blocks_per_request * 8


@pytest.mark.parametrize(("block_size", "share"), [(16, 0.36), (64, 0.31)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("context", [4096, 4095])
def test_scales_of_four_bits_leave_most_of_the_saving(block_size, share, head_dim, context):
    config = {**DENSE, "head_dim": head_dim}
    quantized, full = (
        decodekit.ledger(config, context, 1, block_size=block_size, quantization=quantization).total_bytes
        for quantization in ("int4", None)
    )
    assert quantized / full <= share


def test_qwen_0_8b():
    plan = decodekit.ledger(QWEN_0_8B, 1200, 1, dtype="bfloat16")
    assert plan.kv_bytes_per_token == 12 * KIB
    assert plan.state_bytes_per_request == 18 * MIB
    assert plan.conv_bytes_per_request == 864 * KIB
    assert plan.crossover_tokens == 536
    three = decodekit.ledger({**QWEN_0_8B, "linear_conv_kernel_dim": 3}, 1200, 1)
    assert three.conv_bytes_per_request == 648 * KIB


@pytest.mark.integration
def test_qwen_0_8b_is_what_transformers_would_store():
    config = CONFIG_MAPPING["qwen3_5_text"](**{name: QWEN_0_8B[name] for name in QWEN_0_8B if name != "model_type"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        cache = DynamicCache(config=config)
        model(input_ids=torch.zeros(2, 100, dtype=torch.long), **{CACHE_KEY: cache})
    found = {"kv": 0, "state": 0, "conv": 0}
    for layer in cache.layers:
        if hasattr(layer, "conv_states"):
            found["state"] += layer.recurrent_states[0].nbytes
            found["conv"] += layer.conv_states[0].nbytes
        else:
            found["kv"] += layer.keys.nbytes + layer.values.nbytes
    plan = decodekit.ledger(config, 100, 2, dtype="bfloat16")
    assert found == {
        "kv": 2 * 100 * plan.kv_bytes_per_token,
        "state": 2 * plan.state_bytes_per_request,
        "conv": 2 * plan.conv_bytes_per_request,
    }


@pytest.mark.parametrize(("tokens", "mib"), [(512, 84), (1024, 96), (4096, 168), (32_768, 840), (262_144, 6216)])
def test_a_hybrid_grows_with_its_attention_layers_alone(tokens, mib):
    assert decodekit.ledger(HYBRID, tokens, 1).total_bytes == mib * MIB


def test_crossover_of_states_alone():
    assert decodekit.ledger(HYBRID, 1, 1).crossover_tokens == 1024


@pytest.mark.parametrize(("every", "ratio"), [(256, 12), (1024, 3), (4096, 0.75)])
def test_checkpoints_cost_a_multiple_of_the_keys_and_values_between_them(every, ratio):
    plan = decodekit.ledger(HYBRID, 8192, 2, checkpoint_every=every)
    assert plan.checkpoint_kv_ratio == ratio
    assert plan.checkpoint_bytes == 2 * ratio * 8192 * plan.kv_bytes_per_token
    assert plan.total_bytes == decodekit.ledger(HYBRID, 8192, 2).total_bytes + plan.checkpoint_bytes


def test_blocks_of_a_request():
    plan = decodekit.ledger(DENSE, 900 + 300, 3)
    assert (plan.blocks_per_request, plan.block_waste_bytes) == (75, 0)
    plan = decodekit.ledger(DENSE, 1201, 3)
    assert (plan.blocks_per_request, plan.block_waste_bytes) == (76, 3 * 15 * plan.kv_bytes_per_token)


def test_kinds_add_up_to_the_total():
    config = CONFIG_MAPPING["gemma3_text"](sliding_window=512)
    plan = decodekit.ledger(config, 4000, 3)
    assert [(kind.kind, kind.layers, kind.kept) for kind in plan.kinds] == [
        ("sliding_attention", 22, 511),
        ("full_attention", 4, None),
    ]
    assert sum(kind.total_bytes for kind in plan.kinds) == plan.total_bytes
    assert sum(kind.kv_bytes_per_token for kind in plan.kinds) == plan.kv_bytes_per_token


def test_latents_are_stored_in_place_of_keys_and_values():
    config = CONFIG_MAPPING["deepseek_v3"]()
    plan = decodekit.ledger(config, 1, 1, dtype="bfloat16")
    assert plan.kv_bytes_per_token == 61 * (512 + 64) * 2
    assert plan.kinds[0].kind == "latent_attention"


def test_what_a_budget_holds():
    plan = decodekit.ledger(DENSE, 4096, 8, budget="4GiB")
    assert (plan.budget_bytes, plan.largest_batch, plan.largest_context) == (4 * GIB, 8, 4096)
    assert decodekit.ledger(DENSE, 4097, 8, budget="4GiB").largest_batch == 7
    none = decodekit.ledger(DENSE, 4096, 8)
    assert (none.budget_bytes, none.largest_batch, none.largest_context) == (None, None, None)


def test_the_configs_own_dtype_counts_unless_told():
    assert decodekit.ledger(DENSE, 1, 1).dtype == "bfloat16"
    assert decodekit.ledger({**DENSE, "torch_dtype": "float32"}, 1, 1).dtype == "float32"
    assert decodekit.ledger(LlamaConfig(dtype=torch.float16), 1, 1).dtype == "float16"
    assert decodekit.ledger(LlamaConfig(dtype=torch.float16), 1, 1, dtype="bf16").dtype == "bfloat16"
    halved = decodekit.ledger(HYBRID, 1, 1, state_dtype="bfloat16")
    assert halved.state_bytes_per_request == decodekit.ledger(HYBRID, 1, 1).state_bytes_per_request // 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "context is 0: give a whole number of at least 1"),
        ({"batch": 1.5}, "batch is 1.5"),
        ({"block_size": True}, "block_size is True"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0"),
        ({"dtype": "bf61"}, "unknown dtype 'bf61': did you mean 'bf16'"),
        ({"state_dtype": "int7"}, "unknown dtype 'int7'"),
        ({"quantization": "int3"}, "unknown quantization 'int3': did you mean 'int8'"),
        ({"budget": "4 gigs"}, "size '4 gigs' is not a number of bytes"),
    ],
)
def test_wrong_numbers_and_names_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        decodekit.ledger(DENSE, **{"context": 1, "batch": 1, **options})


def test_everything_goes_into_json():
    plan = dataclasses.asdict(decodekit.ledger(QWEN_0_8B, 10, 1, budget="1GiB", checkpoint_every=4))
    assert json.loads(json.dumps(plan))["crossover_tokens"] == 536


def test_the_function_is_not_hidden_by_the_module_of_its_name():
    lines = [
        "import decodekit.cache.ledger",
        "import decodekit",
        f"print(decodekit.ledger({DENSE!r}, 1, 1).kv_bytes_per_token, decodekit.cache.ledger.__name__)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(2 * 32 * 8 * 128 * 2), "decodekit.cache.ledger"]
