import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
import torch
from pydantic import ConfigDict, Field, field_validator
from torch import Tensor

from decodekit.core.protocols import Rule
from decodekit.core.types import Request, Rows
from decodekit.testing import check_rule, make_rows, tiny_model, tiny_tokenizer

FAMILIES = ["dense", "sliding", "hybrid"]


class Good(Rule):
    """Breaks no law: adds a draw of its own to what it counts, in a state that is a value."""

    kind: Literal["good"] = "good"

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        counts = rows.counts(logits.shape[-1], "both") + torch.tensor([[float(state)] for state in rows.states])
        return (logits - rows.random().unsqueeze(-1) * counts).to(logits.dtype)

    def init_state(self, request: Request) -> int:
        return len(request.prompt_ids)

    def commit(self, state: int, token: int, logits: Tensor) -> int:
        return state + token


def broken(call: Callable[[Rows, Tensor], Tensor], *, sampling: bool = False) -> Rule:
    class Broken(Rule):
        kind: Literal["broken"] = "broken"
        sampling_only: ClassVar[bool] = sampling

        def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
            return call(rows, logits)

    return Broken()


def without_best(rows: Rows, logits: Tensor) -> Tensor:
    return logits.scatter(1, logits.argmax(-1, keepdim=True), -math.inf)


def without_first_of_ties(rows: Rows, logits: Tensor) -> Tensor:
    last_best = logits.shape[-1] - 1 - logits.flip(-1).argmax(-1, keepdim=True)
    return torch.full_like(logits, -math.inf).scatter(1, last_best, logits.gather(1, last_best))


def roots(rows: Rows, logits: Tensor) -> Tensor:
    return torch.where(logits == -math.inf, logits, logits.sqrt())


def refusing_nan(rows: Rows, logits: Tensor) -> Tensor:
    if logits.isnan().any():
        raise ValueError("NaN")
    return logits


def reading_all_columns(rows: Rows, logits: Tensor) -> Tensor:
    return logits - torch.zeros_like(logits).scatter(1, rows.tokens, 1)


def counting_pads(rows: Rows, logits: Tensor) -> Tensor:
    return logits - rows.tokens.shape[1]


def editing_rows(rows: Rows, logits: Tensor) -> Tensor:
    rows.tokens[0, 0] += 1
    return logits


CALLS: list[tuple[Callable[[Rows, Tensor], Tensor], bool, str]] = [
    (lambda rows, logits: logits.sub_(1), False, "'given logits are not edited': token 0 of position 0 is"),
    (editing_rows, False, "'given rows are not edited'"),
    (
        lambda rows, logits: logits.clamp(min=-5),
        False,
        r"'masked tokens stay masked': token \d+ of position 1 was -inf",
    ),
    (roots, False, "'finite logits give no NaN and no infinity'"),
    (lambda rows, logits: logits.where(logits < 3, math.inf), False, "'finite logits give no NaN and no infinity'"),
    (lambda rows, logits: logits - torch.rand(()), False, "'the same result twice'"),
    (reading_all_columns, False, "'what lies beyond a history means nothing'"),
    (counting_pads, False, "'batched = alone, position 0'"),
    (lambda rows, logits: logits / len(rows), False, "'batched = alone, position 0'"),
    (lambda rows, logits: logits - logits[0, 0], False, "'permuted positions give permuted results'"),
    (
        lambda rows, logits: logits - logits.amax() * 0,
        False,
        "'a NaN harms no other position': token 0 of position 1 is nan",
    ),
    (refusing_nan, False, "'any rows and logits are taken': ValueError: NaN"),
    (lambda rows, logits: logits.float(), False, "'shape and dtype are kept': .*float32 instead of .*float64"),
    (
        lambda rows, logits: logits[:, :-1],
        False,
        r"'shape and dtype are kept': \(8, 96\) torch.float32 instead of \(8, 97\)",
    ),
    (without_best, True, "'a sampling_only rule keeps the most likely token'"),
    (without_first_of_ties, True, "'a sampling_only rule keeps the most likely token'"),
    (
        lambda rows, logits: torch.full_like(logits, -math.inf),
        True,
        "'a sampling_only rule keeps the most likely token'",
    ),
]


