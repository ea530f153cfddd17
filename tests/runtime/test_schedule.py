import random

import pytest
import torch

from decodekit.core.drafts import Draft
from decodekit.drafters.ngram import Ngram
from decodekit.runtime.schedule import PROBE, RESTS, Costs, Schedule


class Model:
    """Any object that can be a key."""


def simulate(schedule, passes, *, rates, cost, confidence=(), batch=1, seed=0, drafting=0.0, looks=None):
    """Passes over rows whose drafted tokens are accepted with these rates by place; lengths, tokens and seconds."""
    rng = random.Random(seed)
    lengths, tokens, seconds = [], 0, 0.0
    looks = [] if looks is None else looks
    rows = list(range(batch))
    for _ in range(passes):
        budgets = schedule.budgets(rows, [100] * batch)
        looks.append(any(budgets))
        drafts = schedule.cut(rows, [Draft([0] * budget, confidence=confidence[:budget]) for budget in budgets])
        hits = []
        for draft in drafts:
            place = 0
            while place < len(draft) and rng.random() < rates[place]:
                place += 1
            hits.append(place)
        took = cost(max(map(len, drafts)))
        schedule.observe(dict(enumerate(drafts)), dict(enumerate(hits)), took, drafting * any(budgets))
        lengths.append(max(map(len, drafts)))
        tokens += batch + sum(hits)
        seconds += took
    return lengths, tokens, seconds


def best_rate(rates, cost):
    """Tokens a second of the best constant length."""
    expected = [1.0]
    for place in range(len(rates)):
        reached = 1.0
        for rate in rates[: place + 1]:
            reached *= rate
        expected.append(expected[-1] + reached)
    return max(tokens / cost(length) for length, tokens in enumerate(expected))


def linear(slope):
    return lambda length: 0.02 * (1 + slope * length)


def stepped(length):
    """Passes of 4 to 8 tokens take as long as each other, and less than those of 2 or 3."""
    return 0.02 * [1.0, 1.8, 2.5, 1.6, 1.6, 1.65][length]


@pytest.mark.parametrize("rates", [[0.9] * 5, [0.6] * 5, [0.3] * 5, [0.05] * 5, [0.9, 0.9, 0.1, 0.1, 0.1]])
@pytest.mark.parametrize("cost", [linear(0.05), linear(0.3), linear(1.0), stepped])
def test_dynamic_comes_close_to_the_best_constant_length(rates, cost) -> None:
    schedule = Schedule(Ngram(), Model())
    simulate(schedule, 400, rates=rates, cost=cost)
    _, tokens, seconds = simulate(schedule, 600, rates=rates, cost=cost, seed=1)
    assert tokens / seconds > 0.92 * best_rate(rates, cost)


def test_speculation_is_switched_off_where_it_loses_and_tried_again() -> None:
    schedule = Schedule(Ngram(), Model())
    simulate(schedule, 60, rates=[0.02] * 5, cost=linear(0.5))
    lengths, *_ = simulate(schedule, 10 * PROBE, rates=[0.02] * 5, cost=linear(0.5))
    assert 1 <= sum(map(bool, lengths)) <= 20
    lengths, *_ = simulate(schedule, 30 * PROBE, rates=[0.98] * 5, cost=linear(0.05))
    assert sum(lengths[-50:]) > 150


def test_what_a_model_showed_holds_for_the_next_call() -> None:
    model = Model()
    simulate(Schedule(Ngram(), model), 200, rates=[0.02] * 5, cost=linear(0.5))
    lengths, *_ = simulate(Schedule(Ngram(), model), 20, rates=[0.02] * 5, cost=linear(0.5))
    assert sum(map(bool, lengths)) <= 1
    lengths, *_ = simulate(Schedule(Ngram(), Model()), 20, rates=[0.02] * 5, cost=linear(0.5))
    assert any(lengths)


def test_where_drafts_lose_they_are_seldom_looked_at_and_tried() -> None:
    model, losing = Model(), {"rates": [0.3] * 5, "cost": linear(0.8), "batch": 8, "drafting": 0.0005}
    simulate(Schedule(Ngram(), model), 100, **losing)
    looks = []
    lengths, *_ = simulate(Schedule(Ngram(), model), 400, looks=looks, **losing)
    assert looks[0]
    assert sum(looks) < 80
    assert sum(map(bool, lengths)) <= 3
    looks = []
    simulate(Schedule(Ngram(), model), 40, rates=[0.3] * 5, cost=linear(0.8), batch=8, looks=looks)
    assert all(looks[RESTS:])


def test_what_forwards_cost_holds_for_another_drafter() -> None:
    model = Model()
    simulate(Schedule(Ngram(), model), 100, rates=[0.0] * 5, cost=linear(0.8))
    assert Schedule(Ngram(max_ngram=2), model)._costs.knows(1)


def test_drafts_are_cut_where_confidence_is_low() -> None:
    schedule = Schedule(Ngram(), Model())
    simulate(schedule, 3, rates=[0.9] * 5, cost=linear(0.3))
    for likely, length in (((0.9, 0.9, 0.9, 0.02, 0.9), 3), ((0.05, 0.9, 0.9, 0.9, 0.9), 0)):
        assert len(schedule.cut([0], [Draft([0] * 5, confidence=likely)])[0]) == length


