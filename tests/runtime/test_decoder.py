import copy
import time
import warnings
from typing import Literal

import pytest
import torch
from scipy import stats
from transformers import DynamicCache, LogitsProcessor, StaticCache, StoppingCriteria

import decodekit
from decodekit import Branch, InputError, Refused, RowError, Rule, TokenStrategy
from decodekit.core.random import Stream, inverse_cdf, prompt_digest, uniform
from decodekit.recipe import Recipe
from decodekit.testing import tiny_model
from tests.runtime.conftest import PROMPTS

pytestmark = pytest.mark.integration

GREEDY = decodekit.strategy("sample")


def sampled(**generation) -> decodekit.Decoder:
    return decodekit.load({"rules": [], "generation": {"do_sample": True, "max_new_tokens": 8, **generation}})


# --- what generate prepared is honoured


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "eos_token_id": list(range(40))},
        {"eos_token_id": [1, 35, 50, 66, 81]},
        {"bad_words_ids": [[45], [17, 88]]},
        {"sequence_bias": {(13,): 1.0}},
        {"suppress_tokens": [3, 4, 5, 17]},
        {"forced_eos_token_id": 1},
        {"exponential_decay_length_penalty": (4, 1.5)},
        {"num_return_sequences": 1, "use_cache": False},
        {"prefill_chunk_size": 4},
        {"renormalize_logits": True},
        {"guidance_scale": 1.5},
    ],
    ids=str,
)
def test_greedy_gives_the_tokens_of_generate_for_a_left_padded_batch(model, padded, options) -> None:
    if options.get("prefill_chunk_size") and "Qwen" in type(model).__name__:
        pytest.skip("generate itself cannot prefill a hybrid model in chunks of a padded batch")
    options = {"max_new_tokens": 16, **options} if "max_length" not in options else options
    plain = model.generate(**padded(), **options)
    assert torch.equal(model.generate(**padded(), **options, custom_generate=GREEDY), plain)
    assert len({tuple(row) for row in plain[:, -8:].tolist()}) > 1, "the model should tell prompts apart"


def test_a_repetition_penalty_gives_each_row_the_tokens_of_generate_without_pads(model, padded) -> None:
    # Before 5.24 generate itself counted the pads.
    ours = model.generate(**padded(), max_new_tokens=16, repetition_penalty=1.5, custom_generate=GREEDY)[
        :, 12:
    ].tolist()
    for prompt, row in zip(PROMPTS, ours, strict=True):
        [plain] = model.generate(torch.tensor([prompt]), max_new_tokens=16, repetition_penalty=1.5).tolist()
        assert row[: len(plain) - len(prompt)] == plain[len(prompt) :]


def test_greedy_on_the_demo_model_gives_the_tokens_of_generate(demo) -> None:
    model, tokenizer = demo
    texts = [
        "The capital of France is",
        "Once upon a time, in a land far away, there lived",
        "def fibonacci(n):",
        "Q: Why is the sky blue?\nA:",
        "1, 1, 2, 3, 5, 8,",
        "Dear",
        "The three laws of robotics are as follows. First,",
        "In 1969, astronauts",
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 24, "do_sample": False}
    plain = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options, custom_generate=GREEDY), plain)


