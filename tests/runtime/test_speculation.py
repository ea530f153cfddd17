import copy
from collections import Counter
from typing import Literal

import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

import decodekit
from decodekit.cache.paged import PagedCache
from decodekit.core.drafts import Draft, DraftState
from decodekit.core.protocols import Drafter
from decodekit.recipe import Generation, Recipe
from decodekit.runtime import speculation
from decodekit.runtime.decoder import Decoder
from decodekit.testing import tiny_model
from tests.cache.families import family_model
from tests.drafters.making import few
from tests.runtime.conftest import PROMPTS
from tests.runtime.oracle import Oracle, Sampled

NEW = 20
BUILT_IN = [
    {"kind": "ngram"},
    {"kind": "suffix"},
    {"kind": "recycle", "max_tokens": 3},
    {"kind": "recycle", "max_tokens": 6, "leaves": 8},
    {"kind": "lookahead", "max_tokens": 9, "window": 3, "guesses": 2},
]
RULES = [{"kind": "repetition_penalty", "penalty": 1.3}]
MIROSTAT = [*RULES, {"kind": "mirostat", "tau": 3.0}]


@pytest.fixture(scope="module", params=["dense", "sliding", "hybrid", "mamba2"])
def target(request):
    """A tiny model of each kind of memory, in float64."""
    if request.param == "mamba2":
        return copy.deepcopy(family_model("bamba")).double()
    return tiny_model(request.param, dtype=torch.float64)


def generate(model, inputs, recipe, **options):
    options = {"max_new_tokens": NEW, **options}
    decoder = recipe if isinstance(recipe, Decoder) else decodekit.load(recipe)
    return model.generate(**inputs, custom_generate=decoder, pad_token_id=0, **options)


def truth(ids, prompts=PROMPTS, samples=1):
    """What each prompt is followed by, for the oracle."""
    width = max(map(len, prompts))
    return {tuple(prompt): row[width:] for prompt, row in zip(prompts, ids[::samples].tolist(), strict=True)}


def oracle(known, *, generation=None, **options):
    drafter = Oracle(truth=known, schedule="constant", **options)
    return Decoder(Recipe(drafter=drafter, generation=Generation(**(generation or {}))))


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_drafters_give_the_tokens_of_plain_decoding(target, batch, padded) -> None:
    inputs = padded(PROMPTS[:batch])
    plain = generate(target, inputs, {})
    for drafter in BUILT_IN:
        for schedule in ("constant", "heuristic", "dynamic") if batch == 3 else ("constant",):
            found = generate(target, inputs, {"drafter": {**drafter, "schedule": schedule}})
            assert torch.equal(found, plain), (drafter, schedule)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("generation", [{}, {"do_sample": True, "seed": 5}])
def test_whatever_is_accepted_the_tokens_are_those_of_plain_decoding(target, batch, tree, generation, padded) -> None:
    inputs = padded(PROMPTS[:batch])
    plain = generate(target, inputs, {"generation": generation} if generation else {})
    decoder = oracle(truth(plain, PROMPTS[:batch]), generation=generation, tree=tree)
    assert torch.equal(generate(target, inputs, decoder), plain)


@pytest.mark.parametrize("drafter", [*BUILT_IN, None])
def test_a_second_turn_on_a_filled_cache(target, drafter, padded) -> None:
    inputs = padded(PROMPTS[:3])
    plain = generate(target, inputs, {})
    longer = [prompt + row[7:13] for prompt, row in zip(PROMPTS[:3], plain.tolist(), strict=True)]
    second = generate(target, padded(longer), {})
    cache = PagedCache(target.config, num_blocks=256, block_size=4)
    for prompts, expected in ((PROMPTS[:3], plain), (longer, second), (longer, second)):
        recipe = {"drafter": {**drafter, "schedule": "constant"}} if drafter else oracle(truth(expected, prompts))
        assert torch.equal(generate(target, padded(prompts), recipe, past_key_values=cache), expected)


@pytest.mark.parametrize(("rules", "generation"), [(RULES, {}), (MIROSTAT, {"do_sample": True, "seed": 3})])
def test_rules_and_their_states_see_each_drafts_own_prefix(target, rules, generation, padded) -> None:
    inputs = padded(PROMPTS[:3])
    plain = generate(target, inputs, {"rules": rules, "generation": generation})
    for drafter in BUILT_IN:
        recipe = {"rules": rules, "generation": generation, "drafter": {**drafter, "schedule": "constant"}}
        assert torch.equal(generate(target, inputs, recipe), plain), drafter
    for tree in (False, True):
        known = Oracle(truth=truth(plain, PROMPTS[:3]), schedule="constant", tree=tree)
        decoder = decodekit.load({"rules": rules, "generation": generation})
        decoder = Decoder(decoder.recipe.model_copy(update={"drafter": known}))
        assert torch.equal(generate(target, inputs, decoder), plain)


