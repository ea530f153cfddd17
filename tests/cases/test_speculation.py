"""Faults of other projects' speculative decoding, which must not happen here; each test names where it was reported."""

import re

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import decodekit
from decodekit.cache.paged import PagedCache
from decodekit.kernels.verify import verify
from decodekit.recipe import Generation, Recipe
from decodekit.rules.min_p import MinP
from decodekit.runtime.decoder import Decoder
from decodekit.testing import tiny_model
from tests.cache.families import Loop
from tests.runtime.oracle import Oracle, Sampled

KINDS = ("ngram", "suffix", "recycle", "lookahead")
PROMPTS = ("Who won?", "The other one, please: 1 + 2 = ")
OPTIONS = {"raw": True, "max_new_tokens": 20}


@pytest.fixture(scope="module")
def hybrid():
    return tiny_model("hybrid", dtype=torch.float64)


def drafting(kind, **options):
    return decodekit.load({"drafter": {"kind": kind, "schedule": "constant", **options}})


def knowing(model, tokenizer, prompts=PROMPTS, **options):
    """An oracle, and the plain outputs that it knows."""
    plain = decodekit.load({}).run(model, tokenizer, list(prompts), **OPTIONS)
    known = {tuple(tokenizer(prompt).input_ids): own.token_ids for prompt, own in zip(prompts, plain, strict=True)}
    return Decoder(Recipe(drafter=Oracle(truth=known, schedule="constant", **options))), plain


def tokens(outputs):
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_two_decodes_as_each_row_alone(model, tokenizer, kind) -> None:
    """https://github.com/huggingface/transformers/issues/32165."""
    decoder = drafting(kind, max_tokens=4)
    together = decoder.run(model, tokenizer, list(PROMPTS), **OPTIONS)
    alone = [decoder.run(model, tokenizer, prompt, **OPTIONS)[0] for prompt in PROMPTS]
    assert tokens(together) == tokens(alone)


@pytest.mark.slow
def test_a_chat_prompt_is_decoded_as_without_drafts(demo) -> None:
    """https://github.com/huggingface/transformers/issues/30413."""
    model, tokenizer = demo
    chat = [[{"role": "user", "content": "Say cheese three times."}]]
    plain = decodekit.load({}).run(model, tokenizer, chat, max_new_tokens=16)
    assert tokens(drafting("ngram").run(model, tokenizer, chat, max_new_tokens=16)) == tokens(plain)


def test_a_rollback_moves_no_keys(dense) -> None:
    """https://github.com/huggingface/transformers/issues/30312."""
    cache = PagedCache(dense.config, num_blocks=8, block_size=4)
    loop = Loop(dense, cache)
    [row] = loop.open([5, 17, 42, 8])
    loop.prefill(row, [5, 17, 42, 8])
    cache.activate_past_recording()
    places = [store.keys.data_ptr() for store in cache._stores.values()]
    blocks = cache.stats()["groups"][0]
    first = loop.extend([row], [[9, 30, 61]])
    assert cache.rollback([3]) == [0]
    again = loop.extend([row], [[9, 30, 61]])
    assert [store.keys.data_ptr() for store in cache._stores.values()] == places
    assert torch.equal(first, again)
    cache.rollback([3])
    assert cache.stats()["groups"][0]["used"] == blocks["used"]


def test_a_rejection_behind_a_sliding_window_is_taken_back_exactly(tokenizer) -> None:
    """https://github.com/huggingface/transformers/pull/45745."""
    model = tiny_model("sliding", dtype=torch.float64)
    for right in (0.0, 0.3, 0.7):
        decoder, plain = knowing(model, tokenizer, right=right)
        decoder = Decoder(
            decoder.recipe.model_copy(update={"drafter": decoder.recipe.drafter.model_copy(update={"max_tokens": 9})})
        )
        assert tokens(decoder.run(model, tokenizer, list(PROMPTS), **OPTIONS)) == tokens(plain)


def test_a_burst_past_a_window_of_8_equals_the_whole_forward(padded_window) -> None:
    """https://github.com/huggingface/transformers/pull/48280."""
    model, prompt = padded_window
    ids = [*prompt]
    for _ in range(24):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    drafter = Oracle(truth={tuple(prompt): ids[len(prompt) :]}, schedule="constant", max_tokens=4)
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        custom_generate=Decoder(Recipe(drafter=drafter)),
        max_new_tokens=24,
        eos_token_id=None,
    )
    assert found[0].tolist() == ids


@pytest.fixture(scope="module")
def padded_window():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Gemma3TextConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            initializer_range=0.5,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
        return Gemma3ForCausalLM(config).double().eval().requires_grad_(False), [5, 17, 42, 8, 33]