def test_the_dictionary_holds_what_generate_would_return(model, padded) -> None:
    options = {
        "max_new_tokens": 6,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": True,
        "eos_token_id": None,
        "suppress_tokens": [60],
    }
    plain = model.generate(**padded(), **options)
    ours = model.generate(**padded(), **options, custom_generate=GREEDY)
    assert type(ours) is type(plain)
    assert torch.equal(ours.sequences, plain.sequences)
    for name in ("scores", "logits"):
        for got, expected in zip(getattr(ours, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(got.float(), expected)
    for name in ("hidden_states", "attentions"):
        for got, expected in zip(getattr(ours, name), getattr(plain, name), strict=True):
            for one, other in zip(got, expected, strict=True):
                assert one is other is None or torch.equal(one, other)
    cache = "cache" if "cache" in plain else "past_key_values"
    assert ours[cache].get_seq_length() == plain[cache].get_seq_length()


def test_scores_of_ended_rows_are_certain_of_the_pad(dense, padded) -> None:
    options = {
        "max_new_tokens": 12,
        "return_dict_in_generate": True,
        "output_scores": True,
        "eos_token_id": list(range(30)),
    }
    output = dense.generate(**padded(), **options, custom_generate=GREEDY)
    totals = dense.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    plain = dense.generate(**padded(), **options)
    assert torch.equal(output.sequences, plain.sequences)
    ended = output.sequences[:, -len(output.scores) :] == 0
    assert ended.any()
    assert (totals[ended] == 0).all()


class AddToToken(LogitsProcessor):
    def __init__(self, token: int, amount: float) -> None:
        self.token, self.amount, self.shapes = token, amount, []

    def __call__(self, input_ids, scores):
        self.shapes.append((tuple(input_ids.shape), tuple(scores.shape)))
        scores[:, self.token] += self.amount  # edits in place, as many do
        return scores


def test_the_callers_processors_see_the_padded_batch_and_run_first(dense, padded) -> None:
    options = {"max_new_tokens": 5, "eos_token_id": None, "suppress_tokens": [60]}
    plain = dense.generate(**padded(), **options, logits_processor=[AddToToken(60, 100.0), AddToToken(61, 30.0)])
    own = AddToToken(60, 100.0)
    ours = dense.generate(**padded(), **options, logits_processor=[own, AddToToken(61, 30.0)], custom_generate=GREEDY)
    assert torch.equal(ours, plain)
    assert own.shapes == [((8, 12 + step), (8, 97)) for step in range(5)]


class StopAfter(StoppingCriteria):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


def test_the_callers_criteria_stop_their_row_alone(dense, padded) -> None:
    plain = dense.generate(**padded(), max_new_tokens=12, eos_token_id=None)
    token = int(plain[0, 12 + 3])
    ours = dense.generate(
        **padded(), max_new_tokens=12, eos_token_id=None, stopping_criteria=[StopAfter(token)], custom_generate=GREEDY
    )
    for row, full in zip(ours[:, 12:].tolist(), plain[:, 12:].tolist(), strict=True):
        kept = full[: full.index(token) + 1] if token in full else full
        assert row[: len(kept)] == kept
        assert set(row[len(kept) :]) <= {0}


def test_max_time_ends_the_call(dense, padded) -> None:
    started = time.perf_counter()
    output = dense.generate(
        **padded(), max_new_tokens=100_000 // 64, max_time=0.3, eos_token_id=None, custom_generate=GREEDY
    )
    assert 12 < output.shape[1] < 12 + 100_000 // 64
    assert time.perf_counter() - started < 5


def test_a_filled_cache_is_continued(model) -> None:
    first = [5, 17, 42, 8]
    options = {"max_new_tokens": 5, "eos_token_id": None, "return_dict_in_generate": True}
    plain = model.generate(torch.tensor([first]), **options)
    ours = model.generate(torch.tensor([first]), **options, custom_generate=GREEDY)
    key = "cache" if "cache" in plain else "past_key_values"
    followed = torch.cat([plain.sequences, torch.tensor([[9, 10, 11]])], dim=1)
    again = model.generate(followed, **options, **{key: plain[key]})
    assert torch.equal(
        model.generate(followed, **options, **{key: ours[key]}, custom_generate=GREEDY).sequences, again.sequences
    )


@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
def test_other_caches_are_used_as_given(dense, cache) -> None:
    from decodekit.core.compat import CACHE_KEY

    def fresh():
        return (
            DynamicCache(config=dense.config)
            if cache is DynamicCache
            else StaticCache(config=dense.config, max_cache_len=40)
        )

    ids = torch.tensor([[5, 17, 42, 8]])
    plain = dense.generate(ids, max_new_tokens=8, eos_token_id=None, **{CACHE_KEY: fresh()})
    assert torch.equal(
        dense.generate(ids, max_new_tokens=8, eos_token_id=None, **{CACHE_KEY: fresh()}, custom_generate=GREEDY), plain
    )


# --- who wins


def test_a_recipes_length_holds_unless_the_call_names_one(dense) -> None:
    decoder, ids = (
        decodekit.load({"generation": {"max_new_tokens": 200, "suppress_tokens": [1]}}),
        torch.tensor([[5, 6]]),
    )
    assert dense.generate(ids, custom_generate=decoder).shape[1] == 202
    assert dense.generate(ids, custom_generate=decoder, max_new_tokens=7).shape[1] == 9
    assert dense.generate(ids, custom_generate=decoder, max_length=12).shape[1] == 12
    assert dense.generate(ids, custom_generate=GREEDY, suppress_tokens=[1]).shape[1] == 22


def test_a_recipes_rules_replace_the_warpers_and_a_named_option_replaces_its_rule(dense) -> None:
    ids = torch.tensor([[5, 6, 7]])
    options = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 1, "do_sample": True}

    def legal(decoder, **more) -> int:
        return int((dense.generate(ids, custom_generate=decoder, **options, **more).scores[0] > -torch.inf).sum())

    assert legal(decodekit.load({})) == 50  # transformers' own top-k
    assert legal(decodekit.load({"rules": []})) == 97
    three = decodekit.load({"rules": [{"kind": "top_k", "k": 3}]})
    assert legal(three) == 3
    assert legal(three, top_k=7) == 7
    assert legal(three, top_k=0) == 97
    assert legal(decodekit.load({"generation": {"top_k": 9}})) == 9


def test_a_recipe_can_ask_for_more_sequences(dense, padded) -> None:
    decoder = decodekit.load({"rules": [], "generation": {"num_return_sequences": 3, "do_sample": True, "seed": 1}})
    prompts = PROMPTS[:2]
    ours = dense.generate(**padded(prompts), custom_generate=decoder, max_new_tokens=6)
    named = dense.generate(
        **padded(prompts), custom_generate=decoder, max_new_tokens=6, num_return_sequences=3, do_sample=True
    )
    assert ours.shape[0] == 6
    assert torch.equal(ours, named)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams=4 was given, but strategy 'sample' keeps one hypothesis a row"),
        ({"prompt_lookup_num_tokens": 3}, r"prompt_lookup_num_tokens=3 .* say drafter: \{kind: ngram\}"),
    ],
)
def test_what_cannot_be_honoured_is_refused(dense, options, message) -> None:
    with pytest.raises(Refused, match=message):
        dense.generate(torch.tensor([[5, 6]]), custom_generate=GREEDY, **options)


