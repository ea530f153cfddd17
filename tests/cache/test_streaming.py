"""Windows with sinks: logits of a dense reference in which every pair of tokens has its own distance."""

import math

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from decodekit.cache.paged import PagedCache
from decodekit.cache.streaming import Stream
from decodekit.core import compat
from decodekit.core.errors import InputError, Refused
from decodekit.testing import tiny_model
from tests.cache.families import FAMILIES, Loop, forward

pytestmark = pytest.mark.integration

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
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
    layers = len(own.get("layer_types", "12"))  # the second one's K/V depend on what was streamed
    config = config_class(**{**_SHAPE, **own, "num_hidden_layers": layers}, attn_implementation="eager")
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
            at, to = torch.arange(count)[:, None], torch.arange(count)
            pinned = sinks if sliding_window is None else 0
            scores = query @ key.transpose(-1, -2)
            # Where the window's first token follows the last sink, a sink is that much nearer: [n, 1, pairs].
            moved = (at + 1 - sinks - window).clamp(min=0)[..., None] * frequencies
            near_sinks = rotate(key[:, :, None, :pinned].expand(-1, -1, count, -1, -1), moved)
            scores[..., :pinned] = (query[:, :, :, None] * near_sinks).sum(-1)
            seen = (to <= at) & ((at - to < (sliding_window or window)) | (to < pinned))
            scores = scores.masked_fill(~seen, -math.inf)
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
    model, ids = family(prefix), tokens(30)
    for sinks, window in ((4, 9), (0, 6), (3, 16), (1, 1)):
        found, _ = streamed(model, ids, sinks=sinks, window=window)
        expected = reference(model, ids, sinks, window)
        assert close(found, expected)


def test_positions_stay_below_what_is_kept():
    stream = Stream(sinks=3, window=5)
    expected = [0, 1, 2, *[3, 4, 5, 6, 7] * 10]
    assert stream.positions(torch.arange(53)).tolist() == expected
    # A query 21 sees 0, 1, 2 and 17 to 21, as far apart as if they were its only tokens.
    seen = torch.tensor([[0, 1, 2, 17, 18, 19, 20, 21]])
    places = stream.positions(seen) + stream.turns(seen, torch.tensor([[21]]), sinks=3)
    assert (places[0, -1] - places[0]).tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_one_layer_forwards_only_what_is_kept(attention):
    """K/V of a first layer depend on their token alone, so that plain transformers is the reference."""
    model = tiny_model("dense", layers=1, dtype=torch.float64)
    model.set_attn_implementation(attention)
    ids, sinks, window = tokens(80), 4, 9
    found, _ = streamed(model, ids, sinks=sinks, window=window)
    for end in range(1, 81):
        kept = ids[:end] if end <= sinks + window else ids[:sinks] + ids[end - window : end]
        assert torch.allclose(found[end - 1], forward(model, [kept])[0, -1], atol=1e-5)


def test_what_fits_is_as_without_a_window(model):
    ids = tokens(13)
    found, _ = streamed(model, ids, sinks=4, window=9)
    assert torch.equal(found, streamed(model, ids)[0])


@pytest.mark.parametrize("chunks", [(1,), (13,), (3, 100)])
def test_how_a_prompt_is_divided_changes_nothing(model, chunks):
    ids = tokens(40)
    expected, _ = streamed(model, ids, sinks=4, window=9)
    found, _ = streamed(model, ids, chunks, sinks=4, window=9)
    assert close(found, expected)


@pytest.mark.parametrize(("length", "quantization"), [(1_500, None), (600, "int8")])
def test_memory_is_constant(length, quantization):
    check_stream(tiny_model("dense", layers=1), length, quantization=quantization)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
def test_memory_is_constant_over_very_long_streams(family):
    check_stream(tiny_model(family, layers=2), 20_000)


