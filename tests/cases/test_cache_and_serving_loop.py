"""Faults of other projects' decoding loops and samplers, which must not happen here; each names where it was reported."""

import queue
import threading
import time

import pytest
import torch
from transformers import LogitsProcessor

import decodekit
from decodekit.core.errors import DecodekitError, RowError
from decodekit.runtime.text import TextTracker
from tests.cases.test_quality_decoding import PROMPTS, Poison, alone, decoded
from tests.strategies.golden import left_pad

pytestmark = pytest.mark.integration

PLAIN = decodekit.load({})


@pytest.mark.parametrize("sampled", [False, True])
def test_a_row_without_a_token_is_a_typed_error_of_its_own(dense, sampled) -> None:
    """https://github.com/huggingface/transformers/pull/47511: greedy gave id 0 in silence, sampling ended the batch."""
    options = {"do_sample": sampled}
    with pytest.raises(RowError, match=r"prompt 0: rule 'SuppressTokensLogitsProcessor' left no token to choose from"):
        decoded(dense, PLAIN, suppress_tokens=[*range(97)], **options)
    decoder = decodekit.load({"generation": {"seed": 0, "do_sample": sampled}})
    clean = decoded(dense, decoder)
    with pytest.warns(RuntimeWarning, match=r"row 1 \(prompt 1\) ended early: rule 'Poison' made NaN"):
        poisoned = decoded(dense, decoder, logits_processor=[Poison(61, 77)])
    assert poisoned == [clean[0], [0] * 8, clean[2]]


def test_a_penalty_sees_no_pads(dense) -> None:
    """https://github.com/huggingface/text-generation-inference/pull/1765: the score of the pad was penalized."""
    options = {"repetition_penalty": 2.0, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    padded, plain = (
        dense.generate(**left_pad(prompts), custom_generate=PLAIN, max_new_tokens=1, pad_token_id=0, **options)
        for prompts in ([[5, 6], [9, 9, 30, 61]], [[5, 6]])
    )
    torch.testing.assert_close(padded.scores[0][0], plain.scores[0][0], atol=1e-9, rtol=1e-9)
    changed = (plain.scores[0] != plain.logits[0])[0].nonzero().flatten().tolist()
    assert changed == [5, 6]


@pytest.mark.parametrize("size", [1, 2, 30])
@pytest.mark.parametrize("strategy", ["sample", "beam"])
def test_n_grams_of_pads_ban_nothing(dense, size, strategy) -> None:
    """https://github.com/NVIDIA/TensorRT-LLM/pull/16594: a pad that is also EOS was banned, as were pairs of pads."""
    prompts = [[5, 1, 42, 5], [1, 1, 30, 61, 77, 1, 4], [50, 3]]  # 1 is the pad and a token of the prompts
    options = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 1, "no_repeat_ngram_size": size}

    def tokens(prompts) -> list[list[int]]:
        inputs = left_pad(prompts, pad=1)
        ids = dense.generate(**inputs, custom_generate=decodekit.strategy(strategy), **options)
        return ids[:, inputs["input_ids"].shape[1] :].tolist()

    together = tokens(prompts)
    assert together == [tokens([prompt])[0] for prompt in prompts]
    for prompt, output in zip(prompts, together, strict=True):
        whole = [*prompt, *output]
        grams = [tuple(whole[at : at + size]) for at in range(len(whole) - size + 1)]
        fresh = grams[max(0, len(prompt) - size + 1) :]
        assert len(set(fresh)) == len(fresh)
        assert not set(fresh) & set(grams[: len(grams) - len(fresh)])


@pytest.mark.parametrize(
    ("pieces", "text"),
    [(["s", "t", "o", "p"], ""), (["st", "op"], ""), (["x", "s", "top", "x"], "x"), (["sto", "re"], "store")],
)
def test_a_stop_string_is_found_however_it_is_divided(demo, pieces, text) -> None:
    """https://github.com/huggingface/text-generation-inference/issues/1039: only where a token ended with it."""
    _, tokenizer = demo
    tracker, shown = TextTracker(tokenizer, ["stop"]), []
    for piece in pieces:
        for token in tokenizer(piece, add_special_tokens=False).input_ids:
            shown.append("" if tracker.stopped else tracker.push(token))
    shown.append(tracker.finish())
    assert "".join(shown) == tracker.text == text
    assert tracker.stopped == (text != "store")