# --- draws


def test_sampling_follows_the_exact_softmax() -> None:
    model = tiny_model("dense", vocab_size=11, dtype=torch.float64)
    prompt, rows = [3, 7, 5], 4000
    with torch.no_grad():
        probabilities = (model(torch.tensor([prompt])).logits[0, -1] / 2.0).softmax(-1)
    decoder = decodekit.load(
        {"rules": [{"kind": "temperature", "t": 2.0}], "generation": {"do_sample": True, "seed": 5}}
    )
    drawn = model.generate(torch.tensor([prompt] * rows), custom_generate=decoder, max_new_tokens=1)[:, -1]
    counts = drawn.bincount(minlength=11).double()
    expected = probabilities * rows
    assert (expected > 5).sum() > 3, "the test needs several likely tokens"
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    assert stats.chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue > 0.01


def test_a_row_draws_the_same_alone_and_in_any_batch(model, padded) -> None:
    decoder = sampled(seed=11, eos_token_id=96)
    batch = model.generate(**padded(), custom_generate=decoder)[:, 12:].tolist()
    backwards = model.generate(**padded(PROMPTS[::-1]), custom_generate=decoder)[:, 12:].tolist()[::-1]
    for prompt, row, other in zip(PROMPTS, batch, backwards, strict=True):
        solo = model.generate(torch.tensor([prompt]), custom_generate=decoder)[0, len(prompt) :].tolist()
        assert row[: len(solo)] == other[: len(solo)] == solo


@pytest.mark.parametrize(
    "rule",
    [
        {"kind": "mirostat", "tau": 2.0, "eta": 0.5},
        {"kind": "xtc", "threshold": 0.05, "protected": []},
        {"kind": "dry", "allowed_length": 1, "sequence_breakers": [], "multiplier": 9.0},
        {"kind": "watermark", "seeding_scheme": "selfhash", "context_width": 4},
        {"kind": "typical", "p": 0.5},
        {"kind": "top_h", "h": 0.5},
    ],
    ids=lambda rule: rule["kind"],
)
def test_a_rule_gives_a_row_its_solo_run(model, padded, rule) -> None:
    options = {"max_new_tokens": 10, "eos_token_id": None}
    hot = {"kind": "temperature", "t": 2.0}

    def decode(rules, prompts=PROMPTS):
        decoder = decodekit.load({"rules": rules, "generation": {"do_sample": True, "seed": 11}})
        return model.generate(**padded(prompts), **options, custom_generate=decoder)[:, -10:].tolist()

    batch = decode([hot, rule])
    assert batch == [decode([hot, rule], [prompt])[0] for prompt in PROMPTS]
    assert batch != decode([hot])


def test_copies_of_a_prompt_differ_and_seeds_reproduce(dense) -> None:
    ids = torch.tensor([[5, 17, 42]] * 10)
    first = dense.generate(ids, custom_generate=sampled(seed=3))
    assert len({tuple(row) for row in first.tolist()}) == 10
    assert torch.equal(first, dense.generate(ids, custom_generate=sampled(seed=3)))
    assert not torch.equal(first, dense.generate(ids, custom_generate=sampled(seed=4)))
    torch.manual_seed(0)
    free = dense.generate(ids, custom_generate=sampled())
    torch.manual_seed(0)
    assert torch.equal(free, dense.generate(ids, custom_generate=sampled()))
    assert not torch.equal(free, dense.generate(ids, custom_generate=sampled()))


