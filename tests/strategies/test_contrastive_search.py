import pytest
import torch

import decodekit
from decodekit.core.errors import RecipeError, Refused
from decodekit.strategies.contrastive_search import ContrastiveSearch
from decodekit.testing import check_strategy, tiny_model
from tests.strategies.golden import DEMO, TINY, golden_model, left_pad, prompt_ids, representative

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("run", ["cs", "cs_a2", "cs_rp"])
def test_compat_gives_the_tokens_of_transformers(name: str, run: str) -> None:
    model, golden = golden_model(name), TINY[name]["runs"][run]
    options = dict(golden["settings"])
    own = {option: options.pop(option) for option in ("penalty_alpha", "top_k")}
    decoder = decodekit.strategy("contrastive_search", mode="compat", **own)
    for single in golden["single"]:
        ids = torch.tensor([single["prompt"]])
        out = model.generate(ids, custom_generate=decoder, max_new_tokens=24, eos_token_id=1, pad_token_id=0, **options)
        assert out[0, ids.shape[1] :].tolist() == single["new_ids"][0]


@pytest.mark.parametrize("run", representative(["cs_a0.6_k4", "cs_a0.4_k5"], ["cs_a0.6_k4"]))
def test_compat_gives_the_demo_models_tokens(demo, run: str) -> None:
    golden = DEMO["single"][run]
    decoder = decodekit.strategy("contrastive_search", mode="compat", **golden["settings"])
    for row in golden["rows"]:
        ids = prompt_ids(row["prompt"])
        out = demo[0].generate(ids, custom_generate=decoder, max_new_tokens=16, eos_token_id=2, pad_token_id=1)
        assert out[0, ids.shape[1] :].tolist() == row["new_ids"]


def test_laws() -> None:
    check_strategy(ContrastiveSearch())


@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
def test_without_penalty_it_is_greedy_also_where_rows_end_early(family) -> None:
    model, inputs = tiny_model(family, dtype=torch.float64), left_pad(TINY["tied10"]["prompts"])
    options = {"max_new_tokens": 12, "eos_token_id": list(range(20))}
    greedy = model.generate(**inputs, custom_generate=decodekit.load({}), **options)
    decoder = decodekit.strategy("contrastive_search", penalty_alpha=0.0)
    assert torch.equal(model.generate(**inputs, custom_generate=decoder, **options), greedy)
    single = decodekit.strategy("contrastive_search", top_k=1)
    assert torch.equal(model.generate(**inputs, custom_generate=single, **options), greedy)


def test_the_penalty_is_that_of_an_uncached_forward() -> None:
    """Each token again from whole forwards of every candidate."""
    model, prompt = tiny_model("dense", dtype=torch.float64), [5, 17, 42, 8]
    decoder = decodekit.strategy("contrastive_search", penalty_alpha=0.7, top_k=5)
    ids = torch.tensor([prompt])
    out = model.generate(ids, custom_generate=decoder, max_new_tokens=8, eos_token_id=None)[0].tolist()
    context = list(prompt)
    for token in out[len(prompt) :]:
        probabilities, candidates = model(torch.tensor([context])).logits[0, -1].softmax(-1).topk(5)
        batch = torch.tensor([[*context, own] for own in candidates.tolist()])
        hidden = model(batch, output_hidden_states=True).hidden_states[-1]
        similarity = torch.nn.functional.cosine_similarity(hidden[:, -1:], hidden[:, :-1], dim=-1)
        best = (0.3 * probabilities - 0.7 * similarity.amax(-1)).argmax()
        assert token == candidates[best]
        context.append(token)


def test_candidates_are_forks_and_the_prompt_is_forwarded_once(dense, tokenizer) -> None:
    decoder = decodekit.strategy("contrastive_search", top_k=4)
    [output] = decoder.run(dense, tokenizer, ["Who won the game?"], max_new_tokens=6, eos_token_id=None)
    prompt = len(tokenizer("Who won the game?").input_ids)
    # Each token of output was one of four that were looked ahead from.
    assert output.stats["forwarded_tokens"] == prompt + 4 * 6
    assert output.stats["target_forwards"] == 7


def test_strict_never_takes_a_token_that_a_rule_forbids(dense) -> None:
    ids = torch.tensor([[5, 17, 42, 8]])
    rules = [{"kind": "bad_words", "ids": [[token] for token in range(97) if token not in (95, 96)]}]
    for mode, legal in (("strict", True), ("compat", False)):
        strategy = {"kind": "contrastive_search", "penalty_alpha": 1.0, "top_k": 4, "mode": mode}
        out = dense.generate(
            ids,
            custom_generate=decodekit.load({"strategy": strategy, "rules": rules}),
            max_new_tokens=8,
            eos_token_id=None,
        )
        assert (set(out[0, 4:].tolist()) <= {95, 96}) is legal


def test_it_does_not_sample() -> None:
    with pytest.raises(RecipeError, match="does not sample"):
        decodekit.load({"strategy": "contrastive_search", "generation": {"do_sample": True}})
    with pytest.raises(Refused, match="does not sample"):
        tiny_model("dense").generate(
            torch.tensor([[5]]), custom_generate=decodekit.strategy("contrastive_search"), do_sample=True
        )


@pytest.mark.parametrize("mode", ["strict", "compat"])
def test_where_nothing_may_follow_the_chosen_candidate_the_prompt_fails_alone(dense, tokenizer, mode) -> None:
    strategy = {"kind": "contrastive_search", "mode": mode, "penalty_alpha": 0.0}
    prompts = ["Who won?", "a"]
    plain = decodekit.load({"strategy": strategy}).run(dense, tokenizer, prompts, max_new_tokens=6, suppress_tokens=[1])
    # Every token is a bad word behind the first two of the first output.
    start = plain[0].token_ids[:2]
    bans = {"kind": "bad_words", "ids": [[*start, token] for token in range(97)]}
    decoder = decodekit.load({"strategy": strategy, "rules": [bans]})
    failed, other = decoder.run(dense, tokenizer, prompts, max_new_tokens=6, suppress_tokens=[1])
    assert failed.error == "prompt 0: the scores or the rules leave no token to follow the chosen candidate"
    assert other.token_ids == plain[1].token_ids
