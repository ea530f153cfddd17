"""The facade: blocks, prefixes, rollback and refusals; logits are compared in test_families."""

import copy
import itertools
import os
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import DynamicCache

import decodekit
from decodekit.cache import blocks, gather, gathered, paged, rectangle, rows, states, stepping, steps, storage
from decodekit.cache.allocator import OutOfBlocks
from decodekit.cache.paged import PagedCache
from decodekit.cache.prefix import Prompt
from decodekit.core.compat import CACHE_KEY, CROP_TAKES_A_LENGTH
from decodekit.core.errors import InputError, Refused
from decodekit.testing import tiny_model
from tests.cache import interrupts
from tests.cache.families import Loop, family_model, forward

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def dense():
    return tiny_model("dense")


@pytest.fixture(scope="module")
def sliding():
    return tiny_model("sliding")


@pytest.fixture(scope="module")
def hybrid():
    return tiny_model("hybrid")


def tokens(count, seed=0):
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def opened(model, *prompts, **options):
    loop = Loop(model, PagedCache(model.config, **{"num_blocks": 64, "block_size": 4, **options}))
    for number, prompt in zip(loop.open(*prompts), prompts, strict=True):
        loop.prefill(number, prompt)
    return loop


def used(cache):
    return [group.pool.used_blocks for group in cache.groups]