def test_every_draw_is_the_documented_function_of_its_place(dense) -> None:
    prompt, seed = [5, 17, 42], 9
    output = dense.generate(torch.tensor([prompt, prompt]), custom_generate=sampled(seed=seed))
    for sample, row in enumerate(output.tolist()):
        ids = list(prompt)
        for position, token in enumerate(row[3:]):
            with torch.no_grad():
                probabilities = dense(torch.tensor([ids])).logits[:, -1].softmax(-1)
            draw = uniform(Stream(seed, sample, prompt_digest(prompt)), position)
            assert int(inverse_cdf(probabilities, torch.tensor([draw]))) == token
            ids.append(token)
            if token == 1:
                break


def test_an_id_that_the_model_does_not_have_is_told(dense) -> None:
    with pytest.raises(InputError, match="the prompt holds the id 500; the model has ids 0 to 96: is the tokenizer"):
        dense.generate(torch.tensor([[5, 500]]), custom_generate=GREEDY, max_new_tokens=2)


def test_a_prompt_can_bring_its_own_seed(dense) -> None:
    ids = torch.tensor([[5, 17], [6, 18]])
    seeds = [{"seed": 1}, {"seed": 2}]
    both = dense.generate(ids, custom_generate=sampled(eos_token_id=96), dk_inputs=seeds)
    solo = dense.generate(ids[1:], custom_generate=sampled(seed=2, eos_token_id=96))
    assert both[1].tolist() == solo[0].tolist()
    with pytest.raises(InputError, match="the seed of prompt 0 must be a whole number from 0"):
        dense.generate(ids, custom_generate=sampled(), dk_inputs=[{"seed": -1}, {}])
    with pytest.raises(
        InputError, match=r"dk_inputs is a list of one dict a prompt: expected 2, got 1 entries \(dict\)"
    ):
        dense.generate(ids, custom_generate=sampled(), dk_inputs=[{}])


# --- no option lets a pad or a neighbour change a row


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 14},
        {"min_length": 10, "eos_token_id": list(range(60))},
        {"min_new_tokens": 4, "eos_token_id": list(range(60))},
        {"repetition_penalty": 8.0},
        {"encoder_repetition_penalty": 3.0},
        {"no_repeat_ngram_size": 1},
        {"encoder_no_repeat_ngram_size": 1},
        {"forced_bos_token_id": 7},
        {"forced_eos_token_id": 1, "max_new_tokens": 5},
        {"begin_suppress_tokens": [5, 17, 33]},
        {"exponential_decay_length_penalty": (3, 1.7), "eos_token_id": [1, 5, 9, 33]},
    ],
    ids=str,
)
@pytest.mark.parametrize("cache", ["paged", "dynamic"])
def test_every_option_gives_a_row_its_solo_run_also_where_the_pad_is_eos(dense, padded, options, cache) -> None:
    decoder = decodekit.load({"cache": cache})
    options = {"max_new_tokens": 8, "pad_token_id": 1, **options}
    if "max_length" in options:
        del options["max_new_tokens"]
    prompts = [PROMPTS[number] for number in (1, 2, 4, 5)]  # the shortest and the longest are among them
    batch = dense.generate(**padded(prompts, pad_id=1), **options, custom_generate=decoder)[:, 12:].tolist()
    for prompt, row in zip(prompts, batch, strict=True):
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        [solo] = dense.generate(
            torch.tensor([prompt]), attention_mask=mask, **options, custom_generate=decoder
        ).tolist()
        assert row[: len(solo) - len(prompt)] == solo[len(prompt) :]
        assert set(row[len(solo) - len(prompt) :]) <= {1}


def test_watermark_comes_last_and_warpers_stay_beside_the_callers_own(dense, padded) -> None:
    from transformers import TopKLogitsWarper, WatermarkingConfig

    options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True, "do_sample": True}
    for more in (
        {"temperature": 0.5, "top_k": 5, "watermarking_config": WatermarkingConfig()},
        {"logits_processor": [TopKLogitsWarper(6)], "top_k": 2},
        {"typical_p": 0.3},
    ):
        plain = dense.generate(**padded(), **options, **more).scores[0]
        torch.testing.assert_close(
            dense.generate(**padded(), **options, **more, custom_generate=GREEDY).scores[0].float(), plain
        )


