import pytest
import torch
from decodekit_dexperts import DExperts

from decodekit import RecipeError, load, strategy
from decodekit.testing import check_strategy, tiny_model, tiny_tokenizer

MODELS = {
    name: tiny_model("dense", layers=2, dtype=torch.float64, seed=seed) for name, seed in (("tuned", 1), ("untuned", 2))
}
PROMPTS = ["Who won?", "a", "The other one: 1 + 2 = "]


@pytest.mark.parametrize(
    "options",
    [{"expert": "tuned", "antiexpert": "untuned"}, {"expert": "tuned"}, {"antiexpert": "untuned", "alpha": 0.5}],
    ids=str,
)
def test_obeys_the_laws_of_a_strategy(options) -> None:
    check_strategy(DExperts(**options), models=MODELS)


@pytest.mark.parametrize("alpha", [0.0, 0.7, 2.0])
def test_equals_the_formula_recomputed_without_cache(alpha) -> None:
    model, tokenizer = tiny_model("dense", dtype=torch.float64), tiny_tokenizer()
    decoder = strategy("dexperts", expert="tuned", antiexpert="untuned", alpha=alpha).bind(models=MODELS)
    for prompt, output in zip(PROMPTS, decoder.run(model, tokenizer, PROMPTS, max_new_tokens=6), strict=True):
        ids = tokenizer(prompt).input_ids
        for token in output.token_ids:
            with torch.no_grad():
                z, expert, anti = (own(torch.tensor([ids])).logits[0, -1] for own in (model, *MODELS.values()))
            assert token == int((z + alpha * (expert - anti)).argmax())
            ids = [*ids, token]


def test_a_model_that_is_left_out_is_the_main_one() -> None:
    model, tokenizer = tiny_model("dense", dtype=torch.float64), tiny_tokenizer()
    for role in ("expert", "antiexpert"):
        short, long = (
            strategy("dexperts", alpha=0.6, **{role: "tuned"}, **other).bind(models={**MODELS, "main too": model})
            for other in ({}, {"antiexpert" if role == "expert" else "expert": "main too"})
        )
        outputs = [decoder.run(model, tokenizer, PROMPTS, max_new_tokens=6) for decoder in (short, long)]
        tokens = [[output.token_ids for output in own] for own in outputs]
        assert tokens[0] == tokens[1]


def test_every_model_forwards_each_token_once() -> None:
    model, tokenizer = tiny_model("dense", dtype=torch.float64), tiny_tokenizer()
    recipe = {"strategy": {"kind": "dexperts", "expert": "tuned", "antiexpert": "untuned"}}
    decoder = load(recipe, generation={"suppress_tokens": [1]}).bind(models=MODELS)
    prompt = len(tokenizer("Who won?").input_ids)
    for new in (1, 4, 8):
        [output] = decoder.run(model, tokenizer, "Who won?", max_new_tokens=new)
        assert output.stats["forwarded_tokens"] == 3 * (prompt + new - 1)


def test_one_model_must_be_named() -> None:
    with pytest.raises(RecipeError, match="neither expert nor antiexpert is given: name at least one model"):
        strategy("dexperts")
