from dataclasses import replace

import pytest

from decodekit.cache.account import PRECISIONS, Account
from decodekit.cache.advice import advise
from decodekit.cache.shapes import LayerShape

LAYERS = ((LayerShape("full_attention", heads=8, key_dim=128, value_dim=128), 32),)
MODEL = Account(LAYERS, dtype_bytes=2, state_bytes=4, block_size=16)
ROWS = 8 * MODEL.row(4096)


def advice(account=MODEL, budget=None, batch=8):
    return {each.cache: each for each in advise(account, 4096, batch, budget)}


def recommended(**options):
    return [each.cache for each in advice(**options).values() if each.recommended]


def test_every_kind_has_a_reason_in_one_sentence():
    found = advice()
    assert set(found) == {"paged", "dynamic", "static", "quantized", "offloaded"}
    assert all(each.fits is None and each.reason and ". " not in each.reason for each in found.values())


@pytest.mark.parametrize(
    ("share", "cache"),
    [(1, "paged"), (0.6, "quantized"), (0.3, "quantized"), (0.15, "offloaded"), (0.01, None)],
)
def test_what_loses_least_is_recommended(share, cache):
    assert recommended(budget=int(ROWS * share)) == ([cache] if cache else [])


def test_the_mildest_quantization_that_fits_is_named():
    assert "int8 takes 0.57" in advice()["quantized"].reason
    assert "int4 takes 0.32" in advice(budget=int(ROWS * 0.4))["quantized"].reason
    assert "int2 takes 0.20" in advice(budget=1)["quantized"].reason
    asked = replace(MODEL, precision=PRECISIONS["fp8"])
    assert "fp8 takes 0.54" in advice(asked, budget=1)["quantized"].reason


def test_sizes_are_of_the_whole_batch():
    found = advice(budget=ROWS)
    assert found["paged"].bytes == found["dynamic"].bytes == found["static"].bytes == ROWS
    assert found["offloaded"].bytes == ROWS // 16
    assert all(each.fits for each in found.values())
    assert not any(each.fits for each in advice(budget=1).values())


@pytest.mark.parametrize(("batch", "times"), [(1, 8.6), (7, 8.6), (8, 5.3), (200, 1.9)])
def test_the_speed_of_a_static_cache_is_that_of_a_batch_near(batch, times):
    assert f"{times} times" in advice(batch=batch)["static"].reason


def test_a_model_of_states_alone_needs_no_blocks():
    states = replace(MODEL, layers=((LayerShape("linear_attention", state=4096, conv=64), 4),))
    assert recommended(account=states) == ["dynamic"]
    assert recommended(account=states, budget=1) == []


def test_checkpoints_that_fill_a_budget_are_named():
    hybrid = replace(MODEL, layers=(*LAYERS, (LayerShape("linear_attention", state=4096), 4)), checkpoint_every=64)
    assert "32 MiB are checkpoints" in advice(hybrid)["paged"].reason