@pytest.mark.parametrize("length", [600, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_query_sees_the_sinks_and_the_window_however_long_the_stream(length):
    """Without a model: every key is one vector at the token's position, every value is the token's number."""
    model = tiny_model("dense", layers=1)
    sinks, window = 4, 64
    cache = PagedCache(model.config, num_blocks=8, block_size=16, sinks=sinks, window=window)
    base = torch.randn(1, model.config.num_key_value_heads, 1, model.model.layers[0].self_attn.head_dim)

    def at(positions):
        """[1, H, n, D] the vector at these positions, [n]."""
        cos, sin = model.model.rotary_emb(base, positions.unsqueeze(0))
        keys = base.expand(-1, -1, len(positions), -1)
        return transformers.models.llama.modeling_llama.apply_rotary_pos_emb(keys, keys, cos, sin)[1]

    placed, held = at(torch.arange(sinks + window)), set()
    cache.open([[0]])
    for token in range(length):
        with cache.begin([0], [[token % 97]]) as step:
            position = int(step.position_ids)
            found, values = cache.update(placed[:, :, position, None], torch.full_like(base, token), 0)
        seen = [*range(min(sinks, token + 1)), *range(max(sinks, token - window + 1), token + 1)]
        assert values[0, 0, :, 0].tolist() == seen
        if token % 97 == 0 or token == length - 1:
            assert torch.allclose(found, at(position - torch.arange(len(seen)).flip(0)), atol=1e-5)
        if token > 2 * window:
            stats = cache.stats()
            held.add((stats["kv_bytes"], stats["gathered_bytes"], stats["groups"][0]["used"] <= 6))
    assert len(held) == 1
    assert held.pop()[1:] == (0, True)


def close(found, expected):
    """Recurrent layers compute in float32, in another order for a prompt than for a token."""
    return bool((found - expected).abs().max() <= 1e-4 * expected.abs().max())


def check_stream(model, length, **options):
    ids = tokens(length)
    cache = PagedCache(model.config, num_blocks=6, block_size=8, sinks=4, window=24, **options)
    loop, used, held = Loop(model, cache), set(), set()
    loop.open(ids)
    while (done := cache.rows[0].length) < length:
        logits = loop.step([0], [ids[done : done + cache.max_query(0, length - done)]])
        assert logits.isfinite().all()
        if done > 200:
            used.add(max(group["used"] for group in cache.stats()["groups"]))
            held.add(cache.stats()["kv_bytes"])
    assert used == {4, 5}  # the sinks' block, and the 3 or 4 that 24 tokens lie in
    assert len(held) == 1 or options
    assert cache.get_seq_length() == 28


def test_rows_of_different_lengths_go_together(model):
    prompts = [tokens(5), tokens(30, 1), tokens(13, 2), tokens(9, 3)]
    alone = [streamed(model, prompt + tokens(30, 9), sinks=3, window=8)[0][-30:] for prompt in prompts]
    loop = Loop(model, PagedCache(model.config, num_blocks=64, block_size=4, sinks=3, window=8))
    loop.open(*prompts)
    waiting = dict(enumerate(prompts))
    while waiting:
        counts = {row: loop.cache.max_query(row, len(ids)) for row, ids in waiting.items()}
        group = loop.cache.together(counts)
        pads = [[0] * (max(counts[row] for row in group) - counts[row]) for row in group]
        ids = [waiting[row][: counts[row]] for row in group]
        with loop.cache.begin(group, ids) as step:
            inputs = {"attention_mask": step.attention_mask, "position_ids": step.position_ids}
            forward(model, [pad + own for pad, own in zip(pads, ids, strict=True)], loop.cache, **inputs)
        waiting = {row: ids[counts[row] * (row in group) :] for row, ids in waiting.items()}
        waiting = {row: ids for row, ids in waiting.items() if ids}
    for place, token in enumerate(tokens(30, 9)):
        logits = loop.step([0, 1, 2, 3], [[token]] * 4)
        for row in range(4):
            assert close(logits[row, 0], alone[row][place])


def test_forks_diverge(model):
    prompt, tails = tokens(25), [tokens(20, 1), tokens(20, 2)]
    expected = [streamed(model, prompt + tail, sinks=4, window=8)[0][25:] for tail in tails]
    _, cache = streamed(model, prompt, sinks=4, window=8)
    cache.fork([0, 0])
    loop = Loop(model, cache)
    found = torch.cat([loop.step([0, 1], [[token] for token in pair]) for pair in zip(*tails, strict=True)], dim=1)
    assert close(found, torch.stack(expected))


def test_rollback_goes_as_far_back_as_was_kept(model):
    ids, tail = tokens(30), tokens(9, 1)
    _, cache = streamed(model, ids, sinks=4, window=8, block_size=2, prefix_cache=False)
    loop = Loop(model, cache)
    cache.activate_past_recording()
    cache.rollback([0])
    loop.extend([0], [tokens(6, 2)])
    assert cache.rollback([6]) == [0]
    expected, _ = streamed(model, ids + tail, sinks=4, window=8)
    assert close(loop.extend([0], [tail])[0], expected[30:])
    # Before what the window kept: everything up to there is forwarded again.
    assert cache.rollback([len(tail) + 3]) == [27]
    assert close(loop.extend([0], [ids[:27] + ids[27:] + tail])[0], expected)


def test_prompts_go_on_from_what_an_earlier_one_left(model):
    first = tokens(40)
    for common in (9, 40):  # inside the window, and behind it
        _, cache = streamed(model, first, sinks=4, window=8, num_blocks=64, checkpoint=4)
        loop = Loop(model, cache)
        second = first[:common] + tokens(30, 5)
        loop.open(second)
        hit = cache.rows[1].num_cached
        assert hit == common // 4 * 4
        assert close(loop.prefill(1, second), streamed(model, second, sinks=4, window=8)[0][hit:])


def test_a_prefix_that_was_hit_takes_no_more_than_a_row():
    model = tiny_model("dense")
    _, cache = streamed(model, tokens(41), sinks=4, window=8, num_blocks=11)
    cache.release([0])
    cache.open([tokens(41)])
    assert cache.rows[0].num_cached == 40
    assert cache.groups[0].pool.used_blocks == 3


def test_snapshots_and_interleaved_steps(model):
    ids, tail = tokens(30), tokens(12, 1)
    _, cache = streamed(model, ids, sinks=4, window=8)
    expected = streamed(model, ids + tail, sinks=4, window=8)[0][30:]
    snapshot = cache.snapshot()
    for _ in range(2):
        assert close(Loop(model, cache).extend([0], [tail])[0], expected)
        cache.restore(snapshot)


def test_admission_counts_what_a_window_keeps():
    cache = PagedCache(tiny_model("dense").config, num_blocks=6, block_size=4, sinks=4, window=8)
    assert cache.can_admit(tokens(10_000), 10_000)
    assert not PagedCache(tiny_model("dense").config, num_blocks=6, block_size=4).can_admit(tokens(20), 10)
    cache = PagedCache(tiny_model("dense").config, num_blocks=3, block_size=4, sinks=4, window=8)
    assert cache.can_admit(tokens(10), 2)
    assert not cache.can_admit(tokens(10), 3)


# What is refused


def test_what_no_mask_can_tell_is_refused():
    model = tiny_model("dense")
    _, cache = streamed(model, tokens(10), sinks=4, window=8)
    with pytest.raises(InputError, match=r"a step of \[3\] tokens after \[10\].*more than the 12"):
        cache.begin([0], [tokens(3)])
    with pytest.raises(Refused, match="does not move keys"):
        cache.begin([0], [tokens(1)], direct=True)
    for call in (lambda: cache.export(0), lambda: cache.load(b"")):
        with pytest.raises(Refused, match="keeps parts of its rows only"):
            call()
    fresh = PagedCache(model.config, num_blocks=8, sinks=4, window=8)
    with pytest.raises(Refused, match=r"custom_generate=decodekit.load\(\{\}\)"):
        model.generate(torch.tensor([tokens(3)]), **{compat.CACHE_KEY: fresh})


@pytest.mark.parametrize(
    ("config", "options", "error", "message"),
    [
        ("Llama", {"sinks": 4}, InputError, "sinks is 4 without a window"),
        ("Llama", {"window": 0}, InputError, "window is 0"),
        ("Llama", {"window": 8, "sinks": -1}, InputError, "sinks -1"),
        ("Llama", {"window": 510, "sinks": 4}, InputError, "need 514 positions; the model has 512"),
        ("Bloom", {"window": 8}, Refused, "bloom is not known to rotate"),
        ("GPT2", {"window": 8}, Refused, "gpt2 is not known to rotate"),
        ("Cohere", {"window": 8}, Refused, "cohere is not known to rotate"),
        ("DeepseekV3", {"window": 8}, Refused, "deepseek_v3 is not known to rotate"),
        ("Qwen2VL", {"window": 8}, Refused, "qwen2_vl_text is not known to rotate"),
        ("Mamba2", {"window": 8}, Refused, "mamba2 is not known to rotate"),
        ("Mistral", {"window": 8}, Refused, "a window of its own"),
    ],
)
def test_models_whose_positions_cannot_be_moved_are_refused(config, options, error, message):
    shape = {"max_position_embeddings": 512} if config == "Llama" else {}
    with pytest.raises(error, match=message):
        PagedCache(getattr(transformers, f"{config}Config")(**shape), num_blocks=4, **options)


def test_frequencies_that_change_with_the_length_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = transformers.LlamaConfig(rope_parameters=rope)
    with pytest.raises(Refused, match="RoPE of type 'dynamic', whose angles change"):
        PagedCache(config, num_blocks=4, window=8)
    PagedCache(config, num_blocks=4)
