"""The laws of what judges texts: scorers, utilities, constraints."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from decodekit.core.accepts import accepts
from decodekit.core.candidates import Candidate
from decodekit.core.constraint import ConstraintState, is_legal, mask_words
from decodekit.core.protocols import Constraint, Scorer, Utility
from decodekit.core.vocabulary import Vocabulary
from decodekit.recipe import Generation, Recipe
from decodekit.runtime.text_call import TextCall
from decodekit.testing.models import tiny_model, tiny_tokenizer
from decodekit.testing.values import broken, check_value

TEXTS = ("The answer is 4.", "The answer is 5.", "", "the the the", "a", "The answer is 4.")


def make_candidates(texts: Sequence[str], logprob: float = -1.0) -> list[Candidate]:
    """Candidates with these texts, of one token a character and this log-probability a token."""
    ids = [list(map(ord, text)) or [1] for text in texts]
    return [
        Candidate(number, text, own, [logprob] * len(own), "eos")
        for number, (text, own) in enumerate(zip(texts, ids, strict=True))
    ]


def check_scorer(scorer: Scorer, *, prompt: str = "What is 2 + 2?", texts: Sequence[str] = TEXTS) -> None:
    """Check the laws that every scorer obeys: it is a value, and gives a number a candidate, whatever their order.

    Args:
        scorer: the scorer.
        prompt: of the candidates.
        texts: of the candidates.

    Raises:
        AssertionError: names the law that does not hold.
    """
    check_value(scorer)
    candidates = make_candidates(texts)
    scores = list(map(float, scorer.score(prompt, candidates)))
    if len(scores) != len(texts) or any(map(math.isinf, scores)):
        raise broken(scorer, "a finite score (or NaN) a candidate", f"{scores} for {len(texts)} candidates")
    again = list(map(float, scorer.score(prompt, candidates[::-1])))[::-1]
    if not torch.allclose(torch.tensor(scores), torch.tensor(again), equal_nan=True):
        raise broken(scorer, "candidates may come in any order", f"{scores}, and {again} in reverse order")


def check_utility(utility: Utility, *, texts: Sequence[str] = TEXTS) -> None:
    """Check the laws that every utility obeys: it is a value, gives [N, M] float64 numbers, and judges each pair alone.

    Args:
        utility: the utility.
        texts: what it is tried on, at least three.

    Raises:
        AssertionError: names the law that does not hold.
    """
    check_value(utility)
    hypotheses, references = list(texts), list(texts[1:])
    values = utility.pairwise(hypotheses, references)
    if values.shape != (len(hypotheses), len(references)) or values.dtype != torch.float64:
        found = (
            f"{tuple(values.shape)} {values.dtype} for {len(hypotheses)} hypotheses and {len(references)} references"
        )
        raise broken(utility, "pairwise gives [N, M] float64", found)
    if not bool(torch.isfinite(values).all()):
        raise broken(utility, "utilities are finite", f"{values.tolist()}")
    for place, other in itertools.product(range(len(hypotheses)), range(len(references))):
        alone = float(utility.pairwise([hypotheses[place]], [references[other]])[0, 0])
        if not math.isclose(alone, float(values[place, other]), rel_tol=1e-6, abs_tol=1e-6):
            pair = (hypotheses[place], references[other])
            raise broken(
                utility, "a pair is judged alone", f"{pair}: {alone} alone, {float(values[place, other])} among others"
            )


def check_constraint(constraint: Constraint, *, accepted: Sequence[str], refused: Sequence[str]) -> None:
    """Check the laws that every constraint obeys, over the vocabulary of ``tiny_tokenizer``.

    It is a value. The texts are accepted and refused as given. Along each accepted text a token can be taken if and only if
    the mask says so, EOS if and only if the text may end; going back and forking restore the mask. What a model decodes
    under it is accepted.

    Args:
        constraint: the constraint.
        accepted: texts of the language, of ASCII.
        refused: texts that are not.

    Raises:
        AssertionError: names the law that does not hold, and where.
    """
    check_value(constraint)
    tokenizer = tiny_tokenizer()
    for text, expected in [*((own, True) for own in accepted), *((own, False) for own in refused)]:
        if accepts(constraint, text, tokenizer) != expected:
            raise broken(constraint, f"it {'accepts' if expected else 'refuses'} {text!r}", "it does not")
    compiled = constraint.compile(Vocabulary.of(tokenizer, width=len(tokenizer)))
    for text in accepted:
        state = compiled.start()
        for token in tokenizer(text).input_ids:
            _check_place(constraint, state, text, len(tokenizer), tokenizer.eos_token_id)
            state.advance(token)
        _check_place(constraint, state, text, len(tokenizer), tokenizer.eos_token_id)
    generation = Generation(max_new_tokens=64, do_sample=True, seed=0)
    call = TextCall(
        Recipe(constraint=constraint, rules=(), generation=generation), tiny_model("dense"), tokenizer, ["a"], {}
    )
    for _ in call.run():
        pass
    [(_, output)] = call.outputs()
    if output.finish_reason == "eos" and not accepts(constraint, output.text, tokenizer):
        raise broken(constraint, "what is decoded under it is accepted", f"{output.text!r} is not")


def _check_place(constraint: Constraint, state: ConstraintState, text: str, width: int, eos: int) -> None:
    def mask(own: ConstraintState) -> list[bool]:
        out = torch.zeros(1, mask_words(width), dtype=torch.int32)
        own.mask(out, 0)
        return [is_legal(out[0], token) for token in range(width)]

    legal = mask(state)
    if legal[eos] != state.is_accepting():
        raise broken(constraint, "EOS is legal where the text may end", f"not so within {text!r}")
    for token in (token for token in range(width) if legal[token] and token != eos):
        ahead = state.fork()
        ahead.advance(token)
        ahead.rollback(1)
        if mask(ahead) != legal or mask(state) != legal:
            raise broken(constraint, "going back and forking restore the mask", f"not so for token {token} in {text!r}")