def test_an_argmax_draft_is_a_one_hot_proposal() -> None:
    """https://github.com/huggingface/transformers/issues/47932."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    one_hot, softmax = torch.tensor([[0.0, 1.0, 0.0, 0.0]]), torch.tensor([[0.3, 0.4, 0.2, 0.1]])

    def law(q):
        """The exact distribution of the token after a round that drafts token 1."""
        accept = min(1.0, float(p[1] / q[0, 1]))
        left = verify(p, [1], q, [1 - 1e-9])[1]
        return accept * torch.eye(4)[1].double() + (1 - accept) * left

    torch.testing.assert_close(law(one_hot), p.double(), atol=1e-6, rtol=0)
    assert 0.5 * (law(softmax) - p).abs().sum() > 0.15


def test_a_stop_string_that_ends_inside_a_block_ends_the_text(dense, tokenizer) -> None:
    """https://github.com/huggingface/transformers/issues/48039."""
    decoder, plain = knowing(dense, tokenizer, PROMPTS[:1], right=1.0)
    stop = tokenizer.decode(plain[0].token_ids[2:4])  # the first pass gives tokens 1 to 6
    [found] = decoder.run(dense, tokenizer, PROMPTS[0], stop_strings=[stop], **OPTIONS)
    assert found.finish_reason == "stop"
    assert stop not in found.text
    assert len(found.token_ids) <= 4
    assert "".join(decoder.stream(dense, tokenizer, PROMPTS[0], stop_strings=[stop], **OPTIONS)) == found.text


@pytest.mark.parametrize("kind", KINDS)
def test_eos_and_length_hold_for_every_drafter(dense, tokenizer, kind) -> None:
    """https://github.com/huggingface/transformers/pull/48981."""
    [plain] = decodekit.load({}).run(dense, tokenizer, PROMPTS[0], **OPTIONS)
    for place in range(1, 6):
        options = {**OPTIONS, "eos_token_id": plain.token_ids[place]}
        [expected] = decodekit.load({}).run(dense, tokenizer, PROMPTS[0], **options)
        [found] = drafting(kind, max_tokens=4).run(dense, tokenizer, PROMPTS[0], **options)
        assert (found.token_ids, found.finish_reason) == (expected.token_ids, "eos")


def test_nothing_follows_an_eos_that_lies_in_the_looked_up_text(dense, tokenizer) -> None:
    """https://github.com/huggingface/transformers/pull/31301."""
    [plain] = decodekit.load({}).run(dense, tokenizer, PROMPTS[0], **OPTIONS)
    # The prompt of the second call holds the output of the first, so that the lookup drafts beyond the EOS.
    decoder, _ = knowing(dense, tokenizer, PROMPTS[:1], right=1.0)
    eos = plain.token_ids[2]
    [found] = decoder.run(dense, tokenizer, PROMPTS[0], **{**OPTIONS, "eos_token_id": eos})
    assert found.token_ids == plain.token_ids[: plain.token_ids.index(eos) + 1]
    assert found.finish_reason == "eos"


def test_lookup_on_a_recurrent_hybrid(hybrid, tokenizer) -> None:
    """https://github.com/vllm-project/vllm/issues/39273."""
    prompts = ["aaaa abab abab ab", "1 2 1 2 1 2 1", *PROMPTS]
    plain = decodekit.load({}).run(hybrid, tokenizer, prompts, **OPTIONS)
    found = drafting("ngram").run(hybrid, tokenizer, prompts, **OPTIONS)
    assert tokens(found) == tokens(plain)
    assert sum(output.stats["draft_tokens"] for output in found) > 10


def test_a_round_without_drafts_reads_the_committed_state(hybrid, tokenizer) -> None:
    """https://github.com/vllm-project/vllm/pull/52942."""
    decoder, plain = knowing(hybrid, tokenizer, right=1.0, silent=tuple(range(5, 20)), max_tokens=3)
    found = decoder.run(hybrid, tokenizer, list(PROMPTS), **OPTIONS)
    assert tokens(found) == tokens(plain)
    assert all(output.stats["acceptance_by_position"] == [1.0] * 3 for output in found)
    assert all(output.stats["fallback_rate"] > 0.5 for output in found)


@pytest.mark.parametrize("siblings", [0, 1, 2])
def test_rules_hold_at_every_verified_position(dense, tokenizer, siblings) -> None:
    """https://github.com/vllm-project/vllm/issues/42744."""
    rules, generation = (MinP(p=0.5),), {"do_sample": True, "seed": 2}
    plain = Decoder(Recipe(rules=rules, generation=Generation(**generation))).run(
        dense, tokenizer, list(PROMPTS), **OPTIONS
    )
    if not siblings:
        known = {tuple(tokenizer(own).input_ids): out.token_ids for own, out in zip(PROMPTS, plain, strict=True)}
        drafter = Oracle(truth=known, schedule="constant")
    else:
        drafter = Sampled(siblings=siblings, schedule="constant")
    recipe = Recipe(rules=rules, drafter=drafter, generation=Generation(**generation))
    found = Decoder(recipe).run(dense, tokenizer, list(PROMPTS), **OPTIONS)
    if not siblings:
        assert tokens(found) == tokens(plain)
    for prompt, output in zip(PROMPTS, found, strict=True):
        ids = tokenizer(prompt).input_ids
        logits = dense(torch.tensor([[*ids, *output.token_ids]])).logits[0, len(ids) - 1 : -1]
        probabilities = logits.softmax(-1)
        own = probabilities.gather(1, torch.tensor(output.token_ids).unsqueeze(1)).squeeze(1)
        assert bool((own >= 0.5 * probabilities.amax(-1) - 1e-9).all())