def test_the_state_after_accepted_drafts_is_read_where_none_follow(target, padded) -> None:
    inputs = padded(PROMPTS[:3])
    plain = generate(target, inputs, {})
    # Three are accepted at the second token, then two passes go without a draft, and so on.
    silent = tuple(place for place in range(NEW) if place % 6 not in (1,))
    decoder = oracle(truth(plain, PROMPTS[:3]), right=1.0, silent=silent, generation={})
    decoder = Decoder(
        decoder.recipe.model_copy(update={"drafter": decoder.recipe.drafter.model_copy(update={"max_tokens": 3})})
    )
    assert torch.equal(generate(target, inputs, decoder), plain)


def test_samples_of_a_prompt(dense, padded) -> None:
    generation = {"do_sample": True, "seed": 1, "num_return_sequences": 4}
    inputs = padded(PROMPTS[:2])
    plain = generate(dense, inputs, {"rules": [], "generation": generation})
    for drafter in BUILT_IN:
        recipe = {"rules": [], "generation": generation, "drafter": {**drafter, "schedule": "constant"}}
        assert torch.equal(generate(dense, inputs, recipe), plain), drafter


def test_other_strategies_verify_drafts_by_their_own_scores(model, padded) -> None:
    inputs = padded(PROMPTS[:3])
    strategy = {"kind": "dola", "layers": [0, 2]}
    plain = generate(model, inputs, {"strategy": strategy})
    assert not torch.equal(plain, generate(model, inputs, {}))
    for drafter in BUILT_IN:
        recipe = {"strategy": strategy, "drafter": {**drafter, "schedule": "constant"}}
        assert torch.equal(generate(model, inputs, recipe), plain), drafter


@pytest.mark.parametrize("limit", range(1, 9))
def test_max_new_tokens_inside_a_block(dense, limit, padded) -> None:
    inputs = padded(PROMPTS[:3])
    plain = generate(dense, inputs, {})
    decoder = oracle(truth(plain, PROMPTS[:3]), right=1.0)
    assert torch.equal(
        generate(dense, inputs, decoder, max_new_tokens=limit), plain[:, : inputs["input_ids"].shape[1] + limit]
    )


@pytest.mark.parametrize("place", range(1, 7))
def test_eos_inside_a_block(dense, place, padded) -> None:
    inputs = padded(PROMPTS[:1])
    tokens = generate(dense, inputs, {})[0, len(PROMPTS[0]) :].tolist()
    eos = tokens[place]
    first = tokens.index(eos)
    decoder = oracle({tuple(PROMPTS[0]): tokens}, right=1.0)
    found = generate(dense, inputs, decoder, eos_token_id=eos)[0, len(PROMPTS[0]) :].tolist()
    assert found == tokens[: first + 1]


@pytest.mark.parametrize("place", range(1, 8))
def test_stop_strings_inside_a_block(dense, tokenizer, place) -> None:
    options = {"raw": True, "max_new_tokens": NEW}
    [plain] = decodekit.load({}).run(dense, tokenizer, "Who won?", **options)
    stop = tokenizer.decode(plain.token_ids[place : place + 2])
    [expected] = decodekit.load({}).run(dense, tokenizer, "Who won?", stop_strings=[stop], **options)
    decoder = oracle({tuple(tokenizer("Who won?").input_ids): plain.token_ids}, right=1.0)
    [found] = decoder.run(dense, tokenizer, "Who won?", stop_strings=[stop], **options)
    assert expected.finish_reason == found.finish_reason == "stop"
    assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
    pieces = list(decoder.stream(dense, tokenizer, "Who won?", stop_strings=[stop], **options))
    assert "".join(pieces) == expected.text


def test_logprobs_are_those_of_plain_decoding(dense, tokenizer) -> None:
    options = {"raw": True, "max_new_tokens": NEW}
    [plain] = decodekit.load({}).run(dense, tokenizer, "Who won?", **options)
    decoder = oracle({tuple(tokenizer("Who won?").input_ids): plain.token_ids})
    [found] = decoder.run(dense, tokenizer, "Who won?", **options)
    assert found.stats["accepted_tokens"] > 5
    assert found.logprobs == pytest.approx(plain.logprobs, abs=1e-9)