@pytest.mark.parametrize(("call", "sampling", "law"), CALLS)
def test_each_law_of_a_call_has_power(call: Callable[[Rows, Tensor], Tensor], sampling: bool, law: str) -> None:
    with pytest.raises(AssertionError, match=f"broken breaks the law {law}"):
        check_rule(broken(call, sampling=sampling))


@pytest.mark.parametrize("call", [without_best, without_first_of_ties])
def test_only_sampling_rules_must_keep_the_most_likely_token(call: Callable[[Rows, Tensor], Tensor]) -> None:
    check_rule(broken(call))


def test_a_sampling_rule_that_says_so_may_drop_the_most_likely_token() -> None:
    class Dropping(type(broken(without_first_of_ties, sampling=True))):
        keeps_best: ClassVar[bool] = False

    check_rule(Dropping())


def test_a_rule_that_obeys_passes() -> None:
    check_rule(Good())


def test_a_rule_may_be_checked_on_positions_of_ones_own() -> None:
    def harm_token_80(rows: Rows, logits: Tensor) -> Tensor:
        return logits.sub_(1) if 80 in rows.tokens else logits

    check_rule(broken(harm_token_80))
    with pytest.raises(AssertionError, match="'given logits are not edited'"):
        check_rule(broken(harm_token_80), rows=make_rows([[80, 3], [4]]))


@dataclass
class Tokens:
    seen: list[int] = field(default_factory=list)


class Changing(Good):
    def init_state(self, request: Request) -> Tokens:
        return Tokens()

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        return logits

    def commit(self, state: Tokens, token: int, logits: Tensor) -> Tokens:
        state.seen.append(token)
        return state


class EditingLogits(Good):
    def commit(self, state: int, token: int, logits: Tensor) -> int:
        logits[token] = 0
        return state


class RandomCommit(Good):
    def commit(self, state: int, token: int, logits: Tensor) -> int:
        return int(torch.randint(1 << 60, ()))


class RandomInit(Good):
    def init_state(self, request: Request) -> int:
        return int(torch.randint(1 << 60, ()))


class TensorState(Changing):
    def init_state(self, request: Request) -> Any:
        return {"mean": (torch.zeros(3), 0)}

    def commit(self, state: Any, token: int, logits: Tensor) -> Any:
        state["mean"][0].add_(1)
        return state


class ChangingInCall(Changing):
    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        rows.states[0].seen.append(1)
        return logits

    def commit(self, state: Tokens, token: int, logits: Tensor) -> Tokens:
        return Tokens([*state.seen, token])


@pytest.mark.parametrize(
    ("rule", "law"),
    [
        (Changing(), r"'states are values': commit changed Tokens\(seen=\[\]\) to Tokens"),
        (TensorState(), "'states are values': commit changed"),
        (EditingLogits(), "'states are values': commit edited the logits"),
        (RandomCommit(), "'states are values': commit gave two different states"),
        (RandomInit(), "'states are values': init_state gave two different states"),
        (ChangingInCall(), "'given rows are not edited'"),
    ],
)
def test_each_law_of_states_has_power(rule: Rule, law: str) -> None:
    with pytest.raises(AssertionError, match=f"good breaks the law {law}"):
        check_rule(rule)


class Thawed(Good):
    model_config = ConfigDict(frozen=False)


class WithList(Good):
    items: list[int] = Field(default_factory=lambda: [1])


class Doubling(Good):
    t: float

    @field_validator("t")
    @classmethod
    def _double(cls, t: float) -> float:
        return 2 * t


class Renamed(Good):
    t: float = Field(validation_alias="temperature")


class IntKeys(Good):
    """Keys that JSON turns into texts."""

    pairs: tuple[tuple[int | str, ...], ...] = ((1, "1"),)

    @field_validator("pairs", mode="before")
    @classmethod
    def _texts(cls, pairs: Any) -> Any:
        return pairs if isinstance(pairs, tuple) else [[str(item) for item in pair] for pair in pairs]