@pytest.mark.parametrize(("said", "is_so"), [(0.85, 0.05), (0.15, 0.95)])
def test_what_a_drafter_says_is_corrected_by_what_is_measured(said, is_so) -> None:
    schedule = Schedule(Ngram(), Model())
    draft = Draft([0] * 5, confidence=[said] * 5)
    simulate(schedule, 600, rates=[is_so] * 5, cost=linear(0.12), confidence=draft.confidence)
    length = len(schedule.cut([0], [draft])[0])
    assert length <= 1 if is_so < said else length >= 4


def test_what_was_drawn_or_is_forced_is_not_cut() -> None:

    schedule = Schedule(Ngram(), Model())
    simulate(schedule, 100, rates=[0.0] * 5, cost=linear(2.0))
    assert len(schedule.cut([0], [Draft([0] * 5)])[0]) == 0
    assert len(schedule.cut([0], [Draft([0] * 5, forced=True)])[0]) == 5
    assert len(schedule.cut([0], [Draft([0] * 5, q=torch.ones(5, 3))])[0]) == 5


def test_constant_and_heuristic_lengths() -> None:
    constant = Schedule(Ngram(schedule="constant"), Model())
    assert set(simulate(constant, 20, rates=[0.0] * 5, cost=linear(1.0))[0]) == {5}
    heuristic = Schedule(Ngram(schedule="heuristic"), Model())
    assert simulate(heuristic, 6, rates=[0.0] * 5, cost=linear(1.0))[0] == [5, 4, 3, 2, 1, 1]
    assert simulate(heuristic, 4, rates=[1.0] * 5, cost=linear(1.0))[0] == [1, 3, 5, 5]


def test_room_bounds_every_length() -> None:
    assert Schedule(Ngram(schedule="constant"), Model()).budgets([0, 1, 2], [0, 3, 9]) == [0, 3, 5]


def test_the_first_pass_of_a_call_is_no_measure_of_the_others() -> None:
    model, passes = Model(), iter([0.2])
    simulate(Schedule(Ngram(), model), 40, rates=[0.9] * 5, cost=lambda length: next(passes, linear(0.3)(length)))
    seconds = Schedule(Ngram(), model)._costs.seconds[1]
    assert seconds
    assert all(relative > 1.2 for relative, _ in seconds.values())


def test_where_few_tokens_cost_much_more_of_them_are_guessed_to_cost_half() -> None:
    costs = Costs()
    costs.note(1, (1, 2), 1.8)
    assert costs.of(1, (1, 4)) == pytest.approx(2.2)
    assert costs.of(1, (1, 32)) == pytest.approx(25.8)


def test_unmeasured_shapes_are_guessed_low() -> None:
    costs = Costs()
    assert costs.of(1, (1, 1)) == 1.0
    assert costs.of(1, (1, 4)) == pytest.approx(1.3)
    costs.note(1, (1, 4), 2.0)
    costs.note(1, (1, 4), 1.0)
    assert costs.of(1, (1, 4)) == 1.5
    assert costs.of(1, (1, 7)) == pytest.approx(1.6)
    costs.note(1, (1, 3), 1.1)
    assert costs.of(1, (1, 7)) == pytest.approx(1.3)
    assert costs.of(8, (8, 2)) == pytest.approx(1.1)


def test_what_other_numbers_of_rows_cost_is_a_guess() -> None:
    costs = Costs()
    costs.note(8, (8, 2), 1.8)
    assert costs.of(4, (4, 2)) == pytest.approx(1.4)
    assert costs.of(16, (16, 2)) == pytest.approx(1.8)


def test_a_forward_is_not_taken_for_dearer_than_a_larger_one() -> None:
    costs = Costs()
    costs.note(1, (1, 3), 1.8)
    costs.note(1, (1, 4), 1.2)
    costs.note(1, (1, 5), 1.5)
    assert [costs.of(1, (1, width)) for width in (3, 4, 5)] == [1.2, 1.2, 1.5]
    assert costs.of(4, (4, 3)) == pytest.approx(1.2)


@pytest.mark.parametrize(("rate", "pays"), [(0.3, False), (0.95, True)])
def test_drafts_must_beat_what_a_step_takes_in_a_run(rate, pays) -> None:
    schedule, rng, drafted = Schedule(Ngram(max_tokens=5), Model()), random.Random(0), []
    for _ in range(300):
        schedule.budgets([0], [100])
        [draft] = schedule.cut([0], [Draft([0] * 5)])
        drafted.append(len(draft))
        if not draft:
            schedule.ran(1, 0.01, 0.0)
            continue
        hits = next((place for place in range(len(draft)) if rng.random() >= rate), len(draft))
        schedule.observe({0: draft}, {0: hits}, 0.018, 0.0)
    assert (sum(map(bool, drafted[-100:])) > 80) == pays
    assert pays or sum(map(bool, drafted[-100:])) <= 5


def test_a_pass_that_was_slower_than_others_will_be_is_no_measure() -> None:
    schedule, costs = Schedule(Ngram(), Model()), []
    for turn, seconds in enumerate([0.01, 0.01, None, None, 0.012]):
        draft = Draft([0] * (2 if turn > 1 else 0))
        schedule.observe({0: draft}, {0: 0}, seconds, 0.0)
        costs.append(schedule._costs.of(1, (1, 3)))
    assert costs[1] == costs[3]
    assert costs[4] == pytest.approx(1.2)
