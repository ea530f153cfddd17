import pytest
import torch

import decodekit
from decodekit.core.errors import InputError, RecipeError, RowError
from decodekit.core.types import BranchOutputs, Outputs
from decodekit.strategies.cad import ContextAware
from decodekit.strategies.cfg import ClassifierFree
from decodekit.testing import check_strategy, tiny_tokenizer

pytestmark = pytest.mark.integration

CONTEXT, QUESTION = "Ann won it in 2031.", "Who won?"
CHAT = "{% for message in messages %}<bos>{{ message['content'] }}<eos>{% endfor %}"


@pytest.mark.parametrize("options", [{}, {"alpha": 0.5}, {"adaptive": True}], ids=str)
def test_obeys_the_laws_of_a_strategy(options) -> None:
    check_strategy(ContextAware(**options), inputs={"context": CONTEXT})


@pytest.mark.parametrize("adaptive", [False, True])
def test_equals_the_formula_recomputed_without_cache(model, tokenizer, adaptive) -> None:
    prompt = {"prompt": QUESTION, "context": CONTEXT}
    [output] = decodekit.strategy("cad", alpha=1.5, adaptive=adaptive).run(model, tokenizer, prompt, max_new_tokens=8)
    given, prior = tokenizer(f"{CONTEXT}\n{QUESTION}").input_ids, tokenizer(QUESTION).input_ids
    for token, logprob in zip(output.token_ids, output.logprobs, strict=True):
        with torch.no_grad():
            z, z_prior = (model(torch.tensor([ids])).logits[0, -1] for ids in (given, prior))
        p, q = z.softmax(-1), z_prior.softmax(-1)
        jsd = 0.5 * sum((one * (one / ((p + q) / 2)).log()).sum() for one in (p, q))
        alpha = float(jsd) if adaptive else 1.5
        expected = (z + alpha * (z - z_prior)).log_softmax(-1)
        assert token == int(expected.argmax())
        # The hybrid model runs its recurrence in float32, in another order with a cache than without.
        assert logprob == pytest.approx(float(expected[token]), abs=1e-3)
        given, prior = [*given, token], [*prior, token]


def test_alpha_of_each_position_is_its_divergence_in_nats() -> None:
    far = torch.tensor([[900.0, 0, 0], [0, 0, 0]], dtype=torch.float64)
    prior = torch.tensor([[0.0, 0, 900], [0, 0, 0]], dtype=torch.float64)
    outputs = Outputs({"main": BranchOutputs(far), "without_context": BranchOutputs(prior)})
    scores = ContextAware(adaptive=True).score(outputs)
    log_2 = torch.log(torch.tensor(2.0, dtype=torch.float64))
    torch.testing.assert_close(outputs.annotations["divergence"], torch.stack([log_2, 0 * log_2]))
    torch.testing.assert_close(scores[0], (1 + log_2) * far[0] - log_2 * prior[0])
    torch.testing.assert_close(scores[1], far[1])


def test_alpha_0_is_greedy_decoding(model, tokenizer) -> None:
    texts = [f"{CONTEXT} {question}" for question in (QUESTION, "a", "The other one: 1 + 2 = ")]
    ours = decodekit.strategy("cad", alpha=0).run(
        model, tokenizer, [{"prompt": text, "context": CONTEXT} for text in texts], max_new_tokens=8
    )
    plain = decodekit.load({}).run(model, tokenizer, texts, max_new_tokens=8)
    assert [output.token_ids for output in ours] == [output.token_ids for output in plain]


def test_is_guidance_with_scale_1_plus_alpha() -> None:
    generator = torch.Generator().manual_seed(3)
    given, prior = (5 * torch.randn(6, 97, generator=generator) for _ in range(2))
    for alpha in (0.0, 0.3, 1.0, 4.0):
        cad = ContextAware(alpha=alpha).score(
            Outputs({"main": BranchOutputs(given), "without_context": BranchOutputs(prior)})
        )
        cfg = ClassifierFree(guidance_scale=1 + alpha).score(
            Outputs({"main": BranchOutputs(given), "negative": BranchOutputs(prior)})
        )
        torch.testing.assert_close(cad.log_softmax(-1), cfg.log_softmax(-1), atol=1e-5, rtol=1e-5)


def test_a_token_that_the_model_excludes_stays_excluded() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 0.0]])
    outputs = Outputs({"main": BranchOutputs(logits), "without_context": BranchOutputs(logits)})
    torch.testing.assert_close(ContextAware().score(outputs), logits)


# --- which prompts the two branches have


