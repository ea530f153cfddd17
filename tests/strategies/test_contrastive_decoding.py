import pytest
import torch

import decodekit
from decodekit.core.errors import RecipeError, Refused
from decodekit.core.types import BranchOutputs, Outputs
from decodekit.strategies.contrastive_decoding import ContrastiveDecoding
from decodekit.testing import check_strategy, tiny_model

pytestmark = pytest.mark.integration

PROMPTS = ["Who won?", "a", "The other one, please: 1 + 2 = "]


@pytest.fixture(scope="module")
def small():
    return tiny_model("dense", layers=2, dtype=torch.float64, seed=1)


@pytest.mark.parametrize(
    "options",
    [
        {"amateur": "small"},
        {"amateur": "small", "form": "ratio", "alpha": 0},
        {"amateur": {"layers": 1}},
        {"amateur": {"layers": 2, "early_norm": False}},
    ],
    ids=str,
)
def test_obeys_the_laws_of_a_strategy(small, options) -> None:
    check_strategy(ContrastiveDecoding(**options), models={"small": small})


@pytest.mark.parametrize(
    ("options", "formula"),
    [
        ({}, lambda e, a: 1.5 * e - 0.5 * a),
        ({"beta": 2, "amateur_temperature": 0.7}, lambda e, a: 3 * e - 2 * a / 0.7),
        ({"form": "ratio"}, lambda e, a: e.log_softmax(-1) - (a / 0.5).log_softmax(-1)),
        (
            {"form": "ratio", "beta": 0.3, "amateur_temperature": 1.0},
            lambda e, a: e.log_softmax(-1) - 0.3 * a.log_softmax(-1),
        ),
    ],
    ids=["O'Brien", "O'Brien, other weights", "Li", "Li, weighted"],
)
def test_equals_the_formulas_of_the_papers(options, formula) -> None:
    generator = torch.Generator().manual_seed(2)
    expert, amateur = (2 * torch.randn(5, 97, generator=generator, dtype=torch.float64) for _ in range(2))
    outputs = Outputs({"main": BranchOutputs(expert), "amateur": BranchOutputs(amateur)})
    scores = ContrastiveDecoding(amateur="small", **options).score(outputs)
    p = expert.softmax(-1)
    expected = torch.where(p >= 0.1 * p.amax(-1, keepdim=True), formula(expert, amateur), -torch.inf)
    kept = (expected > -torch.inf).sum(-1)
    assert (kept > 1).all(), "the mask should leave something to contrast"
    assert (kept < 97).all(), "the mask should drop something"
    torch.testing.assert_close(scores, expected)


@pytest.mark.parametrize("options", [{"beta": 0}, {"beta": 0, "form": "ratio"}, {"alpha": 1}], ids=str)
@pytest.mark.parametrize("amateur", ["small", {"layers": 1}], ids=str)
def test_beta_0_and_alpha_1_are_greedy_decoding(model, tokenizer, small, options, amateur) -> None:
    decoder = decodekit.strategy("contrastive_decoding", amateur=amateur, **options).bind(models={"small": small})
    ours = decoder.run(model, tokenizer, PROMPTS, max_new_tokens=8)
    plain = decodekit.load({}).run(model, tokenizer, PROMPTS, max_new_tokens=8)
    assert [output.token_ids for output in ours] == [output.token_ids for output in plain]


def test_equals_two_models_recomputed_without_cache(model, tokenizer, small) -> None:
    decoder = decodekit.strategy("contrastive_decoding", amateur="small", beta=1.0).bind(models={"small": small})
    for prompt, output in zip(PROMPTS, decoder.run(model, tokenizer, PROMPTS, max_new_tokens=6), strict=True):
        ids = tokenizer(prompt).input_ids
        for token in output.token_ids:
            with torch.no_grad():
                expert, amateur = (own(torch.tensor([ids])).logits[0, -1] for own in (model, small))
            p = expert.softmax(-1)
            assert token == int((2 * expert - amateur).masked_fill(p < 0.1 * p.max(), -torch.inf).argmax())
            ids = [*ids, token]