@pytest.mark.parametrize(
    ("rules", "named", "equal"),
    [
        ([{"kind": "repetition_penalty", "penalty": 1.2}], {"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ([{"kind": "top_p", "p": 0.5}], {"temperature": 3.0}, {"temperature": 3.0, "top_p": 0.5}),
        ([{"kind": "temperature", "t": 2.0}], {"typical_p": 0.2}, {"temperature": 2.0, "typical_p": 0.2}),
        ([{"kind": "temperature", "t": 2.0}], {"min_p": 0.0}, {"temperature": 2.0}),
        ([{"kind": "typical", "p": 0.9}], {"typical_p": 0.2}, {"typical_p": 0.2}),
        ([{"kind": "epsilon", "epsilon": 0.3}], {"epsilon_cutoff": 0.02}, {"epsilon_cutoff": 0.02}),
        ([{"kind": "eta", "epsilon": 0.3}], {"eta_cutoff": 0.02}, {"eta_cutoff": 0.02}),
        ([{"kind": "top_h", "h": 0.9}], {"top_h": 0.3}, {"top_h": 0.3}),
        (
            [],
            {"typical_p": 0.9, "top_h": 0.7, "temperature": 3.0},
            {"typical_p": 0.9, "top_h": 0.7, "temperature": 3.0},
        ),
        (
            [{"kind": "watermark", "bias": 9.0}],
            {"watermarking_config": {"bias": 4.0}},
            {"watermarking_config": {"bias": 4.0}},
        ),
    ],
)
def test_an_option_that_the_call_names_beats_the_recipes_rule(dense, rules, named, equal) -> None:
    options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True, "do_sample": True}
    ids = torch.tensor([[5, 17, 42, 5]])
    ours = dense.generate(ids, **options, **named, custom_generate=decodekit.load({"rules": rules})).scores[0]
    plain = dense.generate(ids, **options, **{"top_k": 0, **equal}).scores[0]
    torch.testing.assert_close(ours.float(), plain)


def test_greedy_ignores_what_only_sampling_needs(dense) -> None:
    decoder = decodekit.load({"rules": [{"kind": "top_p", "p": 0.5}]})
    ids = torch.tensor([[5, 17, 42]])
    assert torch.equal(
        dense.generate(ids, custom_generate=decoder, max_new_tokens=5, temperature=0.0, do_sample=False),
        dense.generate(ids, max_new_tokens=5),
    )


def test_a_length_criterion_of_the_callers_replaces_the_default(dense) -> None:
    from transformers import MaxLengthCriteria

    criteria = [MaxLengthCriteria(40)]
    ids = torch.tensor([[5, 17, 42]])
    output = dense.generate(ids, stopping_criteria=criteria, suppress_tokens=[1], custom_generate=GREEDY)
    assert output.shape[1] == 40


def test_masks_and_embeddings_that_are_not_left_padding_are_refused(dense) -> None:
    ids = torch.tensor([[5, 17, 42, 0], [5, 6, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    with pytest.raises(Refused, match="attention_mask has zeros behind ones; pads belong on the left"):
        dense.generate(ids, attention_mask=mask, custom_generate=GREEDY)
    with pytest.raises(Refused, match="the prompt is given as inputs_embeds"):
        dense.generate(inputs_embeds=dense.get_input_embeddings()(ids), custom_generate=GREEDY)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text": "a"}, "dk_inputs is a list of one dict a prompt, got dict"),
        ("a", "dk_inputs is a list of one dict a prompt, got str"),
        ([None], r"expected 1, got 1 entries \(NoneType\)"),
        ([{"contxt": "a"}], r"dk_inputs\[0\]: unknown input 'contxt': did you mean 'context'"),
        ([{"constraint": {}}], "constraints: 'kind' is missing: give one of all_of"),
    ],
)
def test_dk_inputs_that_cannot_be_used_say_why(dense, inputs, message) -> None:
    with pytest.raises((InputError, Refused, RowError), match=message):
        dense.generate(torch.tensor([[5, 6]]), custom_generate=GREEDY, dk_inputs=inputs)


# --- rows that fail


def test_a_prompt_longer_than_the_context_ends_alone(padded) -> None:
    model = tiny_model("dense", dtype=torch.float64)
    model.config.max_position_embeddings = 20
    prompts = [[5] * 25, [6, 7, 8]]
    with pytest.warns(RuntimeWarning, match="row 0 .* ended early: the prompt has 25 tokens, the model's context"):
        output = model.generate(**padded(prompts), custom_generate=GREEDY, max_new_tokens=4)
    solo = model.generate(torch.tensor([[6, 7, 8]]), custom_generate=GREEDY, max_new_tokens=4)
    assert output[0, 25:].tolist() == [0] * 4
    assert output[1, 22:].tolist() == solo[0].tolist()
    with pytest.raises(RowError, match="prompt 0: the prompt has 25 tokens"):
        model.generate(torch.tensor([[5] * 25]), custom_generate=GREEDY, max_new_tokens=4)


def test_a_row_stops_at_the_end_of_the_context() -> None:
    model = tiny_model("dense", dtype=torch.float64)
    model.config.max_position_embeddings = 20
    output = model.generate(torch.tensor([[6, 7, 8]]), custom_generate=GREEDY, max_new_tokens=100, eos_token_id=None)
    assert output.shape[1] == 20


def test_learned_positions_survive_a_prompt_that_is_too_long(padded) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 20, "vocab_size": 97, "initializer_range": 0.5}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=2, eos_token_id=1, pad_token_id=0)).eval().double()
    with pytest.warns(RuntimeWarning, match=r"row 0 \(prompt 0\) ended early"):
        output = model.generate(**padded([[5] * 25, [6, 7, 8]]), custom_generate=GREEDY, max_new_tokens=4)
    solo = model.generate(torch.tensor([[6, 7, 8]]), custom_generate=GREEDY, max_new_tokens=4)
    assert output[1, 22:].tolist() == solo[0].tolist()


