"""The attention function on tiny models, with a minimal paged cache, against the models' own attention row by row."""

import pytest
import torch
from transformers import CONFIG_MAPPING, DynamicCache

from decodekit.cache import attention as module
from decodekit.cache.attention import NAME, NAME_OF_FEW, Layout, check_config
from decodekit.core.compat import CACHE_KEY
from decodekit.core.errors import Refused
from decodekit.kernels.paged_attention import paged_attention

from .families import family_model

pytestmark = pytest.mark.integration

SERVED = ["llama", "mistral", "gemma3", "gemma2", "gpt_oss", "qwen3_5", "falcon_h1"]
BLOCK = 4
PROMPTS = [[5, 17, 42, 8, 9, 30, 61, 77, 12, 4, 3], [50, 3, 7, 9], [23, 88, 64, 10, 11, 12, 13, 14]]


class FakePaged(DynamicCache):
    """As little of a paged cache as the attention needs; it is its own step. Unwritten slots are NaN."""

    def __init__(self, config, rows, blocks=16):
        super().__init__(config=config)
        self.windows = [getattr(layer, "sliding_window", None) for layer in self.layers]
        self.table = torch.randperm(rows * blocks).view(rows, blocks)
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        self.stores = {}

    def begin(self, query_length, counts):
        """The last ``counts[r]`` of each row's ``query_length`` queries are new tokens, those before are pads."""
        self.before, self.counts, self.q = self.lengths, torch.tensor(counts), query_length
        self.lengths = self.lengths + self.counts
        starts = torch.arange(len(counts) + 1) * query_length
        self.layouts = {window: Layout(self.table, self.lengths, starts, BLOCK, window) for window in set(self.windows)}

    def layout(self, layer_idx):
        return self.layouts[self.windows[layer_idx]]

    def kv(self, layer_idx):
        return self.stores[layer_idx]

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx not in self.stores:
            self.stores[layer_idx] = tuple(
                torch.full((self.table.numel() * BLOCK, states.shape[1], states.shape[3]), torch.nan)
                for states in (key_states, value_states)
            )
        for row, count in enumerate(self.counts.tolist()):
            tokens = torch.arange(int(self.before[row]), int(self.lengths[row]))
            slots = self.table[row, tokens // BLOCK] * BLOCK + tokens % BLOCK
            for store, states in zip(self.stores[layer_idx], (key_states, value_states), strict=True):
                store[slots] = states[row, :, self.q - count :].transpose(0, 1)
        return key_states, value_states

    def get_seq_length(self, layer_idx=0):
        return int(self.before.max())

    def get_query_offset(self, layer_idx=0):
        return self.get_seq_length()

    def get_mask_sizes(self, query_length, layer_idx):
        return self.get_seq_length() + query_length, 0


@pytest.fixture
def family(request):
    """A model whose attention implementation the test may change."""
    model = family_model(request.param)
    own = model.config._attn_implementation
    yield model
    model.set_attn_implementation(own)


def every_family(names):
    return pytest.mark.parametrize("family", names, indirect=True)


def own_logits(model, sequences, steps):
    """Each row alone, forwarded in these steps with the model's own attention and cache."""
    model.set_attn_implementation("eager")
    rows = []
    for ids in sequences:
        cache, logits, start = DynamicCache(config=model.config), [], 0
        for count in [len(ids) - sum(steps), *steps]:
            places = torch.arange(start, start + count)[None]
            logits.append(model(torch.tensor(ids)[places], position_ids=places, **{CACHE_KEY: cache}).logits[0])
            start += count
        rows.append(torch.cat(logits))
    return rows


def paged_step(model, cache, tokens, *, padded=False, **more):
    """Forward the next tokens of each row, [R][...], left-padded to the longest; the logits of each row's tokens."""
    width = max(map(len, tokens))
    counts = [len(row) for row in tokens]
    cache.begin(width, counts)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in tokens])
    positions = (cache.lengths[:, None] - width + torch.arange(width)).clamp(min=0)
    if padded:
        columns = torch.arange(int(cache.before.max()) + width)
        more["attention_mask"] = (columns >= len(columns) - cache.lengths[:, None]).long()
    more = {"position_ids": positions, CACHE_KEY: cache, "dk_cache": cache} | more
    logits = model(ids, **more).logits
    return [row[width - count :] for row, count in zip(logits, counts, strict=True)]