def prompts_of(decoder, model, **call) -> dict[str, list[tuple[int, ...]]]:
    """The prompts of the branches of a call, a tuple of ids a row."""
    seen: dict[str, list[tuple[int, ...]]] = {}

    class Watched(ContextAware):
        def branches(self, request):
            own = super().branches(request)
            for branch in own:
                seen.setdefault(branch.name, []).append(branch.prompt_ids)
            return own

    watched = Watched(**decoder.recipe.strategy.model_dump())
    decoder = decodekit.Decoder(decoder.recipe.model_copy(update={"strategy": watched}), tokenizer=decoder.tokenizer)
    if "prompts" in call:
        decoder.run(model, max_new_tokens=1, **call)
    else:
        model.generate(custom_generate=decoder, max_new_tokens=1, **call)
    return seen


def test_a_question_alone_is_put_behind_its_context(dense, tokenizer) -> None:
    decoder = decodekit.strategy("cad", template="Given {context}: {prompt}")
    odd = "{prompt} is in braces"
    given = [{"prompt": QUESTION, "context": CONTEXT}, {"prompt": "a", "context": odd}]
    seen = prompts_of(decoder, dense, prompts=given, tokenizer=tokenizer)
    assert [tokenizer.decode(ids) for ids in seen["main"]] == [f"Given {CONTEXT}: {QUESTION}", f"Given {odd}: a"]
    assert [tokenizer.decode(ids) for ids in seen["without_context"]] == [QUESTION, "a"]


@pytest.mark.parametrize(
    ("whole", "rest"),
    [
        (f"{CONTEXT}\n\n{QUESTION}", QUESTION),
        (f"Read: {CONTEXT} {QUESTION}", f"Read: {QUESTION}"),
        (f"x{CONTEXT} {QUESTION}", f"x {QUESTION}"),
        (f"{QUESTION} {CONTEXT}", f"{QUESTION} "),
    ],
)
def test_a_prompt_that_holds_the_context_loses_it(dense, tokenizer, whole, rest) -> None:
    ids = tokenizer(whole).input_ids
    seen = prompts_of(
        decodekit.strategy("cad").bind(tokenizer=tokenizer),
        dense,
        input_ids=torch.tensor([ids]),
        dk_inputs=[{"context": CONTEXT}],
    )
    assert seen["main"] == [tuple(ids)]
    assert [tokenizer.decode(ids) for ids in seen["without_context"]] == [rest]


def test_the_chat_template_around_a_context_stays(dense) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    messages = [{"role": "user", "content": f"{CONTEXT} {QUESTION}"}]
    given = [{"prompt": messages, "context": CONTEXT}, {"prompt": QUESTION, "context": CONTEXT}]
    seen = prompts_of(decodekit.strategy("cad"), dense, prompts=given, tokenizer=tokenizer)
    assert [tokenizer.decode(ids) for ids in seen["main"]] == [
        f"<bos>{CONTEXT} {QUESTION}<eos>",
        f"<bos>{CONTEXT}\n{QUESTION}<eos>",
    ]
    assert [tokenizer.decode(ids) for ids in seen["without_context"]] == [f"<bos>{QUESTION}<eos>"] * 2


def test_a_context_of_ids_needs_no_tokenizer(dense) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    decoder = decodekit.strategy("cad")
    inside = prompts_of(decoder, dense, input_ids=ids, dk_inputs=[{"context": [6, 7]}])
    assert inside == {"main": [(5, 6, 7, 8, 9)], "without_context": [(5, 8, 9)]}
    before = prompts_of(decoder, dense, input_ids=ids, dk_inputs=[{"context": [7, 6]}])
    assert before == {"main": [(7, 6, 5, 6, 7, 8, 9)], "without_context": [(5, 6, 7, 8, 9)]}


def test_the_option_serves_prompts_that_bring_no_context(dense, tokenizer) -> None:
    decoder = decodekit.strategy("cad", context="the default")
    seen = prompts_of(decoder, dense, prompts=["a", {"prompt": "b", "context": CONTEXT}], tokenizer=tokenizer)
    assert [tokenizer.decode(ids) for ids in seen["main"]] == ["the default\na", f"{CONTEXT}\nb"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "cad needs 'context' for prompt 0; give it as dk_inputs"),
        ({"context": " \n"}, "cad: the context of prompt 0 is empty; give at least one word"),
        ({"context": []}, "cad: the context of prompt 0 should be a text or a list of token ids, got \\[\\]"),
        ({"context": 7}, "cad: the context of prompt 0 should be a text or a list of token ids, got 7"),
        ({"context": "elsewhere"}, "does not occur in what its ids decode to; give it to the letter"),
        ({"context": "caf\u00e9", "text": "caf\u00e9 Who won?"}, "does not occur in what its ids decode to"),
        ({"context": "Who won?"}, "branch 'without_context' of 'cad': its prompt is empty"),
    ],
)
def test_a_context_that_cannot_be_used_is_one_clear_line(dense, tokenizer, inputs, message) -> None:
    ids = tokenizer("Who won?", return_tensors="pt").input_ids
    decoder = decodekit.strategy("cad").bind(tokenizer=tokenizer)
    with pytest.raises(RowError, match=message):
        dense.generate(ids, custom_generate=decoder, dk_inputs=[inputs], max_new_tokens=2)


