import copy
import gc
import weakref

from decodekit.runtime.shelf import borrow, give_back, release
from decodekit.testing import tiny_model


def test_a_cache_serves_the_next_call_that_it_is_large_enough_for() -> None:
    model = tiny_model("dense")
    first = borrow(model, 8, 16)
    assert borrow(model, 8, 16) is not first  # lent
    give_back(model, first)
    assert borrow(model, 5, 16) is first
    give_back(model, first)
    larger = borrow(model, 9, 16)
    assert larger is not first
    give_back(model, larger)
    assert borrow(model, 9, 8) is not larger
    other = borrow(model, 9, 16)
    model.double()
    give_back(model, other)
    assert borrow(model, 1, 16) is not other  # it holds numbers of another kind


def test_what_is_kept_goes_with_its_model() -> None:
    model = tiny_model("dense")
    give_back(model, borrow(model, 8, 16))
    assert borrow(copy.deepcopy(model), 8, 16) is not None
    cache = borrow(model, 8, 16)
    kept = weakref.ref(cache)
    give_back(model, cache)
    release(model)
    del cache
    gc.collect()
    assert kept() is None
