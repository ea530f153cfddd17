"""What goes wrong for one request of an engine, at whatever place: its neighbours have the tokens of their solo runs."""

from typing import ClassVar, Literal

import pytest
import torch

from decodekit.core.candidates import Decision, Finished, Start, Wait
from decodekit.core.protocols import Rule, SequenceStrategy, TokenStrategy
from decodekit.recipe import Generation, Recipe, load_recipe
from decodekit.runtime.auditing import Auditor
from decodekit.runtime.constraining import RowConstraint
from decodekit.runtime.paged_session import PagedSession
from decodekit.runtime.scheduler import Scheduler
from decodekit.testing import tiny_model
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


class Reportless(SequenceStrategy):
    """Decides, and reports what is no report."""

    kind: Literal["reportless"] = "reportless"

    @property
    def count(self):
        return 1

    def decide(self, request):
        yield Start(1)
        while not isinstance((yield Wait()), Finished):
            pass
        return Decision([0], report=None)


def test_a_decision_that_nothing_can_be_told_of_ends_its_request_alone() -> None:
    engine, expected = engine_of(), truth("dense")
    bad = engine.submit(BAD, recipe=Recipe(strategy=Reportless()), max_new_tokens=3)
    good = engine.submit(GOOD, max_new_tokens=NEW)
    assert "'reportless' failed in decide: TypeError" in bad.result().error
    assert bad.result().finish_reason == "error"
    assert good.result().token_ids == expected[0]
    assert engine.submit(OTHER, max_new_tokens=NEW).result().token_ids == expected[2]
    assert used(engine) == 0


def test_a_constraint_that_cannot_judge_a_text_ends_its_request_alone(monkeypatch) -> None:
    engine = engine_of()
    bound = {"prompt": BAD, "constraint": {"kind": "regex", "pattern": "[ab]{3}"}}
    request, other = engine.submit(bound, max_new_tokens=6), engine.submit(bound, max_new_tokens=6)
    report = RowConstraint.report

    def failing(self, text):
        if self is request._job.tasks[0].root.constraint:
            raise ZeroDivisionError("on purpose")
        return report(self, text)

    monkeypatch.setattr(RowConstraint, "report", failing)
    assert "its output cannot be made: ZeroDivisionError: on purpose" in request.result().error
    assert request.result().token_ids[:3] == other.result().token_ids[:3]
    assert other.result().error is None
    assert engine.submit(GOOD, max_new_tokens=2).result().error is None
    assert used(engine) == 0


def crowded(blocks=9, **options):
    """An engine in which the last of some requests was put aside, and these."""
    engine = engine_of(blocks=blocks, slots=6, promise=0.0, preemption="offload", **options)
    requests = [engine.submit([5, 6, 7, number], max_new_tokens=20) for number in range(6)]
    while not any(request._job.aside for request in requests):
        assert engine.step()
    return engine, requests


def roomy():
    engine = engine_of(blocks=100)
    return [engine.submit([5, 6, 7, number], max_new_tokens=20).result().token_ids for number in range(6)]


def test_a_model_that_comes_while_requests_are_aside() -> None:
    amateur, strategy = (
        tiny_model("dense", dtype=torch.float64, seed=1),
        {"kind": "contrastive_decoding", "amateur": "s"},
    )
    engine, requests = crowded(18, models={"s": amateur})
    mixed = engine.submit([8, 9], recipe={"strategy": strategy}, max_new_tokens=4)
    for _ in range(400):
        if not engine.step():
            break
    assert [request.result().token_ids for request in requests] == roomy()
    alone = engine_of(models={"s": amateur}).submit([8, 9], recipe={"strategy": strategy}, max_new_tokens=4)
    assert mixed.result().token_ids == alone.result().token_ids
    assert used(engine) == 0


def test_what_was_put_aside_and_finds_no_room_is_computed_again(monkeypatch) -> None:
    engine, requests = crowded()
    refused = []

    def full(self, row, aside):
        refused.append(row)
        return False

    monkeypatch.setattr(PagedSession, "resume", full)
    assert [request.result().token_ids for request in requests] == roomy()
    assert refused
    assert used(engine) == 0


def test_a_queue_whose_first_request_cannot_be_taken_in_goes_on_without_it(monkeypatch) -> None:
    engine, fits = engine_of(), Scheduler.fits
    bad, good = engine.submit(BAD, max_new_tokens=3), engine.submit(GOOD, max_new_tokens=3)

    def failing(self, job, but=()):
        if job is bad._job:
            raise ZeroDivisionError("on purpose")
        return fits(self, job, but)

    monkeypatch.setattr(Scheduler, "fits", failing)
    for _ in range(20):
        if not engine.step():
            break
    assert "on purpose" in bad.result().error
    assert good.result().token_ids == truth("dense")[0][:3]


class Minding(Oracle):
    """Notes which rows it is told are over."""

    kind: Literal["minding"] = "minding"
    released: ClassVar[list[int]] = []

    def start(self, host):
        state = super().start(host)
        state.release = self.released.extend
        return state


def test_drafters_are_told_of_rows_that_are_put_aside_on_the_host() -> None:
    Minding.released.clear()
    tokens = dict(zip([(5, 6, 7, number) for number in range(6)], roomy(), strict=True))
    engine = engine_of(blocks=9, slots=6, promise=0.0, preemption="offload")
    minding = Recipe(drafter=Minding(truth=tokens, schedule="constant"), generation=Generation())
    requests = [engine.submit([5, 6, 7, number], recipe=minding, max_new_tokens=20) for number in range(6)]
    while not any(request._job.aside for request in requests):
        assert engine.step()
    aside = {row for request in requests for row in request._job.aside}
    engine.step()
    assert aside <= set(Minding.released)
    assert [request.result().token_ids for request in requests] == [*tokens.values()]