def test_stats(dense, tokenizer) -> None:
    options = {"raw": True, "max_new_tokens": NEW}
    [plain] = decodekit.load({}).run(dense, tokenizer, "Who won?", **options)
    known = {tuple(tokenizer("Who won?").input_ids): plain.token_ids}
    [found] = oracle(known, right=1.0, silent=(1, 2)).run(dense, tokenizer, "Who won?", **options)
    stats = found.stats
    # The first token comes from the prompt, two passes go without drafts, then each gives six until 20 are there.
    assert stats["target_forwards"] == 1 + 2 + 3
    assert (stats["draft_tokens"], stats["accepted_tokens"], stats["draft_rounds"]) == (14, 14, 3)
    assert stats["tokens_per_pass"] == pytest.approx(20 / 6, abs=0.5)
    assert stats["fallback_rate"] == pytest.approx(0.4, abs=0.1)
    assert stats["acceptance_by_position"] == [1.0] * 5
    assert stats["drafts_per_round"] == pytest.approx(14 / 3)
    assert set(stats["pass_cost"]) == {0, 4, 5}
    assert stats["pass_cost"][0] == 1.0
    assert stats["draft_s"] > 0
    assert stats["verify_s"] > 0
    assert {"itl_p95_s", "forced_tokens"} <= stats.keys()


class Faulty(Drafter):
    """Fails in one of the ways that a drafter can."""

    kind: Literal["faulty"] = "faulty"
    how: str
    schedule: Literal["constant", "heuristic", "dynamic"] = "constant"

    def start(self, host) -> DraftState:
        return _Failing(self.how, host.vocab)


class _Failing(DraftState):
    def __init__(self, how: str, vocab: int) -> None:
        self._how, self._vocab = how, vocab

    def propose(self, rows, budgets):
        law = torch.zeros(1, self._vocab)
        law[0, 3] = 1
        if self._how == "raises":
            raise ZeroDivisionError("nothing to divide")
        draft = {
            "too many": Draft([1] * (max(budgets) + 1)),
            "outside": Draft([self._vocab]),
            "negative": Draft([-1]),
            "twins": Draft([4, 4], [-1, -1]),
            "parents": Draft([4, 5], [1, -1]),
            "not drawn": Draft([4], None, law),
            "shape": Draft([3], None, law[:, :-1]),
            "rows": Draft([3]),
            "observe": Draft([3]),
        }[self._how]
        return [draft] * (len(rows) - (self._how == "rows"))

    def observe(self, verified):
        if self._how == "observe":
            raise KeyError("lost")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "nothing to divide"),
        ("too many", "at most"),
        ("outside", "below 97"),
        ("negative", "below 97"),
        ("twins", "different tokens"),
        ("parents", "after its parent"),
        ("not drawn", "drawn from its row of q"),
        ("shape", "q (1, 96)"),
        ("rows", "propose"),
        ("observe", "lost"),
    ],
)
def test_decoding_goes_on_without_a_drafter_that_fails(dense, tokenizer, how, message) -> None:
    options = {"raw": True, "max_new_tokens": NEW}
    plain = decodekit.load({}).run(dense, tokenizer, ["Who won?", "a"], **options)
    found = Decoder(Recipe(drafter=Faulty(how=how))).run(dense, tokenizer, ["Who won?", "a"], **options)
    assert [output.token_ids for output in found] == [output.token_ids for output in plain]
    assert [output.error for output in found] == [None, None]
    assert message in found[0].stats["drafter_error"]
    assert "faulty" in found[0].stats["drafter_error"]


# Sampling with drafts that were drawn: the distribution over whole outputs.