def continuations(rows, length):
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(1)).tolist()


def close(actual, expected, tolerance=1e-5):
    for row, own in zip(actual, expected, strict=True):
        torch.testing.assert_close(row, own, atol=tolerance * max(1.0, float(own.abs().max())), rtol=0)


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "2d mask"])
@every_family(SERVED)
def test_equals_the_models_own_attention(family, masked) -> None:
    steps = [1, 5, 1, 1]
    tails = continuations(3, sum(steps))
    expected = own_logits(family, [p + t for p, t in zip(PROMPTS, tails, strict=True)], steps)
    family.set_attn_implementation(NAME)
    cache = FakePaged(family.config, 3)
    logits = [paged_step(family, cache, PROMPTS, padded=True)]
    start = 0
    for count in steps:
        logits.append(paged_step(family, cache, [t[start : start + count] for t in tails], padded=masked))
        start += count
    close([torch.cat(row) for row in zip(*logits, strict=True)], expected)


@every_family([name for name in SERVED if name not in ("qwen3_5", "falcon_h1")])
def test_rows_go_on_from_different_depths_of_a_draft(family) -> None:
    drafts, tails = continuations(3, 5), [[31, 32, 33], [34, 35, 36], [37, 38, 39]]
    kept = [0, 4, 2]
    sequences = [p + d[:k] + t for p, d, k, t in zip(PROMPTS, drafts, kept, tails, strict=True)]
    expected = own_logits(family, sequences, [3])
    family.set_attn_implementation(NAME)
    cache = FakePaged(family.config, 3)
    paged_step(family, cache, PROMPTS, padded=True)
    paged_step(family, cache, drafts)
    cache.lengths = cache.lengths - 5 + torch.tensor(kept)
    close(paged_step(family, cache, tails), [row[-3:] for row in expected])


@every_family(["qwen3_5"])
def test_only_full_layers_of_a_hybrid_use_blocks(family) -> None:
    family.set_attn_implementation(NAME)
    cache = FakePaged(family.config, 1)
    paged_step(family, cache, PROMPTS[:1])
    assert sorted(cache.stores) == [1, 3]


@every_family(["gemma3"])
def test_blocks_that_a_window_let_go_are_not_read(family) -> None:
    tail = continuations(1, 9)
    expected = own_logits(family, [PROMPTS[0] + tail[0]], [9])
    family.set_attn_implementation(NAME)
    cache = FakePaged(family.config, 1)
    paged_step(family, cache, PROMPTS[:1])
    full = cache.table
    gone = (len(PROMPTS[0]) - 7 + 1) // BLOCK
    slots = (full[0, :gone, None] * BLOCK + torch.arange(BLOCK)).flatten()
    for layer, window in enumerate(cache.windows):
        if window:
            for store in cache.stores[layer]:
                store[slots] = torch.nan
    cache.begin(9, [9])
    cache.layouts[7].block_table = full.index_fill(1, torch.arange(gone), -1)
    logits = family(torch.tensor(tail), **{CACHE_KEY: cache, "dk_cache": cache}).logits
    close(logits, [expected[0][-9:]])


@every_family(["llama"])
def test_layers_of_a_group_share_one_plan(family, monkeypatch) -> None:
    seen = []

    def spy(*arguments, **options):
        seen.append(options["parts"])
        return paged_attention(*arguments, **options)

    monkeypatch.setattr("decodekit.cache.attention.paged_attention", spy)
    family.set_attn_implementation(NAME)
    paged_step(family, FakePaged(family.config, 3), PROMPTS, padded=True)
    assert len(seen) == 4
    assert all(parts is seen[0] for parts in seen)