def test_a_stop_string_does_not_begin_in_the_prompt(dense, tokenizer) -> None:
    """As above: the end of the prompt and the first token were taken for one."""
    prompt = "Who won? sto"
    [plain] = PLAIN.run(dense, tokenizer, prompt, raw=True, max_new_tokens=8)
    assert plain.text[0] != "s"
    [found] = PLAIN.run(dense, tokenizer, prompt, raw=True, max_new_tokens=8, stop_strings=["sto" + plain.text[0]])
    assert found.token_ids == plain.token_ids


class Breaks(LogitsProcessor):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError
        return scores


class Events:
    def __init__(self) -> None:
        self.queue: queue.Queue = queue.Queue()

    def put(self, row, tokens) -> None:
        self.queue.put((row, tokens))

    def end(self) -> None:
        self.queue.put(None)


def test_whoever_reads_a_stream_is_told_that_it_is_over(dense) -> None:
    """https://github.com/huggingface/transformers/issues/25470: a failure left the reader waiting; one row only."""
    events, errors = Events(), []

    def decode() -> None:
        try:
            decoded(dense, PLAIN, logits_processor=[Breaks()], dk_streamer=events)
        except DecodekitError as error:
            errors.append(str(error))

    thread = threading.Thread(target=decode)
    thread.start()
    got = list(iter(lambda: events.queue.get(timeout=60), None))
    thread.join(timeout=1)
    assert not thread.is_alive()
    assert errors == ["rule 'Breaks' failed: ZeroDivisionError: "]
    clean = decoded(dense, PLAIN)
    assert got == [(row, [clean[row][step]]) for step in range(2) for row in range(3)]


def test_a_row_that_is_over_gets_pads_and_no_more_time(model) -> None:
    """https://github.com/huggingface/transformers/issues/31261: rows went on behind one of several EOS ids."""
    free = decoded(model, PLAIN)
    ends = [free[0][3], free[1][5]]
    for number in (1, 3):
        decoder = decodekit.load({"rules": [], "generation": {"do_sample": number > 1, "seed": 0}})
        rows = decoded(model, decoder, eos_token_id=ends, num_return_sequences=number, do_sample=number > 1)
        assert len(rows) == 3 * number
        for row in rows:
            end = next((place for place, token in enumerate(row) if token in ends), 8)
            assert set(row[end + 1 :]) <= {0}
    least = decoded(model, PLAIN, eos_token_id=ends, min_new_tokens=6)
    assert all(token not in ends for row in least for token in row[:6])
    started = time.perf_counter()
    inputs = left_pad(PROMPTS)
    options = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 1500, "custom_generate": PLAIN}
    ids = model.generate(**inputs, max_time=0.2, **options)
    steps = ids.shape[1] - inputs["input_ids"].shape[1]
    assert 0 < steps < 1500
    assert time.perf_counter() - started < 60  # not the time of 1500 steps


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 3.0}, {"no_repeat_ngram_size": 1}, {"bad_words_ids": [[8], [9, 9], [12, 4]]}]
)
def test_processors_of_packed_rows_see_each_rows_whole_history(dense, options) -> None:
    """https://github.com/huggingface/transformers/pull/48468: under packed batches they saw the current token alone."""
    prompts = [*PROMPTS, [8, 8, 3, 9, 9]]
    expected = [
        dense.generate(torch.tensor([prompt]), max_new_tokens=8, eos_token_id=None, pad_token_id=0, **options)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]
    assert expected != alone(dense, PLAIN, prompts)
    assert decoded(dense, decodekit.load({"cache": {"kind": "paged"}}), prompts, **options) == expected
