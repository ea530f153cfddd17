import torch

from decodekit.cache.host import HostTier
from decodekit.cache.prefix import Prompt
from decodekit.cache.states import Checkpoints, StateBatch, StateRef, compact, working_copy

KEY = (0, "recurrent_states", 0)


def batch(*values):
    return StateBatch({KEY: torch.tensor(values)[:, None].float()}, len(values))


def test_a_step_works_on_a_copy():
    states = batch(1, 2, 3)
    for places in ([0, 1, 2], [2, 0], [1, 1, 1]):
        working = working_copy([StateRef(states, place) for place in places])
        assert working[KEY].flatten().tolist() == [place + 1 for place in places]
        working[KEY].zero_()
    assert states.tensors[KEY].flatten().tolist() == [1, 2, 3]


def test_rows_come_together_from_several_batches():
    working = working_copy([StateRef(batch(1, 2), 1), None, StateRef(batch(3), 0)])
    assert working[KEY].flatten().tolist() == [2, 0, 3]
    assert working_copy([None, None]) is None


def test_compacted_references_keep_what_they_are_of():
    states = batch(1, 2, 3, 4)
    refs = compact([StateRef(states, 3), StateRef(states, 1), StateRef(states, 3)], states)
    assert [ref.batch.tensors[KEY][ref.place].item() for ref in refs] == [4, 2, 4]
    assert refs[0].batch.rows == 2


def test_checkpoints_are_found_by_what_they_are_of():
    saved = Checkpoints(3, HostTier(0))
    saved.save(Prompt([5, 6], salt="a"), None, StateRef(batch(1, 2), 1))
    saved.save(Prompt([5, 6, 7, 8], salt="a"), None, StateRef(batch(3), 0))
    assert saved.depths(Prompt([5, 6, 7, 8, 9], salt="a")) == [2, 4]
    assert saved.depths(Prompt([5, 6, 7, 8], salt="a")) == [2]
    assert saved.depths(Prompt([5, 6, 7, 8, 9], salt="b")) == []
    assert saved.depths(Prompt([5, 6, 9, 8, 9], salt="a")) == [2]
    assert saved.depths(Prompt([5, 6, 7], salt="a", media=((0, 2, "cat"),))) == []
    ref = saved.get(Prompt([5, 6, 7], salt="a"), 2)
    assert ref.batch.tensors[KEY].flatten().tolist() == [2]


def test_the_longest_unused_checkpoint_goes_first():
    saved = Checkpoints(2, HostTier(0))
    for token in (5, 6):
        saved.save(Prompt([token]), None, StateRef(batch(token), 0))
    saved.get(Prompt([5, 0]), 1)
    saved.save(Prompt([7]), None, StateRef(batch(7), 0))
    assert [bool(saved.depths(Prompt([token, 0]))) for token in (5, 6, 7)] == [True, False, True]
