import copy

import pytest
import torch

import decodekit
from decodekit.cache.paged import PagedCache
from decodekit.core.compat import CACHE_KEY
from decodekit.core.errors import InputError, Refused, RowError
from decodekit.runtime import caches
from decodekit.runtime.forward import RaggedForward
from decodekit.runtime.paged_session import PagedSession
from decodekit.testing import tiny_model
from tests.runtime.conftest import PROMPTS

pytestmark = pytest.mark.integration

SAMPLED = {"rules": [], "generation": {"do_sample": True, "seed": 1, "max_new_tokens": 24, "num_return_sequences": 5}}


@pytest.fixture
def forwards(monkeypatch):
    """What every forward of a paged session was: rows, tokens, and whether attention read the blocks."""
    seen = []
    original = RaggedForward.__call__

    def noted(self, rows, tokens, *, last=1, direct=False):
        raw = original(self, rows, tokens, last=last, direct=direct)
        seen.append((len(rows), sum(map(len, tokens)), direct))
        return raw

    monkeypatch.setattr(RaggedForward, "__call__", noted)
    return seen


def test_samples_prefill_their_prompt_once_and_equal_the_dynamic_cache(model, padded, forwards) -> None:
    paged = model.generate(**padded(), custom_generate=decodekit.load(SAMPLED))
    prefills = [tokens for rows, tokens, _ in forwards if tokens != rows]
    assert sum(prefills) <= sum(map(len, PROMPTS))
    assert any(direct for *_, direct in forwards)
    dynamic = model.generate(**padded(), custom_generate=decodekit.load({**SAMPLED, "cache": "dynamic"}))
    assert torch.equal(paged, dynamic)


def test_rows_leave_as_they_end(dense, padded, forwards) -> None:
    ended = dense.generate(
        **padded(), max_new_tokens=20, eos_token_id=list(range(20)), custom_generate=decodekit.load({})
    )
    lengths = [len([token for token in row if token != 0]) for row in ended[:, 12:].tolist()]
    steps = [rows for rows, tokens, _ in forwards if tokens == rows]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < 8
    assert sum(steps) <= sum(lengths)


def test_prompts_of_any_lengths_share_a_prefill_where_no_state_would_see_pads(padded, forwards) -> None:
    decoder = decodekit.load({"generation": {"max_new_tokens": 1}})
    tiny_model("dense").generate(**padded(), custom_generate=decoder)
    assert [rows for rows, *_ in forwards] == [8]
    forwards.clear()
    tiny_model("hybrid").generate(**padded(), custom_generate=decoder)
    assert sorted(rows for rows, *_ in forwards) == [1, 1, 1, 1, 2, 2]  # those of equal length


@pytest.fixture
def packed(monkeypatch):
    """Lets attention read blocks here, too, as on a GPU; the tokens of the rows of every packed forward."""
    monkeypatch.setattr("decodekit.runtime.places.triton_runs", lambda device: True)
    seen = []
    original = RaggedForward.packed

    def noted(self, rows, tokens, kept):
        raw = original(self, rows, tokens, kept)
        seen.append([len(ids) for ids in tokens])
        assert raw.logits.shape[:2] == (1, len(kept))
        return raw

    monkeypatch.setattr(RaggedForward, "packed", noted)
    return seen


PACKED = ["dense", "sliding"]
RECIPES = [
    {},
    {"strategy": {"kind": "dola", "layers": [1, 2]}},
    {"strategy": {"kind": "contrastive_search", "top_k": 3, "penalty_alpha": 0.6}},
    {"drafter": {"kind": "ngram"}},
]