def test_rows_reference_as_many_blocks_as_their_tokens_fill(dense):
    for size, count in itertools.product((1, 3, 16), (1, 2, 15, 16, 17, 33)):
        assert used(opened(dense, tokens(count), block_size=size).cache) == [-(-count // size)]


def test_forks_share_all_blocks_until_they_diverge(dense):
    loop = opened(dense, tokens(203), block_size=16)
    pool = loop.cache.groups[0].pool
    assert pool.used_blocks == 13
    loop.cache.fork([0] * 4)
    assert pool.used_blocks == 13
    loop.step([0, 1, 2, 3], [[5], [6], [7], [8]])
    assert pool.used_blocks == 13 + 3
    assert pool.stats()["copies"] == 3
    loop.cache.release([0, 1, 2, 3])
    assert pool.used_blocks == 0


def test_the_last_owner_needs_no_block_for_a_copy(dense):
    loop = opened(dense, tokens(6), num_blocks=3)
    loop.cache.fork([0, 0])
    loop.step([0, 1], [[5], [6]])
    assert used(loop.cache) == [3]


def test_a_step_without_room_takes_nothing(sliding):
    loop = opened(sliding, tokens(8), tokens(7, 1), num_blocks=5)
    before = used(loop.cache)
    with pytest.raises(OutOfBlocks, match="2 blocks needed, 1 free"):
        loop.step([0, 1], [tokens(2)] * 2)
    assert used(loop.cache) == before
    loop.step([1], [[5]])
    assert [row.length for row in loop.cache.rows] == [8, 8]


def test_a_window_lets_go_of_what_no_query_sees(sliding):
    loop = opened(sliding, tokens(9))
    window, full = (group.pool for group in loop.cache.groups)
    for token in tokens(40, 1):
        loop.step([0], [[token]])
    assert window.used_blocks == 2
    assert full.used_blocks == 13


def test_prompts_share_blocks_that_begin_alike(dense):
    prompt = tokens(17)
    loop = opened(dense, prompt)
    loop.open(prompt, prompt[:9], [*prompt[:8], 3, 3, 3], tokens(9, 1))
    assert [row.num_cached for row in loop.cache.rows] == [0, 16, 8, 8, 0]
    assert loop.cache.rows[1].tokens == prompt[:16]


def test_prompts_of_other_tenants_share_nothing(dense):
    prompt = tokens(17)
    loop = opened(dense, prompt, salt=b"a")
    loop.cache.open([prompt, Prompt(prompt, salt=b"b"), Prompt(prompt, salt=b"a"), Prompt(prompt, extra="adapter")])
    assert [row.num_cached for row in loop.cache.rows] == [0, 16, 0, 16, 0]
    loop = opened(dense, prompt, prefix_cache=False)
    loop.open(prompt)
    assert loop.cache.rows[1].num_cached == 0


def test_a_hybrid_is_hit_only_where_its_states_were_saved(hybrid):
    prompt = tokens(39)
    for policy, expected in (("prompt", 36), (10, 36), (16, 32), (None, 0)):
        loop = opened(hybrid, prompt, checkpoint=policy)
        loop.open([*prompt, 5])
        assert loop.cache.rows[1].num_cached == expected
        found = loop.prefill(1, [*prompt, 5])[-1]
        assert torch.allclose(found, forward(hybrid, [[*prompt, 5]])[0, -1], atol=1e-4)


@pytest.mark.parametrize("name", ["hybrid", "mamba2"])
def test_states_of_other_tenants_are_not_hit(name, request):
    model, prompt = request.getfixturevalue(name) if name == "hybrid" else family_model(name), tokens(17)
    loop = opened(model, prompt, salt="a")
    loop.cache.open([Prompt([*prompt, 5], salt=salt) for salt in ("a", "b")])
    assert [row.num_cached for row in loop.cache.rows] == [0, 16, 0]
    unsalted = opened(model, prompt)
    unsalted.cache.open([[*prompt, 5], Prompt([*prompt, 5], salt="a")])
    assert [row.num_cached for row in unsalted.cache.rows] == [0, 16, 0]


def test_a_checkpoint_goes_with_its_block(hybrid):
    loop = opened(hybrid, tokens(17), num_blocks=6)
    assert loop.cache.stats()["checkpoints"] == 1
    loop.cache.release([0])
    loop.open(tokens(20, 1))
    loop.prefill(0, tokens(20, 1))
    assert loop.cache.stats()["checkpoints"] == 1
    loop.open(tokens(17))
    assert loop.cache.rows[1].num_cached == 0


def test_checkpoints_are_few(hybrid):
    loop = opened(hybrid, *[tokens(9, seed) for seed in range(5)], max_checkpoints=2)
    assert loop.cache.stats()["checkpoints"] == 2


def test_rollback_of_attention_forwards_nothing_again(dense, sliding):
    for model in (dense, sliding):
        loop = opened(model, tokens(11), tokens(5, 1))
        loop.cache.activate_past_recording()
        loop.cache.rollback([0, 0])
        loop.step([0, 1], [tokens(6, 2), tokens(6, 3)])
        assert loop.cache.rollback([6, 2]) == [0, 0]
        assert [row.length for row in loop.cache.rows] == [11, 9]


def test_a_hybrid_goes_back_to_the_end_of_a_step(hybrid):
    loop = opened(hybrid, tokens(21))
    loop.cache.activate_past_recording()
    loop.cache.rollback([0])
    for token in (5, 6, 7):
        loop.step([0], [[token]])
    assert loop.cache.rollback([2]) == [0]
    loop.step([0], [[5, 6, 7]])
    assert loop.cache.rollback([1]) == [2]
    assert loop.cache.rows[0].length == 22


def test_a_hybrid_without_records_goes_back_to_its_checkpoint(hybrid):
    loop = opened(hybrid, tokens(21))
    assert loop.cache.rollback([0]) == [0]
    assert loop.cache.rollback([0]) == [0]
    loop.step([0], [[5]])
    assert loop.cache.rollback([1]) == [1]
    assert loop.cache.rows[0].length == 20


def test_a_released_snapshot_gives_its_blocks_back(hybrid):
    loop = opened(hybrid, tokens(18))
    snapshot = loop.cache.snapshot()
    loop.cache.release([0])
    assert used(loop.cache) == [5]
    snapshot.release()
    assert used(loop.cache) == [0]


def test_reset_gives_everything_back(hybrid):
    loop = opened(hybrid, tokens(18), tokens(3, 1))
    loop.cache.reset()
    assert used(loop.cache) == [0]
    assert loop.cache.rows == []
    loop.open(tokens(18))
    assert loop.cache.rows[0].num_cached == 0
    assert torch.allclose(loop.prefill(0, tokens(18))[-1], forward(hybrid, [tokens(18)])[0, -1], atol=1e-4)


def test_one_rows_states_keep_no_neighbour_alive(hybrid):
    loop = opened(hybrid, *[tokens(5, seed) for seed in range(4)])
    loop.step([0, 1, 2, 3], [[5]] * 4)
    loop.step([0, 1, 2], [[6]] * 3)
    assert loop.cache.rows[3].state.batch.rows == 1


def test_admission_counts_what_is_free(dense):
    loop = opened(dense, tokens(17), num_blocks=8)
    assert loop.cache.can_admit(tokens(9, 1), 3)
    assert not loop.cache.can_admit(tokens(9, 1), 4)
    assert loop.cache.can_admit(tokens(17), 10)


# As any transformers cache


@pytest.mark.parametrize("family", ["dense", "sliding"])
def test_crop_drops_tokens(family, request):
    model = copy.deepcopy(request.getfixturevalue(family)).double()  # another number of rows rounds otherwise
    ids = torch.tensor([tokens(5), tokens(5, 1)])
    other = torch.tensor([tokens(4, 2), tokens(4, 3)])
    for drop in (0, 2, 5, 9):
        cache = PagedCache(model.config, num_blocks=64, block_size=4)
        forward(model, ids, cache)
        cache.crop(-drop)
        left = max(5 - drop, 0)
        assert cache.get_seq_length() == left
        expected = forward(model, torch.cat([ids[:, :left], other], dim=1))[:, left:]
        assert torch.allclose(forward(model, other, cache), expected, atol=1e-9)
    cache = PagedCache(model.config, num_blocks=64, block_size=4)
    forward(model, ids, cache)
    if CROP_TAKES_A_LENGTH:
        cache.crop(3)
        assert cache.get_seq_length() == 3
    else:
        with pytest.raises(ValueError, match="negative"):
            cache.crop(3)


def test_crop_past_a_window_needs_records(sliding):
    ids = torch.tensor([tokens(20)])
    cache = PagedCache(sliding.config, num_blocks=64, block_size=4)
    forward(sliding, ids, cache)
    with pytest.raises(Refused, match="row 0 cannot go back from 20 to 13 tokens"):
        cache.crop(-7)
    cache = PagedCache(sliding.config, num_blocks=64, block_size=4)
    cache.activate_past_recording()
    forward(sliding, ids, cache)
    cache.crop(-7)
    expected = forward(sliding, ids)[:, 13:]
    assert torch.allclose(forward(sliding, ids[:, 13:], cache), expected, atol=1e-5)


@pytest.mark.parametrize("family", ["dense", "sliding"])
def test_assisted_generation(family, request):
    model = request.getfixturevalue(family)
    ids = torch.tensor([tokens(6) * 3])
    # Not one with windows: in transformers 5.17 its own dynamic cache breaks.
    assistant = tiny_model("dense", layers=2, seed=1)
    for help_ in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
        options = {**help_, "max_new_tokens": 25, "do_sample": False}
        expected = model.generate(ids, **options)
        cache = PagedCache(model.config, num_blocks=64, block_size=4)
        assert torch.equal(model.generate(ids, **options, **{CACHE_KEY: cache}), expected)


def test_assisted_generation_of_a_hybrid_is_refused_as_by_transformers(hybrid):
    assert not PagedCache(hybrid.config, num_blocks=4).is_croppable


@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
def test_a_second_turn_on_a_filled_cache(family, request):
    model = request.getfixturevalue(family)
    cache = PagedCache(model.config, num_blocks=64, block_size=4)
    first = torch.tensor([tokens(13)])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    turn = model.generate(first, **options, **{CACHE_KEY: cache})
    turn = torch.cat([turn, torch.tensor([tokens(5, 3)])], dim=1)
    expected = model.generate(turn, **options)
    assert torch.equal(model.generate(turn, **options, **{CACHE_KEY: cache}), expected)


@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
def test_batches_are_rearranged_as_a_dynamic_cache_is(family, request):
    model = request.getfixturevalue(family)
    ids, more = torch.tensor([tokens(9), tokens(9, 1)]), torch.tensor([[5], [6], [7]])

    def run(cache):
        forward(model, ids, cache)
        if hasattr(cache.layers[0], "batch_repeat_interleave") or isinstance(cache, PagedCache):
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([0, 2, 3]))
        else:  # transformers' recurrent layers do not have these
            cache.reorder_cache(torch.tensor([0, 1, 1]))
        logits = [forward(model, more, cache)]
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        logits.append(forward(model, more, cache))
        return torch.cat(logits, dim=1)

    found = run(PagedCache(model.config, num_blocks=64, block_size=4))
    assert torch.allclose(found, run(DynamicCache(config=model.config)), atol=1e-5)


def test_mask_sizes_are_those_of_transformers(sliding):
    ids = torch.tensor([tokens(20)])
    mine, theirs = PagedCache(sliding.config, num_blocks=64, block_size=4), DynamicCache(config=sliding.config)
    for count in (1, 3, 1, 7, 8):
        for layer in range(2):
            assert mine.get_mask_sizes(count, layer) == theirs.get_mask_sizes(count, layer)
        assert mine.get_seq_length() == theirs.get_seq_length()
        forward(sliding, ids[:, :count], mine)
        forward(sliding, ids[:, :count], theirs)


def test_kv_can_be_kept_in_another_dtype(dense):
    loop = opened(dense, tokens(9), dtype=torch.bfloat16)
    assert loop.cache.stats()["kv_bytes"] == 4 * 2 * (6 * 4) * 2 * 8 * 2  # three blocks, and room for three more
    logits = loop.step([0], [[5]])
    assert logits.dtype == torch.float32
    assert torch.allclose(logits[0, -1], forward(dense, [[*tokens(9), 5]])[0, -1], atol=0.5)


def test_another_rows_nan_stays_its_own(dense):
    loop = opened(dense, tokens(3), tokens(12, 1))
    store = loop.cache._stores[0]
    store.values[loop.cache.rows[1].tables[0].blocks[0] * 4] = torch.nan
    logits = loop.step([0, 1], [[5], [6]])
    assert not logits[0].isnan().any()
    assert logits[1].isnan().any()


# Gradients


@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
@pytest.mark.parametrize("options", [{}, {"window": 4}, {"quantization": "int8"}], ids=["full", "window", "int8"])
def test_what_is_cached_has_no_history(family, options):
    model = tiny_model(family).requires_grad_(True)
    cache = PagedCache(model.config, num_blocks=16, block_size=2, **options)
    loop = Loop(model, cache)
    loop.open(tokens(4))
    loop.prefill(0, tokens(4))
    logits = loop.step([0], [[5]])
    assert logits.grad_fn is not None
    stored = [value for store in cache._stores.values() for value in tensors_in(vars(store))]
    states = [] if cache.rows[0].state is None else [*cache.rows[0].state.batch.tensors.values()]
    assert len(states) == 4 * (family == "hybrid")
    assert stored
    assert not any(tensor.requires_grad or tensor.grad_fn is not None for tensor in stored + states)
    with pytest.raises(Refused, match="train with use_cache=False"):
        logits.sum().backward()


def tensors_in(value):
    """Every tensor in what an object holds."""
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in values for tensor in tensors_in(part)]


