"""What goes wrong for one request of an engine, at whatever place: its neighbours have the tokens of their solo runs."""

from typing import ClassVar, Literal

import pytest

from decodekit.core.protocols import Rule, TokenStrategy
from decodekit.recipe import Generation, Recipe, load_recipe
from decodekit.runtime.auditing import Auditor
from tests.runtime.oracle import Oracle
from tests.runtime.schedules import outcome
from tests.runtime.test_engine import PAGED, engine_of, used

FAMILIES = ["dense", "sliding", "hybrid"]
GOOD, BAD, OTHER = [5, 17, 42], [66, 17, 9], [8, 9, 30, 12]
PROMPTS = [GOOD, BAD, OTHER]
NEW = 8


class Broken(Rule):
    """Fails the requests that begin with 66, in one hook, once they have so many tokens."""

    kind: Literal["broken"] = "broken"
    hook: str
    at: int = 2

    def init_state(self, request):
        if self.hook == "init_state" and request.prompt_ids[0] == 66:
            raise ZeroDivisionError("on purpose")
        return (request.prompt_ids[0], 0)

    def commit(self, state, token, logits):
        first, count = state
        if self.hook == "commit" and first == 66 and count == self.at:
            raise ZeroDivisionError("on purpose")
        return first, count + 1

    def __call__(self, rows, logits):
        if self.hook == "call" and bool(((rows.tokens[:, 0] == 66) & (rows.positions == self.at)).any()):
            raise ZeroDivisionError("on purpose")
        return logits


class Alone(TokenStrategy):
    """Scores one position at a time only, and not even that at the call of this number."""

    kind: Literal["alone"] = "alone"
    fails: ClassVar[int] = 0
    calls: ClassVar[int] = 0

    def score(self, outputs):
        Alone.calls += 1
        if len(outputs["main"].logits) > 1 or Alone.calls == Alone.fails:
            raise ZeroDivisionError("on purpose")
        return outputs["main"].logits


def check(engine, recipe, expected, *, good=(0, 2)):
    """The bad request ends alone, after what it had; the others have what is expected of them."""
    requests = [engine.submit(prompt, recipe=recipe, max_new_tokens=NEW) for prompt in PROMPTS]
    outputs = [request.result() for request in requests]
    for number in good:
        assert (outputs[number].token_ids, outputs[number].error) == (expected[number], None)
    assert used(engine) == 0
    assert not engine._batch.busy
    return outputs


def truth(family, recipe=None):
    recipe = load_recipe({**(recipe or {}), **PAGED})
    return [outcome(recipe, family, prompt, NEW)[0][0] for prompt in PROMPTS]


@pytest.mark.parametrize("hook", ["call", "commit"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rule_that_fails_behind_drafted_tokens_takes_no_token_twice(family, hook) -> None:
    expected = truth(family)
    drafter = Oracle(
        truth={tuple(prompt): own for prompt, own in zip(PROMPTS, expected, strict=True)},
        right=1.0,
        schedule="constant",
    )
    for at in (1, 4):
        recipe = Recipe(rules=(Broken(hook=hook, at=at),), drafter=drafter, generation=Generation())
        outputs = check(engine_of(family), recipe, expected)
        assert "ZeroDivisionError: on purpose" in outputs[1].error
        assert outputs[1].token_ids == expected[1][:at]
        assert outputs[0].stats["target_forwards"] < NEW
        assert outputs[0].stats["accepted_tokens"] > 0


@pytest.mark.parametrize("hook", ["init_state", "call", "commit"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rule_that_fails_for_one_of_several_beam_searches(family, hook) -> None:
    beam = {"strategy": {"kind": "beam", "num_beams": 2}}
    expected = truth(family, beam)
    recipe = load_recipe(beam).model_copy(update={"rules": (Broken(hook=hook),)})
    outputs = check(engine_of(family), recipe, expected)
    assert "ZeroDivisionError: on purpose" in outputs[1].error
    assert outputs[0].stats["target_forwards"] == NEW


def test_a_strategy_that_fails_for_all_is_tried_for_each_and_fails_one(monkeypatch) -> None:
    expected = truth("dense")
    # In each step once for all, then for each of the three: at the fourth step, the second of these.
    monkeypatch.setattr(Alone, "fails", 4 * 3 + 3)
    monkeypatch.setattr(Alone, "calls", 0)
    outputs = check(engine_of(), Recipe(strategy=Alone(), generation=Generation()), expected)
    assert "ZeroDivisionError: on purpose" in outputs[1].error
    assert outputs[1].token_ids == expected[1][:3]
    assert outputs[0].stats["target_forwards"] == NEW


def test_an_audit_that_fails_behind_drafted_tokens(monkeypatch) -> None:
    expected = truth("dense")
    original = Auditor.check

    def failing(self, sequences, outputs):
        if any(own.request.prompt_ids[0] == 66 and len(own.tokens) == 3 for own in sequences):
            raise KeyError("row")
        original(self, sequences, outputs)

    monkeypatch.setattr(Auditor, "check", failing)
    drafter = Oracle(
        truth={tuple(prompt): own for prompt, own in zip(PROMPTS, expected, strict=True)},
        right=1.0,
        schedule="constant",
    )
    recipe = Recipe(drafter=drafter, audit=1.0, generation=Generation())
    outputs = check(engine_of(), recipe, expected)
    assert "KeyError: 'row'" in outputs[1].error
    assert outputs[0].stats["audit"]["steps"] == NEW