@every_family(["llama", "mistral", "gemma3", "qwen3_5"])
def test_without_a_step_it_is_sdpa(family) -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    family.set_attn_implementation("sdpa")
    expected = family.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)
    family.set_attn_implementation(NAME)
    assert torch.equal(family.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0), expected)


@every_family(["llama", "mistral", "gemma3", "qwen3_5"])
def test_a_few_tokens_share_their_k_and_v(family) -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    logits = {}
    for name in ("eager", NAME_OF_FEW):
        family.set_attn_implementation(name)
        logits[name] = family(**inputs).logits[inputs["attention_mask"] > 0]
    torch.testing.assert_close(logits[NAME_OF_FEW], logits["eager"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["softcap", "s_aux", "position_bias"])
def test_scores_that_are_changed_are_left_to_sdpa(monkeypatch, change) -> None:
    given = {}
    monkeypatch.setattr(module, "_sdpa", lambda *_, **kwargs: given.update(kwargs))
    heads, mask = torch.randn(1, 4, 3, 8), torch.ones(1, 1, 3, 3, dtype=torch.bool)
    module.attention_of_few(torch.nn.Identity(), heads, heads[:, :2], heads[:, :2], mask, **{change: 1.0})
    assert given == {change: 1.0}


@every_family(["gemma2", "gpt_oss"])
def test_softcap_and_sinks_need_a_step(family) -> None:
    family.set_attn_implementation(NAME)
    with pytest.raises(Refused, match="needs a paged step"):
        family(torch.tensor([[5, 6, 7]]))


@every_family(["deepseek_v3"])
def test_mla_is_refused_with_its_reason(family) -> None:
    with pytest.raises(Refused, match=r"deepseek_v3 caches latents \(MLA\)"):
        check_config(family.config)
    family.set_attn_implementation(NAME)
    with pytest.raises(Refused, match="changes its K/V after the cache's update"):
        paged_step(family, FakePaged(family.config, 1), PROMPTS[:1])


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("gemma3n_text", {"num_kv_shared_layers": 2}, "layers that attend to other layers' K/V"),
        ("llama4_text", {}, "attends in chunks"),
        ("diffllama", {}, "exchanges halves of its values"),
    ],
)
def test_models_that_do_not_attend_to_what_they_cache_are_refused(kind, options, reason) -> None:
    with pytest.raises(Refused, match=reason):
        check_config(CONFIG_MAPPING[kind](**options))


@every_family(SERVED)
def test_which_models_are_served(family) -> None:
    check_config(family.config)


@every_family(["llama"])
def test_other_masks_are_refused(family) -> None:
    family.set_attn_implementation(NAME)
    causal = torch.ones(11, 11, dtype=torch.bool).tril()
    image = causal.clone()
    image[2:5, 2:5] = True
    paged_step(family, FakePaged(family.config, 1), PROMPTS[:1], attention_mask=causal[None, None])
    for mask in (image[None, None], torch.zeros(1, 1, 11, 11)):
        with pytest.raises(Refused, match="the attention mask shows tokens other than"):
            paged_step(family, FakePaged(family.config, 1), PROMPTS[:1], attention_mask=mask)


@every_family(["mistral"])
def test_a_window_that_the_cache_does_not_have_is_refused(family) -> None:
    family.set_attn_implementation(NAME)
    cache = FakePaged(family.config, 1)
    cache.windows = [None] * 4
    with pytest.raises(Refused, match="layer 0 has a window of 7, its cache one of None"):
        paged_step(family, cache, PROMPTS[:1])


@every_family(["llama"])
def test_dropout_and_changed_scores_are_refused(family, monkeypatch) -> None:
    family.set_attn_implementation(NAME)
    with pytest.raises(Refused, match="uses position_bias"):
        paged_step(family, FakePaged(family.config, 1), PROMPTS[:1], position_bias=torch.zeros(1))
    monkeypatch.setattr(family.model.layers[0].self_attn, "attention_dropout", 0.1)
    monkeypatch.setattr(family.model.layers[0].self_attn, "training", True)
    with pytest.raises(Refused, match=r"call model\.eval\(\)"):
        paged_step(family, FakePaged(family.config, 1), PROMPTS[:1])
