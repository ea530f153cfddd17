"""Faults of other projects' recurrent states, which must not happen here; each test names where it was reported."""

import math

import pytest
import torch

import decodekit
from decodekit.core.errors import Refused
from decodekit.testing import tiny_model
from tests.cache.families import family_model, forward
from tests.cases.test_cache_and_serving import in_chunks, loop_over, tokens
from tests.strategies.golden import left_pad

pytestmark = pytest.mark.integration

FAMILIES = ["mamba", "mamba2", "qwen3_next", "falcon_h1", "bamba", "nemotron_h", "lfm2"]
OPTIONS = {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0, "custom_generate": decodekit.load({})}


@pytest.fixture(params=FAMILIES)
def model(request):
    return family_model(request.param)


def test_pads_that_a_state_would_swallow_are_refused(model) -> None:
    """https://github.com/huggingface/transformers/issues/48256: pads behind or between tokens went into the state."""
    row, pads = tokens(5), [0] * 4
    for ids, mask in (
        ([*row, *pads], [1] * 5 + [0] * 4),
        ([*row[:2], *pads, *row[2:]], [1] * 2 + [0] * 4 + [1] * 3),
    ):
        with pytest.raises(Refused, match="pads belong on the left"):
            model.generate(torch.tensor([ids]), attention_mask=torch.tensor([mask]), **OPTIONS)
    padded = model.generate(torch.tensor([[*pads, *row]]), attention_mask=torch.tensor([[0] * 4 + [1] * 5]), **OPTIONS)
    assert torch.equal(padded[:, 9:], model.generate(torch.tensor([row]), **OPTIONS)[:, 5:])


def test_left_pads_leave_no_trace_in_a_state(model) -> None:
    """https://github.com/huggingface/transformers/pull/32677: they leaked through the bias of the convolution."""
    prompts = [tokens(13), tokens(5, 1)]
    whole = model.generate(**left_pad(prompts), **OPTIONS)[:, 13:]
    for prompt, row in zip(prompts, whole, strict=True):
        assert torch.equal(model.generate(torch.tensor([prompt]), **OPTIONS)[0, len(prompt) :], row)


@pytest.mark.parametrize("name", [*FAMILIES, "jamba", "qwen3_5"])
def test_a_prompt_in_chunks_goes_on_from_its_state(name) -> None:
    """https://github.com/huggingface/transformers/pull/46741: a forward of several tokens began from an empty state."""
    model, ids = family_model(name), tokens(13)
    whole = forward(model, [ids])[0]
    for chunks in ((6, 7), (1, 12), (2, 2, 9), (3, 1, 9), (8, 5), (5, 1)):
        loop = loop_over(model)
        loop.open(ids)
        assert (in_chunks(loop, 0, ids, chunks) - whole).abs().max() < 1e-3 * max(1.0, float(whole.abs().max()))


def test_a_slot_that_is_used_again_holds_nothing_of_its_past() -> None:
    """https://github.com/vllm-project/vllm/pull/56524: the state of the last request was where the next one began."""
    model = tiny_model("hybrid", dtype=torch.float64)
    loop, waiting, texts = loop_over(model, prefix_cache=False), [tokens(3 + n % 7, n) for n in range(50)], {}
    rows: list[list[int]] = []

    def spoil(row) -> None:
        """What a row that is over held becomes NaN: its states, and its blocks once they are free."""
        for tensor in row.state.batch.tensors.values():
            tensor[row.state.place] = math.nan
        loop.cache.release([loop.cache.rows.index(row)])
        for number, store in loop.cache._stores.items():
            pool = loop.cache.groups[loop.cache._group_of[number]].pool
            free = [block for block in range(pool.num_blocks) if not pool._allocator.references[block]]
            for slot in (block * 4 + offset for block in free for offset in range(4)):
                if slot < len(store.keys):
                    store.keys[slot], store.values[slot] = math.nan, math.nan

    def settle() -> None:
        for ids in [ids for ids in rows if len(ids) - len(texts[id(ids)]) == 4]:
            spoil(loop.cache.rows[rows.index(ids)])
            rows.remove(ids)
            expected = model(torch.tensor([ids])).logits[0, len(texts[id(ids)]) - 1 : -1].argmax(-1)
            assert ids[-4:] == expected.tolist()

    while waiting or rows:
        while waiting and len(rows) < 4:
            ids = waiting.pop()
            texts[id(ids)] = [*ids]
            rows.append(ids)
            [row] = loop.open(ids)
            ids.append(int(loop.prefill(row, ids)[-1].argmax()))
        found = loop.step(range(len(rows)), [[ids[-1]] for ids in rows])
        for ids, logits in zip(rows, found, strict=True):
            ids.append(int(logits[-1].argmax()))
        settle()
    assert len(texts) == 50


@pytest.mark.parametrize("recording", [False, True])
def test_rejected_drafts_leave_the_state(model, recording) -> None:
    """https://github.com/vllm-project/vllm/issues/53912: they stayed in it, and only attention was rolled back."""
    ids = tokens(12)
    loop = loop_over(model)
    if recording:
        loop.cache.activate_past_recording()
    loop.open(ids[:10])
    loop.prefill(0, ids[:10])
    if recording:
        loop.cache.rollback([0])
    for drop in (2, 9):
        loop.extend([0], [tokens(3, 5)])
        kept = (ids[:10] + tokens(3, 5))[: loop.cache.rows[0].length - drop]
        [again] = loop.cache.rollback([drop])
        assert loop.cache.rows[0].length == len(kept) - again
        if again:
            loop.extend([0], [kept[-again:]])
        found = loop.step([0], [[ids[11]]])[0, -1]
        expected = forward(model, [[*kept, ids[11]]])[0, -1]
        assert (found - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))
        loop.cache.reset()
        loop.open(ids[:10])
        loop.prefill(0, ids[:10])


def test_states_keep_32_bits_wherever_they_go() -> None:
    """https://github.com/vllm-project/vllm/issues/13466: 16 bits wore long generations down."""
    model, ids = tiny_model("hybrid", dtype=torch.bfloat16), tokens(21)
    loop = loop_over(model, host_bytes=2**20)
    loop.open(ids)
    loop.prefill(0, ids)

    def kept(row) -> set[torch.dtype]:
        batch = loop.cache.rows[row].state.batch
        return {state.dtype for (_, kind, _), state in batch.tensors.items() if kind == "recurrent_states"}

    assert kept(0) == {torch.float32}
    loop.cache.fork([0, 0])
    loop.step([0, 1], [[5], [6]])
    assert kept(1) == {torch.float32}
    row = loop.cache.resume(loop.cache.suspend(1))
    assert kept(row) == {torch.float32}
    assert kept(loop.cache.load(loop.cache.export(0))) == {torch.float32}
    [again] = loop.open(ids)
    assert loop.cache.rows[again].num_cached == 20
    assert kept(again) == {torch.float32}