def test_an_empty_row_ends_alone(dense, padded) -> None:
    inputs = padded([[0, 0, 0], [6, 7, 8]])
    inputs["attention_mask"][0] = 0
    with pytest.warns(RuntimeWarning, match="row 0 .* ended early: the prompt is empty: its attention mask"):
        output = dense.generate(**inputs, custom_generate=GREEDY, max_new_tokens=4)
    solo = dense.generate(torch.tensor([[6, 7, 8]]), custom_generate=GREEDY, max_new_tokens=4)
    assert output[1].tolist() == solo[0].tolist()


class PoisonRow(LogitsProcessor):
    """Gives one row NaN, or nothing to choose from, at one step."""

    def __init__(self, row: int, value: float, step: int) -> None:
        self.row, self.value, self.step, self.calls = row, value, step, 0

    def __call__(self, input_ids, scores):
        if self.calls == self.step:
            scores = scores.clone()
            scores[self.row] = self.value
        self.calls += 1
        return scores


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), float("inf")])
def test_a_row_that_its_rules_break_ends_alone(dense, padded, value) -> None:
    plain = dense.generate(**padded(), max_new_tokens=6, eos_token_id=None)
    what = "left no token to choose from" if value == -float("inf") else "made NaN or infinity of the logits"
    with pytest.warns(RuntimeWarning, match=rf"row 2 \(prompt 2\) ended early: rule 'PoisonRow' {what}"):
        ours = dense.generate(
            **padded(),
            max_new_tokens=6,
            eos_token_id=None,
            custom_generate=GREEDY,
            logits_processor=[PoisonRow(2, value, 3)],
        )
    expected = plain.clone()
    expected[2, 12 + 3 :] = 0
    assert torch.equal(ours, expected)


class Refusing(Rule):
    """Fails the rows whose prompt begins with a token, at one step, in a call or in commit."""

    kind: Literal["refusing"] = "refusing"
    token: int
    step: int = 3
    hook: Literal["call", "commit", "init_state"] = "call"

    def init_state(self, request):
        if self.hook == "init_state" and request.prompt_ids[0] == self.token:
            raise RowError("enough")
        return request.prompt_ids[0], 0

    def commit(self, state, token, logits):
        if self.hook == "commit" and state == (self.token, self.step):
            raise RowError("enough")
        return state[0], state[1] + 1

    def __call__(self, rows, logits):
        if self.hook == "call" and (self.token, self.step) in rows.states:
            raise RowError("enough")
        return logits


@pytest.mark.parametrize("cache", ["paged", "dynamic"])
@pytest.mark.parametrize("hook", ["call", "commit", "init_state"])
def test_a_row_for_which_a_rule_raises_ends_alone(model, padded, hook, cache) -> None:
    inputs = padded(PROMPTS[:3])
    expected = model.generate(**inputs, max_new_tokens=6, eos_token_id=None)
    expected[2, 7 + (0 if hook == "init_state" else 3) :] = 0
    decoder = decodekit.Decoder(Recipe(rules=(Refusing(token=50, hook=hook),), cache={"kind": cache}))
    with pytest.warns(RuntimeWarning, match=r"row 2 \(prompt 2\) ended early: (rule 'refusing': )?enough"):
        ours = model.generate(**inputs, max_new_tokens=6, eos_token_id=None, custom_generate=decoder)
    assert torch.equal(ours, expected)