@pytest.mark.parametrize("options", [{"min_ngram": 1}, {"min_ngram": 2, "max_ngram": 2}, {"max_tokens": 12}])
def test_the_output_does_not_depend_on_a_drafters_settings(dense, tokenizer, options) -> None:
    """https://github.com/vllm-project/vllm/issues/40875."""
    prompt = '{"name": "get", "arguments": {"id": 1}} {"name": "get", "arguments": {"id'
    [plain] = decodekit.load({}).run(dense, tokenizer, prompt, **OPTIONS)
    [found] = drafting("ngram", **options).run(dense, tokenizer, prompt, **OPTIONS)
    assert found.token_ids == plain.token_ids


def test_logprobs_are_those_of_plain_decoding(dense, tokenizer) -> None:
    """https://github.com/vllm-project/vllm/issues/17876."""
    decoder, plain = knowing(dense, tokenizer)
    for own, expected in zip(decoder.run(dense, tokenizer, list(PROMPTS), **OPTIONS), plain, strict=True):
        assert own.logprobs == pytest.approx(expected.logprobs, abs=1e-9)
        assert max(own.logprobs) < 0


def test_a_tree_on_a_recurrent_hybrid_gives_each_branch_its_own_state(hybrid, tokenizer) -> None:
    """https://github.com/sgl-project/sglang/pull/27463."""
    decoder, plain = knowing(hybrid, tokenizer, tree=True)
    found = decoder.run(hybrid, tokenizer, list(PROMPTS), **OPTIONS)
    assert tokens(found) == tokens(plain)
    assert sum(output.stats["accepted_tokens"] for output in found) > 5


def constrained(model, tokenizer, constraint, *, beyond=(), **oracle):
    """The plain outputs under a constraint, and those of an oracle that knows them and goes on ``beyond`` their end."""
    recipe = {"constraint": constraint}
    plain = decodekit.load(recipe).run(model, tokenizer, list(PROMPTS), **OPTIONS)
    known = {
        tuple(tokenizer(prompt).input_ids): [*own.token_ids, *beyond]
        for prompt, own in zip(PROMPTS, plain, strict=True)
    }
    drafter = Oracle(truth=known, schedule="constant", **oracle)
    decoder = Decoder(decodekit.load(recipe).recipe.model_copy(update={"drafter": drafter}))
    return plain, decoder.run(model, tokenizer, list(PROMPTS), **OPTIONS)


@pytest.mark.parametrize("tree", [False, True])
def test_the_mask_begins_where_its_marker_ends_inside_a_draft(model, tokenizer, tree) -> None:
    """https://github.com/vllm-project/vllm/pull/36138."""
    free = decodekit.load({}).run(model, tokenizer, list(PROMPTS), **OPTIONS)
    marker = free[0].text[2]  # the third token of the first draft
    constraint = {"kind": "regex", "pattern": "[xy]{3,6}z", "after": marker}
    plain, found = constrained(model, tokenizer, constraint, right=1.0, tree=tree)
    assert tokens(found) == tokens(plain)
    before, _, after = found[0].text.partition(marker)
    assert free[0].text.startswith(before)
    assert re.match("[xy]{3,6}z", after)
    assert found[0].stats["target_forwards"] < plain[0].stats["target_forwards"]


@pytest.mark.parametrize("right", [0.0, 0.4])
@pytest.mark.parametrize("tree", [False, True])
def test_every_token_behind_a_rejected_draft_is_masked(model, tokenizer, right, tree) -> None:
    """https://github.com/vllm-project/vllm/pull/54442."""
    pattern = "([a-m][n-z]){4,9}[.]"
    plain, found = constrained(model, tokenizer, {"kind": "regex", "pattern": pattern}, right=right, tree=tree)
    assert tokens(found) == tokens(plain)
    assert all(re.fullmatch(pattern, own.text) for own in found)


@pytest.mark.parametrize(
    "constraint", [{"kind": "regex", "pattern": "[a-z]{2,5}"}, {"kind": "choice", "choices": ["yes", "no"]}]
)
def test_a_row_ends_with_its_grammar_inside_a_draft(model, tokenizer, constraint) -> None:
    """https://github.com/sgl-project/sglang/issues/9187, https://github.com/sgl-project/sglang/pull/21723."""
    plain, found = constrained(model, tokenizer, constraint, beyond=(30, 31, 32, 33, 34), right=1.0)
    assert tokens(found) == tokens(plain)
    assert [own.finish_reason for own in found] == [own.finish_reason for own in plain]
    assert all(own.finish_reason in ("eos", "constraint") for own in found)