def test_a_text_without_a_tokenizer_and_a_template_without_places_are_refused(dense) -> None:
    with pytest.raises(RowError, match="cad needs a tokenizer; give dk_tokenizer=tokenizer"):
        dense.generate(
            torch.tensor([[5, 6]]), custom_generate=decodekit.strategy("cad"), dk_inputs=[{"context": CONTEXT}]
        )
    with pytest.raises(RecipeError, match=r"template: should hold \{prompt\}, got '\{context\}'"):
        decodekit.strategy("cad", template="{context}")


def test_a_row_without_context_fails_alone(dense, tokenizer) -> None:
    good, bad = decodekit.strategy("cad").run(
        dense, tokenizer, [{"prompt": "a", "context": CONTEXT}, {"prompt": "b"}], max_new_tokens=3
    )
    assert good.error is None
    assert len(good.token_ids) == 3
    assert "cad needs 'context' for prompt 1" in bad.error


# --- caches, rules, scores


def test_each_branch_forwards_each_token_once(model, tokenizer) -> None:
    prompt = {"prompt": QUESTION, "context": CONTEXT}
    lengths = [len(tokenizer(text).input_ids) for text in (f"{CONTEXT}\n{QUESTION}", QUESTION)]
    for cache in ("paged", "dynamic"):
        decoder = decodekit.load({"strategy": "cad", "cache": cache, "generation": {"suppress_tokens": [1]}})
        for new in (1, 5, 9):
            [output] = decoder.run(model, tokenizer, prompt, max_new_tokens=new)
            assert output.stats["forwarded_tokens"] == sum(lengths) + 2 * (new - 1)
            assert output.stats["target_forwards"] == new
            assert output.stats["prompt_tokens"] == lengths[0]


def test_both_caches_give_the_same_tokens(model, tokenizer) -> None:
    prompts = [{"prompt": text, "context": CONTEXT} for text in (QUESTION, "a", "The other one: 1 + 2 = ")]
    paged, dynamic = (
        [
            output.token_ids
            for output in decodekit.load({"strategy": "cad", "cache": cache}).run(
                model, tokenizer, prompts, max_new_tokens=10
            )
        ]
        for cache in ("paged", "dynamic")
    )
    assert paged == dynamic


def test_rules_follow_the_strategy_and_see_the_prompt_with_its_context(dense, tokenizer) -> None:
    prompt = {"prompt": "W", "context": CONTEXT}
    decoder = decodekit.load(
        {
            "strategy": "cad",
            "rules": [{"kind": "no_repeat_ngram", "n": 1}],
            "generation": {"suppress_tokens": [1], "max_new_tokens": 12},
        }
    )
    [output] = decoder.run(dense, tokenizer, prompt)
    seen = set(tokenizer(f"{CONTEXT}\nW").input_ids)
    assert not seen & set(output.token_ids)
    assert len(set(output.token_ids)) == 12


def test_score_gives_what_decoding_noted(model, tokenizer) -> None:
    prompt = {"prompt": QUESTION, "context": CONTEXT}
    for options in ({"alpha": 2.0}, {"adaptive": True}):
        decoder = decodekit.strategy("cad", **options)
        continuation = " the end"
        scores = decoder.score(model, tokenizer, prompt, continuation)
        given, prior = tokenizer(f"{CONTEXT}\n{QUESTION}").input_ids, tokenizer(QUESTION).input_ids
        for token, score in zip(tokenizer(continuation).input_ids, scores, strict=True):
            with torch.no_grad():
                branches = [BranchOutputs(model(torch.tensor([ids])).logits[:, -1]) for ids in (given, prior)]
            outputs = Outputs(dict(zip(("main", "without_context"), branches, strict=True)))
            expected = decoder.recipe.strategy.score(outputs).log_softmax(-1)[0, token]
            assert score == pytest.approx(float(expected), abs=1e-9)
            given, prior = [*given, token], [*prior, token]


def test_the_context_counts_where_the_model_ends(dense, tokenizer) -> None:
    prompt = {"prompt": "b", "context": "c" * 2040}
    decoder = decodekit.load({"strategy": "cad", "generation": {"suppress_tokens": [1]}})
    [output] = decoder.run(dense, tokenizer, prompt, max_new_tokens=50)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 2048 - 2042
    with pytest.raises(InputError, match="the prompt has 2042 tokens and the continuation 7"):
        decoder.score(dense, tokenizer, prompt, "d" * 7)
