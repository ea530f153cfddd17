import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from decodekit.core.errors import InputError
from decodekit.core.types import Scope
from decodekit.rules.dry import Dry
from decodekit.testing import check_rule, make_rows, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def dry(**options: object) -> Dry:
    return Dry(**{"multiplier": 1.0, "base": 2.0, "sequence_breakers": (), **options})


def penalties(rule: Dry, histories: list[list[int]], prompt_lengths: list[int] | None = None) -> list[dict[int, float]]:
    result = rule(make_rows(histories, prompt_lengths), torch.zeros(len(histories), 9))
    return [{token: -value for token, value in enumerate(row) if value} for row in result.tolist()]


def naive(rule: Dry, history: list[int], prompt: int) -> dict[int, float]:
    """The definition, an earlier occurrence and a length at a time."""
    low, high = {"prompt": (0, prompt), "output": (prompt, len(history)), "both": (0, len(history))}[rule.scope]
    low = max(low, len(history) - rule.range) if rule.range else low
    longest: dict[int, int] = {}
    for start in range(low, high):
        for end in range(start + 1, min(start + 50, high - 1) + 1):
            repeated, following = history[start:end], history[end]
            broken = {*repeated, following} & set(rule.breaker_ids)
            if repeated == history[len(history) - len(repeated) :] and not broken:
                longest[following] = max(longest.get(following, 0), len(repeated))
    return {
        token: rule.multiplier * rule.base ** (length - rule.allowed_length)
        for token, length in longest.items()
        if length >= rule.allowed_length
    }


@pytest.mark.parametrize("options", [{}, {"range": 6}, {"allowed_length": 1}, {"multiplier": 0}])
@pytest.mark.parametrize("scope", ["prompt", "output", "both"])
def test_obeys_the_laws_of_a_rule(options: dict[str, int], scope: Scope) -> None:
    check_rule(Dry(**options, scope=scope), tokenizer=TOKENIZER)


def test_the_longer_the_repetition_the_higher_the_penalty() -> None:
    # 1 2 3 was followed by 4, 2 3 by 5, and 3 by 6.
    history = [1, 2, 3, 4, 2, 3, 5, 3, 6, 1, 2, 3]
    assert penalties(dry(allowed_length=1), [history]) == [{4: 4.0, 5: 2.0, 6: 1.0}]
    assert penalties(dry(), [history]) == [{4: 2.0, 5: 1.0}]
    assert penalties(dry(multiplier=0.5, base=3.0), [history]) == [{4: 1.5, 5: 0.5}]


def test_the_longest_repetition_counts_once() -> None:
    assert penalties(dry(), [[1, 2, 3, 7, 2, 3, 8, 1, 2, 3, 7, 1, 2, 3]]) == [{7: 2.0, 8: 1.0}]


def test_a_loop_repeats_itself() -> None:
    assert penalties(dry(), [[1] * 5, [1, 2, 1, 2, 1, 2]]) == [{1: 4.0}, {1: 4.0}]


def test_breakers_end_a_repetition_and_are_never_penalized() -> None:
    history = [1, 2, 3, 4, 8, 1, 2, 3]
    assert penalties(dry(breaker_ids=(2,)), [history]) == [{}]
    assert penalties(dry(breaker_ids=(1,)), [history]) == [{4: 1.0}]
    assert penalties(dry(breaker_ids=(4,)), [history]) == [{}]
    assert penalties(dry(breaker_ids=(3,)), [history]) == [{}]


@pytest.mark.parametrize(
    ("scope", "expected"), [("prompt", {3: 1.0}), ("output", {4: 1.0}), ("both", {3: 1.0, 4: 1.0})]
)
def test_scope_is_where_the_earlier_occurrence_and_its_next_token_lie(scope: Scope, expected: dict[int, float]) -> None:
    # Prompt 1 2 3 1 2, output 5 1 2 4 1 2; that 1 2 was followed by 5 lies in both and is left out of two.
    expected = expected | ({5: 1.0} if scope == "both" else {})
    assert penalties(dry(scope=scope), [[1, 2, 3, 1, 2, 5, 1, 2, 4, 1, 2]], [5]) == [expected]


def test_range_looks_at_the_last_tokens() -> None:
    history = [0, 1, 2, 7, 0, 1, 2]
    assert [penalties(dry(range=n), [history])[0] for n in (4, 5, 6, 7, 0)] == [{}, {}, {7: 1.0}, {7: 2.0}, {7: 2.0}]


def test_lengths_are_counted_up_to_fifty() -> None:
    logits = torch.zeros(1, 3, dtype=torch.float64)
    result = dry(base=1.5)(make_rows([[1] * 200]), logits)
    assert result[0, 1] == pytest.approx(-(1.5**48))
    assert (dry(base=1e30)(make_rows([[1] * 200]), torch.zeros(1, 3)) == -torch.inf).tolist() == [[False, True, False]]


@given(
    histories=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=4),
    options=st.fixed_dictionaries(
        {
            "allowed_length": st.integers(1, 4),
            "range": st.sampled_from([0, 0, 1, 5, 9]),
            "scope": st.sampled_from(["prompt", "output", "both"]),
            "breaker_ids": st.sampled_from([(), (), (3,), (0, 2)]),
        }
    ),
    data=st.data(),
)
@settings(max_examples=200)
def test_equals_the_definition_row_by_row(histories: list[list[int]], options: dict[str, object], data) -> None:
    rule = dry(**options)
    prompts = [data.draw(st.integers(0, len(history))) for history in histories]
    assert penalties(rule, histories, prompts) == [
        pytest.approx(naive(rule, history, prompt)) for history, prompt in zip(histories, prompts, strict=True)
    ]


def test_ids_beyond_the_logits_match_but_cannot_come_next() -> None:
    assert penalties(dry(), [[20, 1, 20, 4, 20, 1, 20]]) == [{4: 2.0}]
    assert penalties(dry(), [[1, 2, 20, 8, 1, 2]]) == [{}]


def test_breakers_are_the_last_tokens_of_texts() -> None:
    rule = Dry(sequence_breakers=("\n", "-*"), breaker_ids=(9,)).resolve(TOKENIZER)
    assert rule.breaker_ids == (9, *TOKENIZER.convert_tokens_to_ids(["\n", "*"]))
    assert rule.sequence_breakers == ()
    assert rule.resolve(None) == rule


def test_says_what_is_missing() -> None:
    with pytest.raises(InputError, match=r"dry needs a tokenizer for 'a\\n'; give dk_tokenizer"):
        Dry().resolve(None)
    with pytest.raises(InputError, match=r"dry: '\\n' is not tokenized yet; use rule\.resolve"):
        Dry()(make_rows([[3]]), torch.zeros(1, 97))


@pytest.mark.parametrize("options", [{"multiplier": -1}, {"base": 0.5}, {"allowed_length": 0}, {"range": -1}])
def test_refuses_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="greater than or equal to"):
        Dry(**options)