@pytest.mark.parametrize(
    ("rule", "law"),
    [
        (Thawed(), r"'a plugin is a frozen value': Thawed\.kind can be set"),
        (WithList(), r"'a plugin is a frozen value': unhashable type: 'list' in .*items=\[1\].*; use tuples"),
        (Doubling(t=1), "'a plugin equals what its dump builds': model_dump of .*t=2.0.* builds .*t=4.0"),
        (Renamed(temperature=1), "'a plugin equals what its dump builds': model_dump of .* cannot be read back"),
        (IntKeys(), "'a plugin equals what its dump builds': model_dump_json of"),
    ],
)
def test_each_law_of_values_has_power(rule: Rule, law: str) -> None:
    with pytest.raises(AssertionError, match=f"good breaks the law {law}"):
        check_rule(rule)


def test_rows_hold_histories_without_pads() -> None:
    rows = make_rows([[3, 4, 5], [6]], [2, 1], eos=(1, 7), beyond=9)
    assert rows.tokens.tolist() == [[3, 4, 5], [6, 9, 9]]
    assert (rows.lengths.tolist(), rows.prompt_lengths.tolist(), rows.positions.tolist()) == ([3, 1], [2, 1], [1, 0])
    assert rows.within("output").tolist() == [[False, False, True], [False] * 3]
    assert (list(rows.requests), rows.eos) == ([0, 1], (1, 7))
    assert make_rows([[3, 4], [6]]).positions.tolist() == [0, 0]


def test_rows_draw_apart_and_again_the_same() -> None:
    draws = make_rows([[3, 4], [3, 4]]).random()
    assert draws[0] != draws[1]
    assert torch.equal(make_rows([[3, 4], [3, 4]]).random(), draws)
    assert not torch.equal(make_rows([[3, 4], [3, 4]], seed=1).random(), draws)


@pytest.mark.integration
@pytest.mark.parametrize("family", FAMILIES)
class TestTinyModel:
    def test_greedy_tokens_tell_prompts_and_steps_apart(self, family: Any) -> None:
        model = tiny_model(family)
        prompts = torch.tensor([[2, 5, 6, 7], [2, 9, 6, 7], [2, 50, 51, 7], [2, 5, 6, 8]])
        outputs = model.generate(prompts, max_new_tokens=24, do_sample=False, eos_token_id=None)[:, 4:].tolist()
        assert len({tuple(output) for output in outputs}) == len(prompts)
        assert all(len(set(output)) > 8 for output in outputs)

    def test_what_was_read_long_ago_still_counts(self, family: Any) -> None:
        model = tiny_model(family)
        prompts = torch.tensor([[5, *[9, 10, 11, 12] * 5], [6, *[9, 10, 11, 12] * 5]])
        first, second = model(prompts).logits[:, -1]
        assert (first - second).abs().max() > 0.01

    def test_has_its_ids_dtype_and_shape(self, family: Any) -> None:
        model = tiny_model(family, vocab_size=31, layers=2, dtype=torch.float64)
        ids = model.generation_config
        assert (ids.pad_token_id, ids.eos_token_id, ids.bos_token_id) == (0, 1, 2)
        logits = model(torch.tensor([[2, 3]])).logits
        assert (logits.dtype, logits.shape, model.config.num_hidden_layers) == (torch.float64, (1, 2, 31), 2)
        assert not model.training
        assert not logits.requires_grad

    def test_is_a_function_of_its_seed(self, family: Any) -> None:
        torch.manual_seed(5)
        before = torch.random.get_rng_state()
        one, same, other = (tiny_model(family, seed=seed).lm_head.weight for seed in (0, 0, 1))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
        assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.integration
def test_tiny_tokenizer_fits_the_tiny_model_and_reads_back_what_it_writes() -> None:
    tokenizer = tiny_tokenizer()
    text = 'Who won the cup?\nThe theatre, the {"a": [1, 2.5]}!'
    ids = tokenizer(text).input_ids
    assert len(tokenizer) == 97
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<eos>", "<bos>", "the", " the"]) == [0, 1, 2, 95, 96]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
    assert tokenizer.encode("the the") == [95, 96]
    assert tokenizer.decode(tokenizer.encode("é")) == "?"