def test_first_layers_are_the_model_cut_short(dense, tokenizer) -> None:
    """With norm the amateur is what the model would be without its last layers."""
    cut = tiny_model("dense", dtype=torch.float64)
    cut.model.layers = cut.model.layers[:2]
    cut.config.num_hidden_layers = 2
    early, other = (
        decodekit.strategy("contrastive_decoding", amateur=amateur, beta=1.0)
        .bind(models={"cut": cut})
        .run(dense, tokenizer, PROMPTS, max_new_tokens=8)
        for amateur in ({"layers": 2}, "cut")
    )
    assert [output.token_ids for output in early] == [output.token_ids for output in other]
    logprobs = [[logprob for output in outputs for logprob in output.logprobs] for outputs in (early, other)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-9)


def test_each_model_forwards_each_token_once(model, tokenizer, small) -> None:
    prompt = len(tokenizer("Who won?").input_ids)
    for amateur, branches in (("small", 2), ({"layers": 2}, 1)):
        decoder = decodekit.strategy("contrastive_decoding", amateur=amateur).bind(models={"small": small})
        for new in (1, 5, 9):
            [output] = decoder.run(model, tokenizer, "Who won?", max_new_tokens=new, suppress_tokens=[1])
            assert output.stats["forwarded_tokens"] == branches * (prompt + new - 1)


def test_score_gives_the_contrasted_distribution(dense, tokenizer, small) -> None:
    decoder = decodekit.strategy("contrastive_decoding", amateur="small", alpha=0).bind(models={"small": small})
    ids = tokenizer("Who won?").input_ids
    continuation = " the end"
    for token, score in zip(
        tokenizer(continuation).input_ids,
        decoder.score(dense, tokenizer, "Who won?", continuation),
        strict=True,
    ):
        with torch.no_grad():
            expert, amateur = (own(torch.tensor([ids])).logits[0, -1] for own in (dense, small))
        assert score == pytest.approx(float((1.5 * expert - 0.5 * amateur).log_softmax(-1)[token]), abs=1e-9)
        ids = [*ids, token]


# --- what is refused before prefill


def test_another_vocabulary_is_refused(dense) -> None:
    other = tiny_model("dense", vocab_size=101, dtype=torch.float64)
    decoder = decodekit.strategy("contrastive_decoding", amateur="other").bind(models={"other": other})
    message = "model 'other' has 101 tokens and the main model 97; give one of the same vocabulary"
    with pytest.raises(Refused, match=message):
        dense.generate(torch.tensor([[5, 6]]), custom_generate=decoder)


def test_an_amateur_as_deep_as_the_model_is_refused(dense) -> None:
    decoder = decodekit.strategy("contrastive_decoding", amateur={"layers": 4})
    with pytest.raises(Refused, match=r"amateur: \{layers: 4\} must be fewer than the 4 layers of this model"):
        dense.generate(torch.tensor([[5, 6]]), custom_generate=decoder)


def test_a_shorter_context_of_the_amateur_ends_the_row(dense, tokenizer) -> None:
    short = tiny_model("dense", layers=1, dtype=torch.float64)
    short.config.max_position_embeddings = 16
    decoder = decodekit.strategy("contrastive_decoding", amateur="short").bind(models={"short": short})
    output, long = decoder.run(dense, tokenizer, ["Who won?", "x" * 20], max_new_tokens=30, suppress_tokens=[1])
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 8
    assert "branch 'amateur' of 'contrastive_decoding': the prompt has 20 tokens" in long.error


def test_the_amateur_must_be_named() -> None:
    with pytest.raises(RecipeError, match=r"contrastive_decoding\.amateur: missing: this option is required"):
        decodekit.strategy("contrastive_decoding")
    with pytest.raises(RecipeError, match="unknown option"):
        decodekit.strategy("contrastive_decoding", amateur={"layers": 3, "depth": 1})
