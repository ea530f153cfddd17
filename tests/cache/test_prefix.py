import sys

import pytest

from decodekit.cache.blocks import BlockPool
from decodekit.cache.prefix import Chain, PrefixIndex, Prompt, block_contents, open_together
from tests.cache.interrupts import Interrupted, state
from tests.cache.test_blocks import compute


def cached(pool, tokens, **other):
    """How many tokens a prompt would find."""
    return pool.resumable(Prompt(tokens, **other))[-1]


def test_equal_chains_are_one_object_and_are_forgotten_with_their_last_user():
    index = PrefixIndex(2)
    root = index.root(Prompt([], salt="a"))
    assert index.root(Prompt([1], salt="a")) is root
    assert index.root(Prompt([], salt=b"a")) is not root
    long = index.child(index.child(root, (1, 2)), (3, 4))
    assert index.match(Prompt([1, 2, 3, 4, 5], salt="a"), 2) == ([long.parent, long], [0])
    long.parent.holders = (7,)
    assert index.match(Prompt([1, 2, 3, 4, 5], salt="a"), 2) == ([long.parent, long], [0, 2])
    assert len(index) == 3
    del long, root
    assert len(index) == 0


def test_a_chain_of_any_length_is_forgotten():
    index = PrefixIndex(1)
    chain = index.root(Prompt([]))
    for token in range(50 * sys.getrecursionlimit()):
        chain = index.child(chain, (token,))
    del chain
    assert len(index) == 0


def test_prompts_whose_tokens_collide_in_hash_share_nothing():
    pool = BlockPool(16, 2)
    modulus = sys.hash_info.modulus
    assert hash(3 + modulus) == hash(3)
    compute(pool, [3, 4, 5, 6, 7])
    assert cached(pool, [3, 4, 5, 6, 7]) == 4
    assert cached(pool, [3 + modulus, 4, 5, 6, 7]) == 0
    assert cached(pool, [3, 4, 5 + modulus, 6, 7]) == 2


def test_a_block_needs_the_whole_prefix_before_it():
    pool = BlockPool(16, 2)
    compute(pool, [1, 2, 8, 9, 0])
    assert cached(pool, [3, 4, 8, 9, 0]) == 0


def test_tenants_do_not_see_each_other():
    pool = BlockPool(64, 16)
    tokens = list(range(65))
    compute(pool, tokens, salt="A")
    assert cached(pool, tokens, salt="B") == cached(pool, tokens) == 0
    assert cached(pool, tokens, salt="A") == 64


def test_adapters_do_not_share():
    pool = BlockPool(16, 2)
    compute(pool, [1, 2, 3], extra="lora")
    assert cached(pool, [1, 2, 3], extra="lora") == 2
    assert cached(pool, [1, 2, 3]) == cached(pool, [1, 2, 3], extra="other") == 0


def test_images_share_only_with_themselves_at_the_same_place():
    pool = BlockPool(32, 2)
    tokens = [1, 2, 9, 9, 9, 9, 3, 4, 5]
    compute(pool, tokens, media=[(2, 6, "cat")])
    assert cached(pool, tokens, media=[(2, 6, "cat")]) == 8
    assert cached(pool, tokens, media=[(2, 6, "dog")]) == cached(pool, tokens) == 2
    assert cached(pool, [9, 9, 9, 9, 3, 4, 5], media=[(0, 4, "cat")]) == 0
    assert cached(pool, tokens, media=[(4, 6, "cat")]) == 2


def test_contents_are_plain_ids_of_any_integer_type():
    numpy = pytest.importorskip("numpy")
    assert block_contents(numpy.array([4, 5]), 7, [(8, 9, "cat")]) == [4, (5, "cat")]
    with pytest.raises(TypeError):
        block_contents([1.5])


def test_groups_begin_together_where_all_of_them_can():
    full, window = BlockPool(16, 4), BlockPool(6, 4, window=5)
    tokens = list(range(21))
    for pool in (full, window):
        pool.release(compute(pool, tokens))
    compute(window, [50] * 8)  # evicts the last block of the chain
    assert full.resumable(Prompt(tokens))[-1] == 20
    assert window.resumable(Prompt(tokens))[-1] == 16
    tables = open_together([full, window], Prompt(tokens))
    assert [table.num_cached for table in tables] == [16, 16]
    assert tables[1].blocks.count(None) == 3
    tables = open_together([full, window], Prompt(tokens), checkpoints={6, 8, 20})
    assert [table.num_cached for table in tables] == [8, 8]
    assert open_together([full], Prompt(tokens), checkpoints=[])[0].num_cached == 0


def test_groups_open_all_or_none(monkeypatch):
    pools = [BlockPool(8, 4), BlockPool(8, 4)]
    for pool in pools:
        compute(pool, [1] * 9)

    def interrupt(*_, **__):
        raise Interrupted

    monkeypatch.setattr(pools[1], "open", interrupt)
    before = state(pools[0])[0]
    with pytest.raises(Interrupted):
        open_together(pools, Prompt([1] * 9))
    assert state(pools[0])[0] == before


def test_an_empty_chain_has_no_parent():
    assert not hasattr(Chain(None, ()), "parent")
