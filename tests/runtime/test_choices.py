"""Searches and candidates through every door of the Decoder."""

import json

import pytest
import torch

import decodekit
from decodekit.core.errors import RowError

STRATEGIES = [
    {"strategy": {"kind": "beam", "num_beams": 3}},
    {"strategy": {"kind": "mbr", "n": 3, "utility": "exact"}, "generation": {"do_sample": True, "seed": 1}},
]

pytestmark = pytest.mark.integration


@pytest.fixture(params=STRATEGIES, ids=["beam", "mbr"])
def decoder(request):
    return decodekit.load(request.param)


def test_a_stream_gives_only_what_was_chosen(dense, tokenizer, decoder) -> None:
    [whole] = decoder.run(dense, tokenizer, ["Who won?"], max_new_tokens=8)
    assert "".join(decoder.stream(dense, tokenizer, "Who won?", max_new_tokens=8)) == whole.text


def test_a_streamer_gets_the_chosen_tokens_at_the_end(dense, tokenizer, decoder) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.got, self.ended = {}, 0

        def put(self, row, tokens) -> None:
            self.got.setdefault(row, []).extend(tokens)

        def end(self) -> None:
            self.ended += 1

    streamer = Streamer()
    outputs = decoder.run(dense, tokenizer, ["Who won?", "a"], max_new_tokens=8, streamer=streamer)
    assert streamer.got == {row: output.token_ids for row, output in enumerate(outputs)}
    assert streamer.ended == 1


def test_the_best_k_come_in_order_of_their_scores(dense, tokenizer, decoder) -> None:
    outputs = decoder.run(dense, tokenizer, ["Who won?", "a"], max_new_tokens=8, num_return_sequences=2)
    assert len(outputs) == 4
    for first, second in (outputs[:2], outputs[2:]):
        scores = {tuple(own["token_ids"]): own["score"] for own in first.candidates}
        assert scores[tuple(first.token_ids)] >= scores[tuple(second.token_ids)]
        assert first.candidates == second.candidates


def test_a_trace_tells_the_candidates(dense, tokenizer, decoder, tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    [output] = decoder.run(dense, tokenizer, ["Who won?"], max_new_tokens=6, trace=path)
    records = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    [event] = [record for record in records if record.get("event") == "candidates"]
    assert [own["text"] for own in event["candidates"]] == [own["text"] for own in output.candidates]
    assert records[-1]["event"] == "finished"


def test_prompts_of_which_one_cannot_be_decoded(dense, tokenizer, decoder) -> None:
    good, bad = decoder.run(dense, tokenizer, ["Who won?", "a" * 3000], max_new_tokens=6)
    assert good.error is None
    assert "the model's context" in bad.error


def test_generate_gives_a_row_a_prompt_and_the_scores(dense, decoder, tokenizer) -> None:
    ids = torch.tensor([[5, 17, 42, 8], [9, 9, 30, 61]])
    out = dense.generate(
        ids,
        custom_generate=decoder.bind(tokenizer=tokenizer),
        max_new_tokens=6,
        eos_token_id=None,
        return_dict_in_generate=True,
    )
    assert out.sequences.shape == (2, 10)
    assert out.sequences_scores.shape == (2,)
    assert torch.equal(out.sequences[:, :4], ids)


def test_a_row_whose_rules_leave_nothing_fails_alone(dense, tokenizer, decoder) -> None:
    banned = [{"kind": "bad_words", "ids": [[token] for token in range(97)]}]
    recipe = decodekit.load({**decoder.recipe.to_dict(), "rules": banned})
    [output] = recipe.run(dense, tokenizer, ["Who won?"], max_new_tokens=6)
    assert output.finish_reason == "error"
    with pytest.raises(RowError, match="prompt 0"):
        dense.generate(torch.tensor([[5]]), custom_generate=recipe.bind(tokenizer=tokenizer), max_new_tokens=4)