TRAINING_STEP = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.arange(3, 43).view(2, 20)
loss = model(ids, labels=ids, use_cache=False).loss
loss.backward()
assert "decodekit" not in sys.modules
torch.save([loss.detach(), *(weight.grad for weight in model.parameters())], sys.argv[2])
"""


def test_a_training_step_is_as_without_decodekit(tmp_path):
    tiny_model("dense").save_pretrained(tmp_path)
    arguments = [sys.executable, "-c", TRAINING_STEP, str(tmp_path), str(tmp_path / "step.pt")]
    subprocess.run(arguments, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    expected = torch.load(tmp_path / "step.pt")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(3, 43).view(2, 20)
    # Samples attend to their blocks by decodekit's own function, with the same model.
    decoder = decodekit.load({"cache": "paged"})
    model.generate(ids, custom_generate=decoder, num_return_sequences=2, do_sample=True, max_new_tokens=3)
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    for found, theirs in zip([loss, *(weight.grad for weight in model.parameters())], expected, strict=True):
        assert torch.equal(found, theirs)


# What is refused


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.MiniMaxConfig(), "MiniMaxCache"),
        (transformers.RecurrentGemmaConfig(), "in its modules"),
        (transformers.RwkvConfig(), "list of its own"),
        (transformers.xLSTMConfig(), "cache of its own"),
        (transformers.Qwen4ExpConfig(), "qwen4_exp_text keeps recurrent states"),
        (transformers.ZayaConfig(), "zaya keeps recurrent states, and a paged cache was not tried"),
        (transformers.BltConfig(), "blt has layers whose cache transformers does not make"),
        (transformers.T5Config(), "encoder-decoder"),
        (
            transformers.LlamaConfig(num_attention_heads=9, num_key_value_heads=2, hidden_size=72),
            "9 query heads cannot share 2",
        ),
    ],
    ids=["minimax", "recurrent_gemma", "rwkv", "xlstm", "qwen4_exp", "zaya", "blt", "t5", "heads"],
)
def test_models_it_is_not_for_are_refused(config, message):
    with pytest.raises(Refused, match=message):
        PagedCache(config, num_blocks=4)


@pytest.mark.parametrize("family", ["dense", "sliding"])
def test_rows_may_bring_different_numbers_of_tokens(family):
    model = tiny_model(family, dtype=torch.float64)
    prompts = [tokens(9), tokens(3, 1), tokens(14, 2), tokens(1, 3)]

    def last_logits(groups):
        cache = PagedCache(model.config, num_blocks=64, block_size=4)
        cache.open(prompts)
        found = {}
        for rows_, start, stop in groups:
            ids = [prompts[row][start:stop] for row in rows_]
            width = max(map(len, ids))
            padded = torch.tensor([[0] * (width - len(own)) + own for own in ids])
            with cache.begin(rows_, ids) as step:
                out = model(
                    padded,
                    attention_mask=step.attention_mask,
                    position_ids=step.position_ids,
                    use_cache=True,
                    **{CACHE_KEY: cache},
                )
            found.update({row: out.logits[place, -1] for place, row in enumerate(rows_)})
        used = sum(group.pool.used_blocks for group in cache.groups)
        return [found[row] for row in range(4)], [row.length for row in cache.rows], used

    alone = last_logits([([row], 0, None) for row in range(4)])
    for groups in (
        [([0, 1, 2, 3], 0, None)],
        [([2, 0], 0, 6), ([1, 3], 0, None), ([2, 0], 6, None)],
    ):
        together = last_logits(groups)
        assert together[1:] == alone[1:]
        torch.testing.assert_close(together[0], alone[0], atol=1e-10, rtol=1e-10)


def test_a_recurrent_layer_never_takes_pads():
    model = tiny_model("hybrid")
    cache = PagedCache(model.config, num_blocks=64)
    cache.open([tokens(4), tokens(4, 1), tokens(6, 2)])
    assert cache.together({0: 4, 1: 4, 2: 6}) == [0, 1]
    with pytest.raises(InputError, match=r"begin got rows with \[4, 6\] tokens; a recurrent layer would take the pads"):
        cache.begin([0, 2], [tokens(4), tokens(6, 2)])


def test_wrong_steps_are_refused(dense):
    loop = opened(dense, tokens(5), tokens(5, 1))
    cache = loop.cache
    for rows_, ids, message in [
        ([0, 0], [[5], [5]], "different rows"),
        ([0], [[]], "at least 1"),
        ([0, 1], [[5]], "different rows"),
        ([2], [[5]], "not open"),
    ]:
        with pytest.raises(InputError, match=message):
            cache.begin(rows_, ids)
    with pytest.raises(InputError, match="begin a step"):
        forward(dense, [[5], [6]], cache)
    with pytest.raises(InputError, match="commit without a step"):
        cache.commit()
    cache.begin([0, 1], [[5], [6]])
    with pytest.raises(InputError, match="begin inside a step"):
        cache.begin([0], [[5]])
    with pytest.raises(InputError, match=r"layers \[0, 1, 2, 3\] were not forwarded"):
        cache.commit()
    with pytest.raises(InputError, match="given 1 rows of 2 tokens; the step has 2 rows of 1"):
        forward(dense, [[5, 6]], cache)
    cache.abort()
    assert [row.length for row in cache.rows] == [5, 5]
    with pytest.raises(InputError, match=r"attention_mask is \[2, 4\].*\[2, 6\]"):
        cache.begin([0, 1], [[5], [6]], attention_mask=torch.ones(2, 4))


def test_a_step_that_would_forget_the_state_is_refused():
    model = family_model("jamba")
    loop = opened(model, tokens(5))
    with pytest.raises(InputError, match="forgets its recurrent state"):
        loop.step([0], [[5, 6]])


def test_unnamed_rows_and_names_do_not_mix(dense):
    cache = PagedCache(dense.config, num_blocks=16)
    forward(dense, [tokens(5)], cache)
    with pytest.raises(InputError, match="reset it before"):
        cache.open([tokens(3)])
    with pytest.raises(InputError, match="2 rows; the cache has 1"):
        forward(dense, [[5], [6]], cache)
    with pytest.raises(Refused, match="fork its rows"):
        copy.deepcopy(cache)


# Interrupts


@pytest.mark.parametrize("family", ["sliding", "hybrid"])
def test_a_step_interrupted_anywhere_is_done_or_never_was(family, monkeypatch):
    model = tiny_model(family, layers=2)
    modules = (blocks, gather, gathered, paged, rectangle, rows, states, stepping, steps, storage)
    sources = {module.__file__ for module in modules}
    monkeypatch.setattr(interrupts, "SOURCES", interrupts.SOURCES | sources)
    prompt, other = tokens(15), tokens(6, 1)
    expected, loop = forward(model, [[*prompt, 5, 8]])[0, -1], None
    for number, line in enumerate(range(1, 2000, 7)):
        if loop is None:
            loop = opened(model, prompt, other)
            loop.cache.fork([0, 0, 1])
            before = [(row.length, row.tokens[:], row.tables[0].blocks) for row in loop.cache.rows], used(loop.cache)
        try:
            with interrupts.interrupted(line):
                loop.step([0, 1, 2], [[5], [6], [7]])
        except interrupts.Interrupted:
            loop.cache.abort()
            if loop.cache.rows[0].length == 15:
                assert before == (
                    [(row.length, row.tokens, row.tables[0].blocks) for row in loop.cache.rows],
                    used(loop.cache),
                )
                if number % 4:
                    continue  # interrupted once more, a little later, before it is done
                loop.step([0, 1, 2], [[5], [6], [7]])
            assert [row.length for row in loop.cache.rows] == [16, 16, 7]
            loop.cache.activate_past_recording()
            assert torch.allclose(loop.step([0], [[8]])[0, -1], expected, atol=1e-4)
            loop = None
        else:
            break
    else:
        pytest.fail("a step has more lines than were tried")
    assert line > 100


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_storage_grows_with_the_rows(dense, quantization):
    def growing(stored):
        loop = Loop(dense, PagedCache(dense.config, num_blocks=1000, block_size=4, quantization=quantization))
        loop.cache.groups[0].stored = stored
        loop.open(tokens(5))
        logits = [loop.prefill(0, tokens(5))[None]]
        before = loop.cache.stats()["kv_bytes"]
        logits.extend(loop.step([0], [[token]]) for token in tokens(40, 1))
        return torch.cat(logits, dim=1), before, loop.cache.stats()["kv_bytes"]

    found, before, after = growing(0)
    expected, _, whole = growing(1000)
    assert torch.equal(found, expected)
    assert before < after / 2 < whole / 40


@pytest.mark.parametrize("family", ["sliding", "hybrid"])
def test_a_lost_row_is_taken_back_and_a_snapshot_is_not(family, request):
    model, prompt = request.getfixturevalue(family), tokens(11)
    loop = opened(model, prompt, tokens(9, 1))
    snapshot = loop.cache.snapshot()
    loop.cache._book.copy(loop.cache.rows[1])  # as an interrupt between two operations leaves it
    held = used(loop.cache)
    loop.cache.release([0, 1])
    assert used(loop.cache) == held, "the snapshot's"
    loop.cache.restore(snapshot)
    assert torch.allclose(loop.step([0], [[5]])[0, -1], forward(model, [[*prompt, 5]])[0, -1], atol=1e-4)
    snapshot.release()
    loop.cache.release([0, 1])
    assert used(loop.cache) == [0] * len(loop.cache.groups)
