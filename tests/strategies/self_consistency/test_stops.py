import pytest
from scipy.stats import beta

from decodekit.strategies.self_consistency.stops import Adaptive, DeepConf, Esc, leads


def test_the_leader_stays_in_front_with_the_mass_of_a_beta_above_a_half() -> None:
    for first, second in [(0, 0), (1, 0), (4, 0), (5, 3), (40, 20)]:
        assert leads(first, second) == pytest.approx(beta.sf(0.5, first + 1, second + 1))


def test_adaptive_needs_a_clear_leader() -> None:
    stop = Adaptive(confidence=0.95)
    assert not stop.enough(["1", "1", "1"])  # 1 - 1/16 = .9375
    assert stop.enough(["1"] * 4)
    assert not stop.enough(["1"] * 4 + ["2"] * 2)
    assert not stop.enough([None] * 9)
    assert stop.enough([None] * 9 + ["1"] * 4)


def test_esc_needs_one_answer_in_the_whole_window() -> None:
    stop = Esc(batch=3)
    assert stop.enough(["1", "2", "2", "2"])
    assert not stop.enough(["2", "2", "1", "2"])
    assert not stop.enough(["2", "2"])
    assert not stop.enough([None, None, None])


def test_the_lowest_group_is_the_least_mean_over_a_window() -> None:
    stop = DeepConf(window=2)
    assert stop.lowest([4, 1, 2, 9]) == 1.5
    assert stop.lowest([4]) == 4
    assert stop.hopeless([4, 1, 2, 9], threshold=1.6)
    assert not stop.hopeless([4, 1, 2, 9], threshold=1.5)
    assert not stop.hopeless([0], threshold=1)  # no group is full yet


def test_the_threshold_keeps_its_share_of_the_warm_up() -> None:
    lowest = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert DeepConf(keep=1).threshold(lowest) == 1
    assert sum(value >= DeepConf(keep=0.4).threshold(lowest) for value in lowest) == 2


def test_consensus_is_a_share_of_all_votes() -> None:
    assert DeepConf(consensus=0.75).agreed({"1": 3.0, "2": 1.0})
    assert not DeepConf(consensus=0.8).agreed({"1": 3.0, "2": 1.0})
    assert not DeepConf().agreed({})