@pytest.fixture(scope="module")
def coin():
    """A model of 6 tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=6,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=1.0,
            pad_token_id=0,
            eos_token_id=None,
            bos_token_id=None,
        )
        return LlamaForCausalLM(config).eval().requires_grad_(False)


def distribution(model, prompt, length):
    """The probability of every output of so many tokens, by [6] * length."""
    total = torch.ones(1)
    histories = torch.tensor([prompt])
    for _ in range(length):
        steps = model(histories).logits[:, -1].softmax(-1)
        total = (total.unsqueeze(1) * steps).flatten()
        histories = torch.cat(
            [histories.repeat_interleave(6, 0), torch.arange(6).repeat(len(histories)).unsqueeze(1)], 1
        )
    return total


def p_value(model, drafter, *, draws, length=3):
    """Chi-square of the outputs of many rows against the model's own distribution."""
    inputs = {"input_ids": torch.tensor([[1, 4]] * 500), "attention_mask": torch.ones(500, 2, dtype=torch.long)}
    counts = Counter()
    for seed in range(draws // 500):
        recipe = Recipe(drafter=drafter, rules=(), generation=Generation(do_sample=True, seed=seed))
        ids = generate(model, inputs, Decoder(recipe), max_new_tokens=length)[:, 2:]
        counts.update((ids @ torch.tensor([36, 6, 1])).tolist())
    expected = distribution(model, [1, 4], length).double()
    expected = expected / expected.sum() * counts.total()
    found = torch.tensor([counts[cell] for cell in range(len(expected))]).double()
    small = expected < 5
    found = torch.cat([found[~small], found[small].sum().reshape(1)])
    expected = torch.cat([expected[~small], expected[small].sum().reshape(1)])
    return float(chisquare(found.numpy(), expected.numpy()).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("siblings", [1, 2])
def test_drawn_drafts_leave_the_distribution(coin, siblings) -> None:
    assert p_value(coin, Sampled(siblings=siblings, schedule="constant", max_tokens=4), draws=20_000) > 1e-3


@pytest.mark.slow
def test_the_test_sees_an_argmax_that_reports_its_softmax(coin) -> None:
    assert p_value(coin, Sampled(honest=False, schedule="constant", max_tokens=4), draws=20_000) < 1e-6


@pytest.mark.slow
def test_drafters_on_the_demo_model(demo) -> None:
    model, tokenizer = demo
    prompts = ["Name three colours of the rainbow.", "Repeat after me: one two three, one two three, one two"]
    plain = decodekit.load({}).run(model, tokenizer, prompts, max_new_tokens=24)
    for drafter in BUILT_IN:
        found = decodekit.load({"drafter": {**drafter, "schedule": "constant"}}).run(
            model, tokenizer, prompts, max_new_tokens=24
        )
        assert [output.token_ids for output in found] == [output.token_ids for output in plain], drafter


# Drawn drafts under a constraint: what it forbids has to be rejected by its probability of 0, not left out beforehand.

LANGUAGE = {"kind": "regex", "pattern": "[ab]{3}"}


def lawful_p_value(tokenizer, draws):
    """Chi-square of texts of the language against what the masked model says."""
    model, a, b = few("dense"), *tokenizer("ab").input_ids
    counts = Counter()
    for seed in range(draws // 500):
        generation = {"do_sample": True, "seed": seed, "num_return_sequences": 500, "max_new_tokens": 5}
        recipe = decodekit.load({"constraint": LANGUAGE, "rules": [], "generation": generation}).recipe
        drafter = Sampled(schedule="constant", max_tokens=3)
        found = Decoder(recipe.model_copy(update={"drafter": drafter})).run(model, tokenizer, "ab", raw=True)
        counts.update(output.text for output in found)
    expected = {"": 1.0}
    for _ in range(3):
        histories = torch.tensor([tokenizer("ab" + text).input_ids for text in expected])
        steps = model(histories).logits[:, -1, [a, b]].softmax(-1).tolist()
        expected = {
            text + own: before * step
            for (text, before), both in zip(expected.items(), steps, strict=True)
            for own, step in zip("ab", both, strict=True)
        }
    assert counts.keys() <= expected.keys()
    whole = counts.total() / sum(expected.values())
    return float(chisquare([counts[text] for text in expected], [own * whole for own in expected.values()]).pvalue)


@pytest.mark.slow
def test_drawn_drafts_leave_the_distribution_under_a_constraint(tokenizer) -> None:
    assert lawful_p_value(tokenizer, 20_000) > 1e-3


@pytest.mark.slow
def test_the_test_sees_drawn_drafts_that_are_pruned(tokenizer, monkeypatch) -> None:
    def pruned(sequence, draft, room):
        return draft.kept(sequence.constraint.legal(draft.tokens, draft.parent_of))

    monkeypatch.setattr(speculation, "_lawful", pruned)
    assert lawful_p_value(tokenizer, 20_000) < 1e-6


def test_drawn_drafts_are_left_whole_by_a_constraint(tokenizer, monkeypatch) -> None:
    given, seen = speculation._lawful, []

    def watched(sequence, draft, room):
        seen.append((draft, given(sequence, draft, room)))
        return seen[-1][1]

    monkeypatch.setattr(speculation, "_lawful", watched)
    assert 0 <= lawful_p_value(tokenizer, 500) <= 1
    assert len(seen) > 500
    assert all(before is after for before, after in seen)