def test_a_step_in_which_the_last_row_fails_is_not_returned(dense, padded) -> None:
    decoder = decodekit.Decoder(Recipe(rules=(Refusing(token=50, step=4),)))
    plain = dense.generate(**padded(PROMPTS[1:3]), max_new_tokens=1)[0, -1].item()
    options = {
        "max_new_tokens": 6,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_hidden_states": True,
    }
    with pytest.warns(RuntimeWarning, match="row 1 .*enough"):
        output = dense.generate(**padded(PROMPTS[1:3]), **options, eos_token_id=plain, custom_generate=decoder)
    assert output.sequences.shape[1] == 7 + 4
    assert len(output.scores) == len(output.hidden_states) == 4
    totals = dense.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    assert totals.isfinite().all()


@pytest.mark.parametrize("fallback", ["raw", "relax", "eos"])
def test_the_fallback_goes_on_with_that_row(dense, padded, fallback) -> None:
    decoder = decodekit.load({"fallback": fallback, "rules": [{"kind": "logit_bias", "bias": {"5": 1.0}}]})
    options = {"max_new_tokens": 6, "eos_token_id": 1, "suppress_tokens": [1]}
    plain = dense.generate(**padded(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Without eos among the processors the row would come back to life by chance only.
        ours = dense.generate(
            **padded(), **options, custom_generate=decoder, logits_processor=[PoisonRow(2, -float("inf"), 3)]
        )
    if fallback == "eos":
        plain[2, 12 + 3] = 1
        plain[2, 12 + 4 :] = 0
    assert torch.equal(ours, plain)


def test_nan_logits_of_the_model_end_their_row(dense, padded) -> None:
    class Broken(TokenStrategy):
        kind: str = "broken"

        def score(self, outputs):
            scores = outputs["main"].logits.clone()
            scores[scores.argmax(-1) == 13] = float("nan")
            return scores

    decoder = decodekit.Decoder(GREEDY.recipe.model_copy(update={"strategy": Broken()}))
    plain = dense.generate(**padded(), max_new_tokens=30, eos_token_id=None)
    hit = [row for row in range(8) if 13 in plain[row, 12:].tolist()]
    assert 0 < len(hit) < 8, "some rows should meet token 13"
    with pytest.warns(
        RuntimeWarning, match="the scores of the next token hold NaN: the model or the strategy is broken"
    ):
        ours = dense.generate(**padded(), max_new_tokens=30, eos_token_id=None, custom_generate=decoder)
    for row in range(8):
        full = plain[row, 12:].tolist()
        kept = full[: full.index(13)] if row in hit else full
        assert ours[row, 12:].tolist() == kept + [0] * (30 - len(kept))


# --- branches


class Guided(TokenStrategy):
    """Classifier-free guidance against the last token alone: two cached branches."""

    kind: str = "guided"

    def branches(self, request):
        return Branch("main", request.prompt_ids), Branch("unconditional", request.prompt_ids[-1:])

    def score(self, outputs):
        conditional, unconditional = (outputs[name].logits.log_softmax(-1) for name in ("main", "unconditional"))
        return unconditional + 1.5 * (conditional - unconditional)


def test_a_second_branch_is_cached_and_equals_guidance_of_transformers(model, padded) -> None:
    decoder = decodekit.Decoder(GREEDY.recipe.model_copy(update={"strategy": Guided()}))
    options = {"max_new_tokens": 8, "eos_token_id": None}
    ours = model.generate(**padded(), **options, custom_generate=decoder)
    for row, prompt in enumerate(PROMPTS):
        plain = model.generate(torch.tensor([prompt]), **options, guidance_scale=1.5)
        assert ours[row, 12:].tolist() == plain[0, len(prompt) :].tolist()


def test_forwarded_tokens_of_branches_grow_with_the_output(dense, tokenizer) -> None:
    decoder = decodekit.Decoder(GREEDY.recipe.model_copy(update={"strategy": Guided()}))
    counts = []
    for new in (4, 8, 12):
        [output] = decoder.run(dense, tokenizer, ["Who won?"], max_new_tokens=new, eos_token_id=96)
        counts.append(output.stats["forwarded_tokens"])
    prompt = len(tokenizer("Who won?").input_ids)
    assert counts == [prompt + 1 + 2 * (new - 1) for new in (4, 8, 12)]


def test_a_branch_of_an_unknown_model_says_how_to_give_one(dense) -> None:
    class Expert(Guided):
        def branches(self, request):
            return Branch("main", request.prompt_ids), Branch("unconditional", request.prompt_ids, model="amateur")

    decoder = decodekit.Decoder(GREEDY.recipe.model_copy(update={"strategy": Expert()}))
    with pytest.raises(
        InputError, match=r"needs a model called 'amateur'; give decoder.bind\(models=\{'amateur': model\}\)"
    ):
        dense.generate(torch.tensor([[5]]), custom_generate=decoder)
    bound = decoder.bind(models={"amateur": dense})
    assert dense.generate(torch.tensor([[5, 6]]), custom_generate=bound, max_new_tokens=3, eos_token_id=None).shape == (
        1,
        5,
    )


def test_an_encoder_decoder_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 97, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    with pytest.raises(Refused, match="T5ForConditionalGeneration is an encoder-decoder"):
        model.generate(torch.tensor([[5, 6]]), custom_generate=GREEDY)


class Raises(TokenStrategy):
    """Fails in one of its hooks, or asks for what there is not."""

    kind: str = "raises"
    hook: str

    def resolve(self, tokenizer):
        return self.fail("resolve", self)

    def hidden_layers(self, config):
        return self.fail("hidden_layers", (99,) if self.hook == "layers" else ())

    def branches(self, request):
        own = (Branch("main", request.prompt_ids),)
        if self.hook == "unnamed":
            own = (Branch("other", request.prompt_ids),)
        if self.hook == "empty":
            own = (*own, Branch("other", ()))
        if self.hook == "long":
            own = (*own, Branch("other", request.prompt_ids * 2000))
        return self.fail("branches", own)

    def score(self, outputs):
        return self.fail("score", outputs["main"].logits)

    def fail(self, hook, value):
        if self.hook == hook:
            raise ValueError("boom")
        return value


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        *(
            (hook, f"'raises' failed in {hook}: ValueError: boom")
            for hook in ("resolve", "hidden_layers", "branches", "score")
        ),
        ("layers", r"'raises' asks for hidden layers \[99\]; this model has 0 to 4"),
        (
            "unnamed",
            r"strategy 'raises' has branches \['other'\]; each needs a name of its own, and the first is called main",
        ),
        ("empty", "branch 'other' of 'raises': its prompt is empty"),
        ("long", "branch 'other' of 'raises': the prompt has 4000 tokens, the model's context holds 2048"),
    ],
)
def test_a_hook_that_fails_names_its_plugin(dense, hook, message) -> None:
    decoder = decodekit.Decoder(GREEDY.recipe.model_copy(update={"strategy": Raises(hook=hook)}))
    with pytest.raises(decodekit.DecodekitError, match=message):
        dense.generate(torch.tensor([[5, 6]]), custom_generate=decoder)


