import math

import pytest
import torch

import decodekit
from decodekit import InputError, RowError, Rule
from decodekit.core.trace import read_trace

GREEDY = decodekit.strategy("sample")

pytestmark = pytest.mark.integration


def test_run_gives_text_tokens_and_stats(dense, tokenizer) -> None:
    [output] = GREEDY.run(dense, tokenizer, "Who won?", max_new_tokens=9, eos_token_id=96)
    ids = tokenizer("Who won?", return_tensors="pt").input_ids
    plain = dense.generate(ids, max_new_tokens=9, eos_token_id=96)[0, ids.shape[1] :].tolist()
    assert output.token_ids == plain
    assert output.text == tokenizer.decode(plain, skip_special_tokens=True)
    assert output.finish_reason == "length"
    assert output.stats["target_forwards"] == 9
    assert output.stats["prompt_tokens"] == ids.shape[1]
    assert output.stats["forwarded_tokens"] == ids.shape[1] + 8
    assert 0 < output.stats["ttft_s"] <= output.stats["ttft_s"] + output.stats["decode_s"]
    assert output.stats["itl_p50_s"] <= output.stats["itl_p95_s"]


def test_rows_that_cannot_start_leave_the_others_alone(dense, tokenizer) -> None:
    prompts = ["Who won?", "", [{"role": "user"}], "x" * 3000, "a"]
    outputs = GREEDY.run(dense, tokenizer, prompts, max_new_tokens=5)
    alone = [GREEDY.run(dense, tokenizer, [prompts[index]], max_new_tokens=5)[0] for index in (0, 4)]
    assert [output.finish_reason == "error" for output in outputs] == [False, True, True, True, False]
    assert [outputs[0].token_ids, outputs[4].token_ids] == [output.token_ids for output in alone]
    assert outputs[1].error == "prompt 1: the prompt is empty; give at least one word"
    assert "prompt 3: the prompt has 3000 tokens, the model's context holds 2048" in outputs[3].error
    needs_text = decodekit.strategy("instructive").run(dense, tokenizer, ["", [], "a"], max_new_tokens=2)
    assert needs_text[2].finish_reason == "length"
    assert all(output.error.count("\n") == 0 for output in outputs if output.error)


def test_several_sequences_come_prompt_by_prompt(dense, tokenizer) -> None:
    decoder = decodekit.load({"rules": [], "generation": {"do_sample": True, "seed": 1, "max_new_tokens": 6}})
    outputs = decoder.run(dense, tokenizer, ["Who won?", "", "a"], num_return_sequences=3)
    assert [output.finish_reason == "error" for output in outputs] == [False] * 3 + [True] + [False] * 3
    [first, *_] = decoder.run(dense, tokenizer, ["a"])
    assert outputs[4].token_ids == first.token_ids
    assert len({tuple(output.token_ids) for output in outputs[:3]}) == 3


def test_stop_strings_end_their_row_and_are_cut_from_the_text(dense, tokenizer) -> None:
    prompts = ["Who won?", "a", "the end"]
    plain = GREEDY.run(dense, tokenizer, prompts, max_new_tokens=24, eos_token_id=96)
    stop = plain[0].text[5:8]
    stopped = GREEDY.run(
        dense, tokenizer, prompts, max_new_tokens=24, eos_token_id=96, stop_strings=[stop, "no such text"]
    )
    for before, after in zip(plain, stopped, strict=True):
        if stop in before.text:
            assert after.text == before.text[: before.text.index(stop)]
            assert after.finish_reason == "stop"
            assert tokenizer.decode(after.token_ids).rstrip("").endswith(stop) or stop in tokenizer.decode(
                after.token_ids
            )
            assert before.token_ids[: len(after.token_ids)] == after.token_ids
        else:
            assert after.token_ids == before.token_ids
    assert stopped[0].finish_reason == "stop"


