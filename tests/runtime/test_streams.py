import contextlib

import pytest
import torch
from transformers import LogitsProcessor, TextIteratorStreamer

import decodekit
from decodekit import InputError

GREEDY = decodekit.strategy("sample")

pytestmark = pytest.mark.integration


class Collect:
    def __init__(self, fail_at: int | None = None) -> None:
        self.rows: dict[int, list[int]] = {}
        self.ends, self.puts, self.fail_at = 0, 0, fail_at

    def put(self, row, tokens) -> None:
        if self.puts == self.fail_at:
            raise RuntimeError("the streamer broke")
        self.puts += 1
        self.rows.setdefault(row, []).extend(tokens)

    def end(self) -> None:
        self.ends += 1


def test_a_batch_streamer_gets_every_row(dense, padded) -> None:
    streamer = Collect()
    output = dense.generate(**padded(), max_new_tokens=9, custom_generate=GREEDY, dk_streamer=streamer)
    for row, full in enumerate(output[:, 12:].tolist()):
        got = streamer.rows[row]
        assert full[: len(got)] == got
        assert set(full[len(got) :]) <= {0}
    assert streamer.ends == 1


def test_a_transformers_streamer_gives_the_text(dense, tokenizer) -> None:
    ids = tokenizer("Who won?", return_tensors="pt").input_ids
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    output = dense.generate(ids, max_new_tokens=9, custom_generate=GREEDY.bind(streamer=streamer))
    assert "".join(streamer) == tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_transformers_streamer_takes_one_row(dense, tokenizer, padded) -> None:
    streamer = TextIteratorStreamer(tokenizer, timeout=1)
    with pytest.raises(
        InputError, match=r"TextIteratorStreamer takes one row, got 8; give a streamer whose put takes \(row"
    ):
        dense.generate(**padded(), custom_generate=GREEDY, dk_streamer=streamer)
    assert list(streamer) == [""], "it was ended, so that a reader does not wait for ever"


class Explode(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise ZeroDivisionError


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"logits_processor": [Explode()]}])
def test_a_streamer_is_ended_after_an_error(dense, options) -> None:
    streamer = Collect()
    with pytest.raises(decodekit.DecodekitError):
        dense.generate(torch.tensor([[5, 6]]), custom_generate=GREEDY, dk_streamer=streamer, **options)
    assert streamer.ends == 1


def test_a_streamer_is_ended_where_nothing_could_start(dense, tokenizer) -> None:
    for prompts, options in (
        ([""], {}),
        (["a"], {"temperature": -1}),
        (["a"], {"trace": "/no/such/folder/trace.jsonl"}),
    ):
        streamer = Collect()
        with contextlib.suppress(InputError):
            GREEDY.run(dense, tokenizer, prompts, streamer=streamer, **options)
        assert streamer.ends == 1


def test_a_streamer_that_breaks_is_ended_and_its_error_shown(dense) -> None:
    streamer = Collect(fail_at=2)
    with pytest.raises(RuntimeError, match="the streamer broke"):
        dense.generate(torch.tensor([[5, 6]]), custom_generate=GREEDY, dk_streamer=streamer, max_new_tokens=9)
    assert (streamer.ends, streamer.puts) == (1, 2)
    again = dense.generate(torch.tensor([[5, 6]]), custom_generate=GREEDY, max_new_tokens=9)
    assert torch.equal(again, dense.generate(torch.tensor([[5, 6]]), max_new_tokens=9))