@pytest.mark.parametrize("family", PACKED)
@pytest.mark.parametrize("recipe", RECIPES, ids=["plain", "dola", "contrastive_search", "ngram"])
def test_rows_of_other_lengths_are_packed_where_attention_reads_blocks(family, recipe, padded, packed) -> None:
    model = tiny_model(family).double()
    options = {"max_new_tokens": 12, "min_new_tokens": 12}
    found = model.generate(**padded(), **options, custom_generate=decodekit.load(recipe))
    # The first, alone, shows the masks that transformers makes of it; then the others, without a pad.
    assert packed[0] == [len(prompt) for prompt in PROMPTS if len(prompt) != len(PROMPTS[0])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decodekit.runtime.places.triton_runs", lambda device: False)
        assert torch.equal(found, model.generate(**padded(), **options, custom_generate=decodekit.load(recipe)))


def test_a_model_that_cannot_be_told_positions_is_not_packed(padded, packed, monkeypatch) -> None:
    model = tiny_model("dense")
    expected = model.generate(**padded(), custom_generate=decodekit.load({}))
    assert packed
    packed.clear()
    monkeypatch.setattr(RaggedForward, "packs", False)
    assert torch.equal(expected, model.generate(**padded(), custom_generate=decodekit.load({})))
    assert not packed


def test_a_model_from_elsewhere_that_counts_logits_from_the_end_is_packed_all_the_same(packed, monkeypatch) -> None:
    model = tiny_model("dense").double()
    prompts = [list(range(3, 8)), list(range(4, 37))]

    def outputs():
        with decodekit.Engine(model, None, {}, tokens_per_step=12) as engine:
            requests = [engine.submit(ids, max_new_tokens=6, eos_token_id=None) for ids in prompts]
            return [request.result().token_ids for request in requests]

    expected = outputs()
    original = type(model).forward

    def forward(self, input_ids, attention_mask=None, position_ids=None, logits_to_keep=0, **kwargs):
        outputs = original(self, input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        outputs.logits = outputs.logits[:, -logits_to_keep:]
        return outputs

    elsewhere = type("Elsewhere", (type(model),), {"forward": forward, "__module__": "somewhere"})
    monkeypatch.setattr(model, "__class__", elsewhere)
    packed.clear()
    assert outputs() == expected
    assert packed


@pytest.mark.parametrize("direct", [False, True])
def test_a_model_that_hands_its_inputs_on_unnamed_is_told_positions_and_pads(
    padded, packed, monkeypatch, direct
) -> None:
    """As wrappers do that add adapters."""
    model = tiny_model("sliding").double()
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "custom_generate": decodekit.load({})}
    expected = model.generate(**padded(), **options)
    monkeypatch.setattr("decodekit.runtime.places.triton_runs", lambda device: direct)
    own = type(model)

    def forward(self, input_ids=None, **kwargs):
        return own.forward(self, input_ids=input_ids, **kwargs)

    wrapped = type("Wrapped", (own,), {"forward": forward, "__module__": "somewhere"})
    monkeypatch.setattr(model, "__class__", wrapped)
    packed.clear()
    assert torch.equal(model.generate(**padded(), **options), expected)
    assert bool(packed) == direct


def test_rows_that_a_model_cannot_pack_are_grouped_anew(padded, packed, monkeypatch) -> None:
    model = tiny_model("dense")
    expected = model.generate(**padded(), max_new_tokens=6, custom_generate=decodekit.load({}))
    asked = []

    def refused(self, rows, tokens, kept):
        asked.append(rows)
        raise Refused("not this model")

    monkeypatch.setattr(RaggedForward, "packed", refused)
    assert torch.equal(model.generate(**padded(), max_new_tokens=6, custom_generate=decodekit.load({})), expected)
    assert len(asked) == 1


def test_an_unknown_head_is_refused_in_the_first_packed_forward(packed, monkeypatch) -> None:
    model = tiny_model("dense")
    prompts = [list(range(3, 8)), list(range(4, 37))]

    def outputs():
        recipe = {"strategy": {"kind": "dola", "layers": [1, 2]}}
        with decodekit.Engine(model, None, recipe, tokens_per_step=12) as engine:
            requests = [engine.submit(ids, max_new_tokens=4, eos_token_id=None) for ids in prompts]
            return [request.result() for request in requests]

    assert all(output.error is None for output in outputs())
    original = type(model).forward

    def forward(self, *args, **kwargs):
        outputs = original(self, *args, **kwargs)
        outputs.logits = 3 * outputs.logits
        return outputs

    monkeypatch.setattr(type(model), "forward", forward)
    assert all("output head" in str(output.error) for output in outputs())


def test_a_model_that_does_not_hand_the_step_down_is_gathered_for(forwards) -> None:
    from transformers import StableLmConfig, StableLmForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = StableLmConfig(**sizes, num_key_value_heads=2, initializer_range=0.5, pad_token_id=0, eos_token_id=1)
    model = StableLmForCausalLM(config).double().eval()
    ids = torch.tensor([[5, 17, 42, 8]])
    paged = model.generate(ids, custom_generate=decodekit.load(SAMPLED))
    assert not any(direct for *_, direct in forwards)
    assert torch.equal(paged, model.generate(ids, custom_generate=decodekit.load({**SAMPLED, "cache": "dynamic"})))
    assert model.config._attn_implementation != "decodekit"


def test_a_cache_of_the_callers_serves_call_after_call_and_never_stale_tokens(model) -> None:
    cache = PagedCache(model.config, num_blocks=200, block_size=4)
    decoder, first = decodekit.load({}), [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
    prompts = [first, [*first, 20, 21, 22], [*first[:6], 50, 51, 52, 53, 54], [60, 61, 62], first]
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 9, "suppress_tokens": [1]}
        got = model.generate(ids, **options, custom_generate=decoder, **{CACHE_KEY: cache})
        assert torch.equal(got, model.generate(ids, **options))
        assert cache.rows == []
    hits = sum(group["hits"] for group in cache.stats()["groups"])
    assert hits > 0
    output, *_ = decoder.run(
        model, _Ids(first), "x", raw=True, max_new_tokens=2, suppress_tokens=[1], **{CACHE_KEY: cache}
    )
    assert output.stats["forwarded_tokens"] < len(first) + 1


@pytest.mark.parametrize("family", ["dense", "hybrid"])
@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_a_shared_prefix_is_reused_and_another_prompt_never_gets_its_tokens(family, host_bytes, forwards) -> None:
    model = tiny_model(family, dtype=torch.float64)
    cache = PagedCache(model.config, num_blocks=10, block_size=4, host_bytes=host_bytes)
    prefix = list(range(7, 24))
    options = {"max_new_tokens": 7, "suppress_tokens": [1]}

    def forwarded(prompt) -> int:
        """Prompt tokens that were computed; the whole call's tokens are those without a cache."""
        forwards.clear()
        ids = torch.tensor([prompt])
        got = model.generate(ids, **options, custom_generate=decodekit.load({}), **{CACHE_KEY: cache})
        computed = sum(tokens for _, tokens, _ in forwards) - options["max_new_tokens"] + 1
        assert torch.equal(got, model.generate(ids, **options))
        assert cache.rows == []
        return computed

    def hits() -> int:
        return sum(group["hits"] for group in cache.stats()["groups"])

    assert forwarded([*prefix, 30, 31]) == 19
    assert hits() == 0
    assert forwarded([*prefix, 40, 41, 42]) == 4  # 4 full blocks of 4 are there
    assert hits() == 4
    for first in (60, 61, 62):  # as long, of other tokens: the pool is too small for all
        assert forwarded([first, *prefix[1:], 30, 31]) == 19
    assert hits() == 4
    assert forwarded([*prefix, 50]) == (2 if host_bytes else 18)
    assert hits() == (8 if host_bytes else 4)
    assert cache.stats()["host"]["hits"] == (4 if host_bytes else 0)


class _Ids:
    """A tokenizer that gives the same ids for every text."""

    pad_token_id, eos_token_id, all_special_ids, chat_template = 0, 1, [0, 1, 2], None

    def __init__(self, ids) -> None:
        self.input_ids = ids

    def __call__(self, text, **_):
        return self

    def decode(self, ids, **_) -> str:
        return "x" * len(ids)


def test_a_budget_that_cannot_hold_the_call_is_refused_before_prefill(dense, padded, forwards) -> None:
    # 4 layers, 2 K/V heads of 8, 2 x 8 bytes each: 1 KiB a token, 16 KiB a block.
    decoder = decodekit.load({"cache": {"kind": "paged", "budget": "128KiB"}})
    with pytest.raises(InputError, match=r"cache.budget 128 KiB holds 128 tokens in blocks of 16; this call may need"):
        dense.generate(**padded(), max_new_tokens=30, custom_generate=decoder)
    assert forwards == []
    assert dense.generate(torch.tensor([[5, 6]]), max_new_tokens=30, custom_generate=decoder).shape[0] == 1


def test_what_steps_gather_is_kept_within_the_budget(dense, padded, monkeypatch) -> None:
    most = []

    class Watched(PagedCache):
        def commit(self) -> None:
            super().commit()
            stats = self.stats()
            most[-1] = max(most[-1], (stats["gathered_bytes"], stats["kv_bytes"]))

    monkeypatch.setattr(caches, "PagedCache", Watched)
    tokens = []
    for budget in (None, "2MiB", "512KiB"):
        most.append((0, 0))
        decoder = decodekit.load({"cache": {"kind": "paged", "budget": budget}})
        tokens.append(dense.generate(**padded(), max_new_tokens=30, eos_token_id=-1, custom_generate=decoder).tolist())
    assert tokens[0] == tokens[1] == tokens[2]
    assert most[0] == most[1]
    assert 0 < sum(most[1]) <= 2 * 2**20
    assert most[2] == (0, most[1][1])
    assert most[2][1] <= 512 * 1024 < sum(most[1])


def test_a_recipe_can_quantize_keys_and_values(dense, forwards) -> None:
    # A block of 16 tokens in int4: 4 layers, 2 heads, 16 x (4 + 4) bytes of codes, (8 + 16) x 4 of scales: 1.75 KiB; and
    # one in full precision, 16 KiB. The call needs 5.
    prompt = torch.tensor([list(range(3, 33))])
    options = {"max_new_tokens": 30, "min_new_tokens": 30, "return_dict_in_generate": True, "output_logits": True}

    def generated(**cache):
        decoder = decodekit.load({"cache": {"kind": "paged", **cache}})
        return torch.stack(dense.generate(prompt, **options, custom_generate=decoder).logits)

    full, int8, int2 = (generated(quantization=kind) for kind in (None, "int8", "int2"))
    assert 0 < (int8 - full)[:2].abs().mean() < (int2 - full)[:2].abs().mean()
    assert len(generated(quantization="int4", budget="25KiB")) == 30
    with pytest.raises(InputError, match=r"raise it to 24\.75 KiB"):
        generated(quantization="int4", budget="20KiB")
    decoder = decodekit.load({"cache": {"kind": "paged", "quantization": "int4"}})
    samples = dense.generate(
        prompt, max_new_tokens=4, do_sample=True, num_return_sequences=3, custom_generate=decoder
    )  # blocks that attention cannot read in place
    assert samples.shape == (3, 34)


def test_steps_read_quantized_blocks_where_they_lie_and_prefills_gather_them(forwards, monkeypatch) -> None:
    model = tiny_model("dense")
    prompt = torch.tensor([list(range(3, 33))])
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}

    def generated():
        decoder = decodekit.load({"cache": {"kind": "paged", "quantization": "int8"}})
        return torch.stack(model.generate(prompt, **options, custom_generate=decoder).logits)

    gathered = generated()
    assert not any(direct for *_, direct in forwards)
    forwards.clear()
    for module in ("runtime.places", "kernels.paged_attention"):
        monkeypatch.setattr(f"decodekit.{module}.triton_runs", lambda device: True)
    torch.testing.assert_close(generated(), gathered, atol=1e-3, rtol=0)
    assert [(tokens, direct) for _, tokens, direct in forwards] == [(30, False)] + 5 * [(1, True)]