def test_stop_strings_through_generate_need_the_tokenizer(dense, tokenizer) -> None:
    ids = tokenizer("Who won?", return_tensors="pt").input_ids
    [plain] = GREEDY.run(dense, tokenizer, "Who won?", max_new_tokens=24, eos_token_id=96)
    decoder = decodekit.load(
        {"generation": {"stop_strings": plain.text[5:8], "max_new_tokens": 24, "eos_token_id": 96}}
    )
    with pytest.raises(InputError, match="need a tokenizer; give dk_tokenizer=tokenizer"):
        dense.generate(ids, custom_generate=decoder)
    [expected] = decoder.run(dense, tokenizer, "Who won?")
    output = dense.generate(ids, custom_generate=decoder, dk_tokenizer=tokenizer)
    assert output[0, ids.shape[1] :].tolist() == expected.token_ids
    assert expected.finish_reason == "stop"


def test_streamed_pieces_join_to_the_text_of_run(dense, tokenizer) -> None:
    options = {"max_new_tokens": 24, "stop_strings": ["zq"], "eos_token_id": 96}
    pieces = list(GREEDY.stream(dense, tokenizer, "Who won?", **options))
    [output] = GREEDY.run(dense, tokenizer, "Who won?", **options)
    assert "".join(pieces) == output.text
    assert len(pieces) > 10
    with pytest.raises(RowError, match="the prompt is empty"):
        list(GREEDY.stream(dense, tokenizer, ""))


def test_a_stream_can_be_left_early(dense, tokenizer) -> None:
    stream = GREEDY.stream(dense, tokenizer, "Who won?", max_new_tokens=100)
    next(stream)
    stream.close()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ({}, {}),
        ({"strategy": {"kind": "dola", "relative_top": 0.0}}, {}),
        (
            {"rules": [{"kind": "temperature", "t": 0.5}, {"kind": "repetition_penalty", "penalty": 1.3}]},
            {"do_sample": True},
        ),
        ({"rules": [{"kind": "no_repeat_ngram", "n": 3}], "generation": {"repetition_penalty": 1.2}}, {}),
    ],
    ids=str,
)
def test_score_gives_the_log_probabilities_that_run_reports(model, tokenizer, recipe, options) -> None:
    decoder = decodekit.load(recipe)
    [output] = decoder.run(model, tokenizer, "Who won?", max_new_tokens=8, seed=0, eos_token_id=96, **options)
    text = tokenizer.decode(output.token_ids)
    if tokenizer(text, add_special_tokens=False).input_ids != output.token_ids:
        pytest.skip("these tokens are not what the tokenizer makes of their text")
    scored = decoder.score(model, tokenizer, "Who won?", text, eos_token_id=96, **options)
    # The hybrid's recurrence is computed in float32, in chunks here and step by step there.
    assert scored == pytest.approx(output.logprobs, abs=1e-3 if "Qwen" in type(model).__name__ else 1e-6)


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"strategy": {"kind": "dola", "relative_top": 0.0}},
        {"strategy": "cad", "rules": [{"kind": "repetition_penalty", "penalty": 1.3}]},
        {"rules": [{"kind": "mirostat", "tau": 30.0}], "generation": {"do_sample": True}},
        {
            "rules": [{"kind": "xtc", "threshold": 0.001, "protected": []}],
            "generation": {"do_sample": True, "seed": 1},
        },
    ],
    ids=str,
)
def test_several_continuations_have_the_scores_of_each_alone(model, tokenizer, recipe) -> None:
    decoder, prompt = decodekit.load(recipe), {"prompt": "Who won?", "context": "Ann did."}
    texts = ["the end.", "t", "It is so, they said: 1 + 2 = 3", "the end."]
    together = decoder.score(model, tokenizer, prompt, texts)
    assert [len(scores) for scores in together] == [len(tokenizer(text).input_ids) for text in texts]
    # The hybrid's recurrence is computed in float32, in chunks of other places.
    rounding = 1e-4 if "Qwen" in type(model).__name__ else 1e-9
    for text, scores in zip(texts, together, strict=True):
        alone = decoder.score(model, tokenizer, prompt, text)
        assert scores == pytest.approx(alone, abs=rounding)
    [single] = decoder.score(model, tokenizer, prompt, texts[2:3])
    assert single == pytest.approx(together[2], abs=rounding)
    with pytest.raises(InputError, match="the continuation '' has no token"):
        decoder.score(model, tokenizer, prompt, ["a", ""])
    with pytest.raises(InputError, match=r"the continuation \[\] has no token"):
        decoder.score(model, tokenizer, prompt, [])


