import pytest
import torch
from decodekit_pmi_dc import PmiDc, rank

from decodekit import RecipeError, load, strategy
from decodekit.testing import check_strategy, tiny_model, tiny_tokenizer

PREMISE, PROMPT = "Answer:", "Who won in 2031? Answer:"


@pytest.fixture(scope="module")
def parts():
    return tiny_model("dense", dtype=torch.float64), tiny_tokenizer()


def log_probs(model, ids: list[int]) -> torch.Tensor:
    """[T, V]."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("relative_top", [0, 0.1])
def test_obeys_the_laws_of_a_strategy(relative_top) -> None:
    check_strategy(PmiDc(premise=PREMISE, relative_top=relative_top))


def test_equals_the_formula_recomputed_without_cache(parts) -> None:
    model, tokenizer = parts
    [output] = strategy("pmi_dc", premise=PREMISE, relative_top=0.05).run(model, tokenizer, [PROMPT], max_new_tokens=6)
    given, domain = tokenizer(PROMPT).input_ids, tokenizer(PREMISE).input_ids
    for token in output.token_ids:
        p, q = log_probs(model, given)[-1], log_probs(model, domain)[-1]
        assert token == int((p - q).masked_fill(p.exp() < 0.05 * p.exp().max(), -torch.inf).argmax())
        given, domain = [*given, token], [*domain, token]


def test_rank_gives_the_information_of_whole_answers(parts) -> None:
    model, tokenizer = parts
    answers = [" Ann", " the team"]
    found = rank(model, tokenizer, PROMPT, answers, premise=PREMISE)
    for answer, score in zip(answers, found, strict=True):
        own = tokenizer(answer).input_ids
        sums = []
        for prompt in (PROMPT, PREMISE):
            ids = tokenizer(prompt).input_ids
            rows = log_probs(model, ids + own)[len(ids) - 1 : -1]
            sums.append(float(rows.gather(-1, torch.tensor(own).unsqueeze(-1)).sum()))
        assert score == pytest.approx(sums[0] - sums[1], abs=1e-9)


def test_an_answer_that_the_prompt_says_nothing_about_has_no_information(parts) -> None:
    model, tokenizer = parts
    assert rank(model, tokenizer, PREMISE, [" Ann", " x"], premise=PREMISE) == [0, 0]
    colder = load({"rules": [{"kind": "temperature", "t": 0.5}], "generation": {"do_sample": True}})
    plain, other = (rank(model, tokenizer, PROMPT, [" Ann"], premise=PREMISE, decoder=own) for own in (None, colder))
    assert plain != other


def test_the_premise_must_be_given() -> None:
    with pytest.raises(RecipeError, match="premise: missing: this option is required"):
        strategy("pmi_dc")