def test_a_broken_strategy_is_named(dense) -> None:
    class Wrong(TokenStrategy):
        kind: str = "wrong"

        def score(self, outputs):
            return outputs["main"].logits[:, :5]

    decoder = decodekit.Decoder(GREEDY.recipe.model_copy(update={"strategy": Wrong()}))
    with pytest.raises(
        decodekit.PluginError, match=r"strategy 'wrong' returned \(1, 5\) torch.float64; expected .*\(1, 97\)"
    ):
        dense.generate(torch.tensor([[5]]), custom_generate=decoder)


def test_dropout_that_is_active_is_refused_before_prefill(dense) -> None:
    model = copy.deepcopy(dense).train()
    ids, decoder = torch.tensor([[5, 6, 7]]), decodekit.load({})
    expected = dense.generate(ids, max_new_tokens=5, custom_generate=decoder)
    assert torch.equal(model.generate(ids, max_new_tokens=5, custom_generate=decoder), expected)
    model.model.layers[1].self_attn.attention_dropout = 0.1
    message = (
        r"training mode and drops activations \(model.layers.1.self_attn.attention_dropout = 0.1\); call model.eval\(\)"
    )
    with pytest.raises(Refused, match=message):
        model.generate(ids, max_new_tokens=5, custom_generate=decoder)
    assert torch.equal(model.eval().generate(ids, max_new_tokens=5, custom_generate=decoder), expected)
    model.lm_head = torch.nn.Sequential(torch.nn.Dropout(0.5), model.lm_head).train()
    with pytest.raises(Refused, match=r"lm_head.0.p = 0.5"):
        model.generate(ids, max_new_tokens=5, custom_generate=decoder)


def test_a_recipes_length_beats_the_models_own_default(dense, monkeypatch) -> None:
    monkeypatch.setattr(dense.generation_config, "max_new_tokens", 4)
    prompt, options = torch.tensor([[5, 6, 7]]), {"eos_token_id": None}
    longer = decodekit.load({"generation": {"max_new_tokens": 9}})
    assert dense.generate(prompt, custom_generate=longer, **options).shape == (1, 12)
    assert dense.generate(prompt, custom_generate=decodekit.load({}), **options).shape == (1, 7)
    assert dense.generate(prompt, custom_generate=longer, max_new_tokens=6, **options).shape == (1, 9)