def test_score_equals_the_models_own_log_softmax(dense, tokenizer) -> None:
    scored = GREEDY.score(dense, tokenizer, "Who won?", "the end.")
    prompt, end = tokenizer("Who won?").input_ids, tokenizer("the end.").input_ids
    with torch.no_grad():
        logprobs = dense(torch.tensor([prompt + end])).logits[0].log_softmax(-1)
    expected = [float(logprobs[len(prompt) - 1 + index, token]) for index, token in enumerate(end)]
    assert scored == pytest.approx(expected, abs=1e-9)
    assert GREEDY.score(dense, tokenizer, "Who won?", "t") == pytest.approx(
        [float(logprobs[len(prompt) - 1, tokenizer("t").input_ids[0]])], abs=1e-9
    )
    with pytest.raises(InputError, match="the continuation '' has no token"):
        GREEDY.score(dense, tokenizer, "Who won?", "")
    with pytest.raises(InputError, match="the model's context holds 2048 in all"):
        GREEDY.score(dense, tokenizer, "Who won?", "x" * 2045)


def test_an_option_of_run_beats_the_recipes_rule(dense, tokenizer) -> None:
    decoder = decodekit.load(
        {"rules": [{"kind": "temperature", "t": 0.8}], "generation": {"do_sample": True, "seed": 3}}
    )
    cold, as_is, hot = (
        decoder.run(dense, tokenizer, "Who won?", max_new_tokens=9, temperature=t)[0].token_ids
        for t in (0.001, 0.8, 50.0)
    )
    greedy = GREEDY.run(dense, tokenizer, "Who won?", max_new_tokens=9)[0].token_ids
    assert cold == greedy
    assert as_is == decoder.run(dense, tokenizer, "Who won?", max_new_tokens=9)[0].token_ids
    assert len({tuple(cold), tuple(as_is), tuple(hot)}) == 3
    with pytest.raises(InputError, match="strategy 'dola'"):
        decodekit.strategy("dola").run(dense, tokenizer, "a", num_beams=3)


def test_score_leaves_out_what_is_for_decoding_only(dense, tokenizer) -> None:
    base = GREEDY.score(dense, tokenizer, "Who won?", "the end.")
    for generation in (
        {"num_return_sequences": 3, "do_sample": True},
        {"prefill_chunk_size": 4},
        {"forced_eos_token_id": 1, "max_new_tokens": 50},
    ):
        decoder = decodekit.load({"rules": [], "generation": generation})
        assert decoder.score(dense, tokenizer, "Who won?", "the end.") == pytest.approx(base, abs=1e-9)


def test_a_single_mapping_is_one_prompt_and_a_stream_is_one_text(dense, tokenizer) -> None:
    [output] = GREEDY.run(dense, tokenizer, {"prompt": "Who won?"}, max_new_tokens=4)
    assert output.token_ids == GREEDY.run(dense, tokenizer, "Who won?", max_new_tokens=4)[0].token_ids
    with pytest.raises(InputError, match="stream gives out one text, num_return_sequences asks for 2"):
        list(GREEDY.stream(dense, tokenizer, "a", num_return_sequences=2, do_sample=True))


class Tired(Rule):
    """Each token that was chosen raises the bar for the next: a rule with state."""

    kind: str = "tired"

    def init_state(self, request):
        return ()

    def commit(self, state, token, logits):
        return (*state, token)

    def __call__(self, rows, logits):
        shift = torch.zeros_like(logits)
        for position, state in enumerate(rows.states):
            shift[position, list(state)] = -math.inf
        return logits + shift


