from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from decodekit.core.errors import InputError
from decodekit.core.random import Stream
from decodekit.rules.xtc import Xtc
from decodekit.testing import check_rule, make_rows, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def kept(rule: Xtc, logits: torch.Tensor, eos: tuple[int, ...] = (1,)) -> list[list[int]]:
    result = rule(make_rows([[5]] * len(logits), eos=eos), logits)
    return [(row > -torch.inf).nonzero().flatten().tolist() for row in result]


def always(**options: object) -> Xtc:
    return Xtc(**{"probability": 1.0, "protected": (), **options})


@pytest.mark.parametrize("threshold", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
def test_obeys_the_laws_of_a_rule(threshold: float, probability: float) -> None:
    check_rule(Xtc(threshold=threshold, probability=probability), tokenizer=TOKENIZER)


LOGITS = torch.tensor([[0.02, 0.01, 0.4, 0.3, 0.15, 0.12]], dtype=torch.float64).log()


def test_only_the_least_likely_top_choice_and_what_is_below_stays() -> None:
    assert kept(always(threshold=0.1), LOGITS) == [[0, 1, 5]]
    assert kept(always(threshold=0.2), LOGITS) == [[0, 1, 3, 4, 5]]
    # One choice is none.
    assert kept(always(threshold=0.35), LOGITS) == [[0, 1, 2, 3, 4, 5]]
    assert kept(always(threshold=0.5), LOGITS) == [[0, 1, 2, 3, 4, 5]]


def test_of_equally_likely_top_choices_the_lowest_id_stays() -> None:
    assert kept(always(threshold=0.1), torch.zeros(1, 4), eos=()) == [[0]]


def test_an_end_or_a_protected_token_keeps_all_top_choices_of_its_row() -> None:
    rows = torch.cat([LOGITS, LOGITS.roll(1, 1)])
    assert kept(always(threshold=0.1), rows, eos=(2,)) == [[0, 1, 2, 3, 4, 5], [0, 1, 2]]
    assert kept(always(threshold=0.1, protected_ids=(4,)), rows) == [[0, 1, 2, 3, 4, 5]] * 2
    # The least likely top choice loses nothing, so that it may be protected and the others still go.
    assert kept(always(threshold=0.1, protected_ids=(5,)), rows) == [[0, 1, 5], [0, 1, 2, 3, 4, 5]]


def test_the_newline_is_protected_by_default() -> None:
    [newline] = TOKENIZER.encode("\n")
    assert Xtc().resolve(TOKENIZER) == Xtc(protected=(), protected_ids=(newline,))
    assert Xtc(protected=("\n", "a\n"), protected_ids=(9,)).resolve(TOKENIZER).protected_ids == (9, newline)


def test_acts_at_the_given_share_of_positions_by_draws_of_its_own() -> None:
    rows = make_rows([[5]] * 2000)
    rows = replace(rows, streams=[Stream(7, row, 3) for row in range(2000)])
    acted = (always(threshold=0.1, probability=0.3)(rows, LOGITS.expand(2000, -1)) == -torch.inf).any(-1)
    assert acted.float().mean() == pytest.approx(0.3, abs=0.03)
    assert torch.equal(acted, rows.random() < 0.3)


def test_says_what_is_missing() -> None:
    with pytest.raises(InputError, match=r"xtc needs a tokenizer for '\\n'; give dk_tokenizer"):
        Xtc().resolve(None)
    with pytest.raises(InputError, match=r"xtc: '\\n' is not tokenized yet; use rule\.resolve"):
        Xtc()(make_rows([[5]]), LOGITS)
    with pytest.raises(InputError, match="token id 6 is not in the vocabulary, which has 6 tokens"):
        always(protected_ids=(6,))(make_rows([[5]]), LOGITS)


@pytest.mark.parametrize("options", [{"threshold": 0}, {"threshold": 1.1}, {"probability": -0.1}, {"probability": 2}])
def test_refuses_what_is_no_probability(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=r"greater than|less than"):
        Xtc(**options)
