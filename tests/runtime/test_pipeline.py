import math

import pytest
import torch

from decodekit.core.errors import PluginError, RowError
from decodekit.runtime.pipeline import LANES_PER_RULE, Pipeline
from decodekit.testing import make_rows

NAN = math.nan


def ban(*tokens: int):
    def step(rows, logits):
        logits = logits.clone()
        logits[:, list(tokens)] = -math.inf
        return logits

    return step


def pipeline(*steps, **options) -> Pipeline:
    return Pipeline([(f"rule{index}", step) for index, step in enumerate(steps)], sample=False, **options)


def pick(pipe: Pipeline, scores: list[list[float]], **options):
    rows = make_rows([[2]] * len(scores))
    states = [[None] * len(scores) for _ in pipe.steps]
    return pipe(rows, torch.tensor(scores), states, **options)


def test_rules_run_in_order_and_the_best_token_is_taken() -> None:
    picked = pick(pipeline(ban(0), ban(2)), [[3.0, 1.0, 2.0, 0.0], [0.0, 0.0, 0.0, 9.0]], record=True)
    assert picked.tokens.tolist() == [1, 3]
    assert [name for name, _ in picked.stages] == ["scores", "rule0", "rule1"]
    assert picked.stages[1][1][0].tolist() == [-math.inf, 1.0, 2.0, 0.0]
    assert picked.failures == {}


@pytest.mark.parametrize(
    ("fallback", "expected"),
    [("raw", [3.0, 1.0, 2.0]), ("relax", [3.0, -math.inf, 2.0]), ("eos", [-math.inf, 0.0, -math.inf])],
)
def test_an_emptied_row_falls_back_alone(fallback, expected) -> None:
    def empty_first(rows, logits):
        logits = logits.clone()
        logits[logits[:, 0] == 3.0] = -math.inf
        return logits

    pipe = pipeline(ban(1), empty_first, fallback=fallback, eos=(1,))
    picked = pick(pipe, [[3.0, 1.0, 2.0], [1.0, 5.0, 2.0]])
    assert picked.final[0].tolist() == expected
    assert picked.final[1].tolist() == [1.0, -math.inf, 2.0]
    assert picked.failures == {}


def test_relax_leaves_out_only_the_rule_that_broke_the_row() -> None:
    picked = pick(pipeline(ban(0, 1, 2), ban(0), fallback="relax"), [[3.0, 1.0, 2.0]])
    assert picked.final[0].tolist() == [-math.inf, 1.0, 2.0]


def test_a_rule_that_edits_shared_logits_is_named() -> None:
    with pytest.raises(PluginError, match="rule 'rule0' edited the logits it was given"):
        pick(pipeline(lambda rows, logits: logits.sub_(1)), [[3.0, 1.0, 2.0]])


def test_an_error_names_the_rule_that_emptied_the_row() -> None:
    picked = pick(pipeline(ban(0), ban(1, 2)), [[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]])
    assert set(picked.failures) == {0, 1}
    assert picked.failures[0] == (
        "rule 'rule1' left no token to choose from; loosen it, or set fallback: relax | eos | raw"
    )


@pytest.mark.parametrize("fallback", ["error", "raw", "relax", "eos"])
@pytest.mark.parametrize(
    ("bad", "what"), [([NAN, 1.0, 2.0], "NaN"), ([math.inf, 1, 2], "infinity"), ([-math.inf] * 3, "no finite value")]
)
def test_broken_scores_fail_their_row_whatever_the_fallback(fallback, bad, what) -> None:
    picked = pick(pipeline(ban(1), fallback=fallback, eos=(1,)), [bad, [3.0, 1.0, 2.0]])
    assert list(picked.failures) == [0]
    assert f"hold {what}" in picked.failures[0]
    assert picked.tokens[1] == 0


def test_fallback_eos_without_an_eos_is_an_error() -> None:
    picked = pick(pipeline(ban(0, 1, 2), fallback="eos"), [[3.0, 1.0, 2.0]])
    assert "no EOS id is known for fallback: eos" in picked.failures[0]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda rows, logits: logits[:, :2], r"rule 'rule0' returned \(1, 2\) torch.float32; expected \(1, 3\)"),
        (lambda rows, logits: logits.int(), "rule 'rule0' returned .*int32; expected"),
        (lambda rows, logits: None, "rule 'rule0' returned NoneType; expected"),
        (lambda rows, logits: 1 / 0, "rule 'rule0' failed: ZeroDivisionError"),
    ],
)
def test_a_rule_that_breaks_its_contract_is_named(step, message) -> None:
    with pytest.raises(PluginError, match=message):
        pick(pipeline(step), [[3.0, 1.0, 2.0]])


def test_every_rule_draws_from_lanes_of_its_own() -> None:
    seen = []

    def draws(rows, logits):
        seen.append((rows.lane, rows.random().tolist(), rows.random(1).tolist()))
        return logits

    pick(pipeline(draws, draws), [[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]])
    assert [lane for lane, *_ in seen] == [1, 1 + LANES_PER_RULE]
    assert len({value for _, one, two in seen for value in one + two}) == 8


def test_sampling_never_draws_a_masked_token() -> None:
    pipe = Pipeline([("ban", ban(1, 2))], sample=True)
    picked = pick(pipe, [[0.0, 9.0, 9.0, 0.0]] * 500)
    assert set(picked.tokens.tolist()) == {0, 3}


def refuse(token: int, why: str):
    def step(rows, logits):
        if (rows.tokens[:, 0] == token).any():
            raise RowError(why)
        return logits + torch.tensor(rows.states).unsqueeze(-1) * torch.tensor([0.0, 1.0, 0.0])

    return step


def test_a_row_for_which_a_rule_raises_fails_alone() -> None:
    scores, states = torch.tensor([[3.0, 2.5, 0.0]] * 3), [[0.0, 0.0, 0.0], [0.0, 5.0, 1.0], [0.0] * 3]
    pipe = pipeline(ban(2), refuse(8, "token 8 is too much"), refuse(8, "said twice"))
    picked = pipe(make_rows([[7], [8], [9]]), scores, states, record=True)
    assert picked.failures == {1: "rule 'rule1': token 8 is too much"}
    for row, alone in ((0, 0), (2, 2)):
        solo = pipe(make_rows([[7 + row]]), scores[:1], [[column[alone]] for column in states])
        assert torch.equal(picked.final[row], solo.final[0])
    assert picked.final[[0, 2]].tolist() == [[3.0, 2.5, -math.inf], [3.0, 3.5, -math.inf]]
    assert picked.tokens[[0, 2]].tolist() == [0, 1]
    assert [name for name, _ in picked.stages] == ["scores", "rule0", "rule1", "rule2"]


@pytest.mark.parametrize("fallback", ["error", "raw", "relax", "eos"])
def test_no_fallback_saves_a_row_that_a_rule_fails(fallback) -> None:
    pipe = pipeline(refuse(8, "no"), ban(0, 1, 2), fallback=fallback, eos=(1,))
    picked = pipe(make_rows([[7], [8]]), torch.tensor([[3.0, 1.0, 2.0]] * 2), [[0.0, 0.0]] * 2)
    assert picked.failures[1] == "rule 'rule0': no"
    assert (0 in picked.failures) == (fallback == "error")