def test_a_rule_with_state_follows_its_row(dense, tokenizer) -> None:
    decoder = decodekit.Decoder(GREEDY.recipe.model_copy(update={"rules": (Tired(),)}))
    prompts = ["Who won?", "a", "the end"]
    outputs = decoder.run(dense, tokenizer, prompts, max_new_tokens=30, eos_token_id=96)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(set(output.token_ids)) == len(output.token_ids)
        [solo] = decoder.run(dense, tokenizer, prompt, max_new_tokens=30, eos_token_id=96)
        assert output.token_ids == solo.token_ids
    text = tokenizer.decode(outputs[0].token_ids)
    if tokenizer(text).input_ids == outputs[0].token_ids:
        scored = decoder.score(dense, tokenizer, prompts[0], text, eos_token_id=96)
        assert scored == pytest.approx(outputs[0].logprobs, abs=1e-6)


def test_a_trace_tells_what_every_token_came_from(dense, tokenizer, tmp_path) -> None:
    decoder = decodekit.load(
        {
            "strategy": {"kind": "dola", "layers": [0, 1, 2], "relative_top": 0.0},
            "rules": [{"kind": "temperature", "t": 0.5}, {"kind": "top_k", "k": 4}],
            "generation": {"do_sample": True, "seed": 3, "max_new_tokens": 5, "eos_token_id": 96},
        }
    )
    path = tmp_path / "trace.jsonl"
    outputs = decoder.run(dense, tokenizer, ["Who won?", "a"], trace=path)
    header, records = read_trace(path)
    records = list(records)
    assert header["trace"] == 1
    assert header["seed"] == 3
    assert header["recipe"]["strategy"]["layers"] == [0, 1, 2]
    assert header["prompt_ids"] == [tokenizer("Who won?").input_ids, tokenizer("a").input_ids]
    for row, output in enumerate(outputs):
        tokens = [record for record in records if record["type"] == "token" and record["row"] == row]
        assert [record["id"] for record in tokens] == output.token_ids
        assert [record["position"] for record in tokens] == [0, 1, 2, 3, 4]
        assert [math.log(record["prob"]) for record in tokens] == pytest.approx(output.logprobs, abs=1e-9)
        for record in tokens:
            assert record["legal"] == 4
            assert [stage["stage"] for stage in record["alternatives"]] == ["scores", "temperature", "top_k"]
            assert record["premature_layer"] in (0, 1, 2)
            assert 0 <= record["divergence"] <= math.log(2)
            assert record["text"] == tokenizer.decode([record["id"]])
            top = record["alternatives"][-1]["top"]
            assert len(top) == 4
            assert sum(probability for *_, probability in top) == pytest.approx(1)
            assert record["entropy"] == pytest.approx(-sum(p * math.log(p) for *_, p in top))
    assert [r for r in records if r.get("event") == "finished"] == [
        {"type": "event", "event": "finished", "row": row, "finish_reason": "length"} for row in (0, 1)
    ]