def test_a_paged_cache_that_was_asked_for_and_cannot_be_had_is_refused(dense) -> None:
    decoder = decodekit.load({"cache": "paged"})
    with pytest.raises(Refused, match=r"cache: \{kind: paged\} cannot be used here: use_cache is off"):
        dense.generate(torch.tensor([[5, 6]]), use_cache=False, custom_generate=decoder)
    assert dense.generate(torch.tensor([[5, 6]]), use_cache=False, custom_generate=decodekit.load({})).shape[0] == 1


def test_an_interrupted_call_gives_its_blocks_back(dense, monkeypatch) -> None:
    cache = PagedCache(dense.config, num_blocks=50, prefix_cache=False)
    original, calls = PagedSession.step, []

    def interrupted(self, rows, tokens, last):
        calls.append(rows)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, rows, tokens, last)

    monkeypatch.setattr(PagedSession, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dense.generate(
            torch.tensor([[5, 6]]), custom_generate=decodekit.load({}), max_new_tokens=9, **{CACHE_KEY: cache}
        )
    assert cache.stats()["groups"][0]["used"] == 0


# Windows


def windowed(**options):
    return decodekit.load({"cache": {"kind": "paged", "window": 12, "sinks": 4, "block_size": 4, **options}})


def test_a_window_goes_on_beyond_the_context_in_constant_memory(model) -> None:
    model = copy.deepcopy(model)
    model.config.max_position_embeddings = 32
    prompt = list(range(3, 43))
    # Layers: 4, of 2 K/V heads of 8, in float64: 1 KiB a token; a row has 5 blocks of 4 tokens.
    options = {"max_new_tokens": 100, "min_new_tokens": 100, "return_dict_in_generate": True}
    output = model.generate(torch.tensor([prompt]), **options, custom_generate=windowed(budget="21KiB"))
    cache = getattr(output, CACHE_KEY)
    assert cache.stats()["groups"][-1]["num_blocks"] == 5
    assert output.sequences.shape == (1, 140)
    with pytest.raises(RowError, match="40 tokens, the model's context holds 32"):
        model.generate(torch.tensor([prompt]), **options, custom_generate=decodekit.load({"cache": "paged"}))
    own = PagedCache(model.config, num_blocks=50, block_size=4, window=12, sinks=4)
    again = model.generate(torch.tensor([prompt]), **options, custom_generate=decodekit.load({}), **{CACHE_KEY: own})
    assert torch.equal(again.sequences, output.sequences)
    plain = PagedCache(model.config, num_blocks=50, block_size=4, window=28, sinks=4)
    other = model.generate(torch.tensor([prompt]), **options, custom_generate=decodekit.load({}), **{CACHE_KEY: plain})
    assert not torch.equal(other.sequences, output.sequences)


def test_rows_under_a_window_are_as_alone(model, padded) -> None:
    options = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": True, "num_return_sequences": 2}
    prompts = [*PROMPTS[:3], list(range(20, 45))]
    recipe = {"cache": {"kind": "paged", "window": 12, "block_size": 4}, "generation": {"seed": 3}}
    decoder = decodekit.load(recipe)
    together = model.generate(**padded(prompts), **options, custom_generate=decoder)
    for place, prompt in enumerate(prompts):
        alone = model.generate(torch.tensor([prompt]), **options, custom_generate=decoder)
        assert torch.equal(together[2 * place : 2 * place + 2, -30:], alone[:, -30:])


def test_what_a_window_cannot_do_is_refused(dense, tokenizer) -> None:
    scores = windowed().score(dense, tokenizer, "the lamp", " is r", raw=True)
    assert scores == pytest.approx(decodekit.load({}).score(dense, tokenizer, "the lamp", " is r", raw=True))
    with pytest.raises(Refused, match=r"tokens cannot be scored with cache.window 12: .* up to 16 can"):
        windowed().score(dense, tokenizer, "the lamp", " is red while it charges", raw=True)
    with pytest.raises(InputError, match="need 3004 positions; the model has 2048"):
        dense.generate(torch.tensor([[5, 6]]), custom_generate=windowed(window=3000))


def test_prompts_that_would_be_padded_much_are_forwarded_apart(dense) -> None:
    shapes, lengths = [], (120, 30, 117, 28)
    prompts = [[(row + 3 * place) % 90 for place in range(length)] for row, length in enumerate(lengths)]
    handle = dense.register_forward_pre_hook(
        lambda module, arguments, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    try:
        cache = PagedCache(dense.config, num_blocks=40)
        session = PagedSession(dense, cache)
        for row, prompt in enumerate(prompts):
            session.expect(row, {"main": prompt})
        logits = session.prefill(range(4))["main"].logits
    finally:
        handle.remove()
    assert shapes == [(2, 120), (2, 30)]
    for row, prompt in enumerate(prompts):
        expected = dense(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(logits[row], expected)