@pytest.mark.parametrize("strategy", ["dola", "sample"])
def test_a_trace_tells_how_far_the_strategy_moved_the_models_distribution(dense, tokenizer, tmp_path, strategy) -> None:
    decoder = decodekit.load({"strategy": strategy, "generation": {"max_new_tokens": 4, "eos_token_id": 96}})
    [output] = decoder.run(dense, tokenizer, "Who won?", trace=tmp_path / "trace.jsonl")
    _, records = read_trace(tmp_path / "trace.jsonl")
    found = [record["shift"] for record in records if record["type"] == "token"]
    if strategy == "sample":
        assert found == pytest.approx([0.0] * 4, abs=1e-12)
        return
    prompt = tokenizer("Who won?", return_tensors="pt").input_ids
    raw = dense.generate(
        prompt,
        custom_generate=decoder,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    assert raw.sequences[0, prompt.shape[1] :].tolist() == output.token_ids
    for shift, scores, logits in zip(found, raw.scores, raw.logits, strict=True):
        p, q = scores.softmax(-1), logits.softmax(-1)
        middle = (p + q) / 2
        entropies = [torch.special.entr(values).sum() for values in (middle, p, q)]
        assert shift == pytest.approx(float(entropies[0] - (entropies[1] + entropies[2]) / 2), abs=1e-9)
        assert shift > 1e-3


def test_what_is_not_a_trace_is_refused(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"trace": 99}\n')
    with pytest.raises(InputError, match="is a trace of version 99; this decodekit reads version 1"):
        read_trace(path)
    path.write_text("")
    with pytest.raises(InputError, match="is not a decodekit trace"):
        read_trace(path)


def test_options_beat_the_recipe_and_wrong_ones_are_named(dense, tokenizer) -> None:
    decoder = decodekit.load({"generation": {"max_new_tokens": 9, "suppress_tokens": [1]}})
    assert len(decoder.run(dense, tokenizer, "a", max_new_tokens=3)[0].token_ids) == 3
    with pytest.raises(InputError, match=r"generation\.max_new_tokens: .*greater than or equal to 1"):
        decoder.run(dense, tokenizer, "a", max_new_tokens=0)


def test_none_takes_the_models_own_default_away(dense, tokenizer, monkeypatch) -> None:
    [plain] = GREEDY.run(dense, tokenizer, "Who won?", max_new_tokens=9, eos_token_id=96)
    monkeypatch.setattr(dense.generation_config, "eos_token_id", plain.token_ids[3])
    assert len(GREEDY.run(dense, tokenizer, "Who won?", max_new_tokens=9)[0].token_ids) <= 4
    options = {"max_new_tokens": 9, "eos_token_id": None}
    assert GREEDY.run(dense, tokenizer, "Who won?", **options)[0].token_ids == plain.token_ids
    with decodekit.Engine(dense, tokenizer, {}) as engine:
        assert engine.submit("Who won?", **options).result().token_ids == plain.token_ids
    with monkeypatch.context() as patch:
        patch.setattr(dense.generation_config, "stop_strings", [plain.text[:2]])
        patch.setattr(dense.generation_config, "max_new_tokens", 4)
        assert GREEDY.run(dense, tokenizer, "Who won?", **options)[0].token_ids != plain.token_ids
        off = {"max_new_tokens": None, "max_length": 200, "stop_strings": None, "eos_token_id": None}
        found = GREEDY.run(dense, tokenizer, "Who won?", **off)[0].token_ids
        assert found[:9] == plain.token_ids
        assert len(found) > 9
    monkeypatch.setattr(dense.generation_config, "top_k", 1)
    sampled = {**options, "do_sample": True, "seed": 1}
    free, bound = (GREEDY.run(dense, tokenizer, "Who won?", **sampled, **own)[0] for own in ({"top_k": None}, {}))
    assert bound.token_ids == plain.token_ids
    assert free.token_ids != plain.token_ids


@pytest.mark.parametrize("option", ["epsilon_cutoff", "eta_cutoff", "min_p", "top_k"])
def test_an_option_of_zero_takes_the_recipes_rule_away(dense, tokenizer, option) -> None:
    kind = option.removesuffix("_cutoff")
    generation = {"do_sample": True, "seed": 2, "max_new_tokens": 20, "eos_token_id": 96}
    cutting = {"kind": kind, {"min_p": "p", "top_k": "k"}.get(option, "epsilon"): 1 if option == "top_k" else 0.99}
    hot = {"kind": "temperature", "t": 4.0}
    cut, free = (decodekit.load({"rules": rules, "generation": generation}) for rules in ([hot, cutting], [hot]))
    expected = free.run(dense, tokenizer, "a")[0].token_ids
    assert cut.run(dense, tokenizer, "a", **{option: 0})[0].token_ids == expected
    assert cut.run(dense, tokenizer, "a")[0].token_ids != expected


def test_what_is_no_call_is_one_clear_error(dense, tokenizer) -> None:
    decoder = decodekit.strategy("sample")
    with pytest.raises(InputError, match="unknown option 'max_new_token': did you mean 'max_new_tokens'"):
        decoder.run(dense, tokenizer, "Hi", max_new_token=8)
    with pytest.raises(InputError, match="prompts are a text or a list of texts or chats, got int"):
        decoder.run(dense, tokenizer, 3)
    with pytest.raises(InputError, match="expected a model and its tokenizer, in this order"):
        decoder.run(tokenizer, dense, "Hi")
