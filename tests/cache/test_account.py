import pytest

from decodekit.cache.account import PRECISIONS, Account, first_length
from decodekit.cache.shapes import LayerShape

FULL = LayerShape("full_attention", heads=2, key_dim=8, value_dim=8)
WINDOW = LayerShape("sliding_attention", heads=2, key_dim=8, value_dim=8, kept=9)
RECURRENT = LayerShape("linear_attention", state=256, conv=32)
TOKEN = 2 * (8 + 8) * 2


def account(*shapes, **options):
    return Account(
        tuple((shape, 1) for shape in shapes), **{"dtype_bytes": 2, "state_bytes": 4, "block_size": 4, **options}
    )


@pytest.mark.parametrize(("tokens", "slots"), [(0, 0), (1, 4), (4, 4), (5, 8), (8, 8)])
def test_blocks_are_whole(tokens, slots):
    held, unused = account(FULL).blocks(FULL, tokens)
    assert (held, unused) == (slots * TOKEN, (slots - tokens) * TOKEN)


@pytest.mark.parametrize(
    ("tokens", "blocks", "unused"),
    [
        (9, 3, 3),  # tokens 0-8
        (10, 3, 3),  # tokens 1-9: one unused in the first block, two in the last
        (12, 3, 3),  # tokens 3-11
        (13, 3, 3),  # tokens 4-12: the first block is gone
        (16, 3, 3),  # tokens 7-15
    ],
)
def test_a_window_holds_the_blocks_that_it_touches(tokens, blocks, unused):
    assert account(WINDOW).blocks(WINDOW, tokens) == (4 * blocks * TOKEN, unused * TOKEN)


def test_a_block_is_quantized_when_it_is_full():
    # 4 bits: 16 bytes of codes a token; scale and zero of 16 key channels, and of 2 value heads of each token.
    quantized, full = 4 * 16 + (16 + 2 * 4) * 4, 4 * TOKEN
    sizes = account(FULL, precision=PRECISIONS["int4"])
    assert sizes.blocks(FULL, 8) == (2 * quantized, 0)
    assert sizes.blocks(FULL, 9) == (2 * quantized + full, 3 * TOKEN)


def test_odd_widths_round_up_to_bytes():
    odd = LayerShape("full_attention", heads=1, key_dim=5, value_dim=3)
    assert account(odd, precision=PRECISIONS["int4"]).token(odd) == 3 + 2
    assert account(odd, precision=PRECISIONS["int2"]).token(odd) == 2 + 1


def test_eight_bit_keys_leave_states_and_convolutions_alone():
    sizes = account(FULL, RECURRENT, dtype_bytes=1)
    assert (sizes.token(FULL), sizes.state(RECURRENT), sizes.conv(RECURRENT)) == (TOKEN // 2, 256 * 4, 32 * 2)


def test_the_indexer_is_not_quantized():
    indexed = LayerShape("indexed_attention", heads=1, key_dim=8, value_dim=8, index_dim=6)
    assert account(indexed, precision=PRECISIONS["int4"]).token(indexed) == 4 + 4 + 6 * 2


def test_checkpoints_are_copies_of_all_states():
    sizes = account(FULL, RECURRENT, checkpoint_every=10)
    assert sizes.checkpoints(9) == 0
    assert sizes.checkpoints(39) == 3 * (256 * 4 + 32 * 2)
    assert sizes.row(39) == 40 * TOKEN + 4 * (256 * 4 + 32 * 2)


@pytest.mark.parametrize("shapes", [(FULL,), (WINDOW,), (FULL, WINDOW, RECURRENT)])
@pytest.mark.parametrize("precision", [None, "int4"])
def test_the_longest_row_fits_at_every_length_on_its_way(shapes, precision):
    sizes = account(*shapes, precision=PRECISIONS.get(precision), checkpoint_every=7)
    rows = [sizes.row(n) for n in range(200)]
    assert [sizes.peak(n) for n in range(200)] == [max(rows[: n + 1]) for n in range(200)]
    for budget in range(0, max(rows), 97):
        expected = next((n - 1 for n, size in enumerate(rows) if size > budget), None)
        assert expected is None or sizes.longest(budget) == max(0, expected)


def test_windows_and_states_alone_have_no_longest_row():
    sizes = account(WINDOW, RECURRENT)
    assert sizes.longest(sizes.peak(100)) is None
    assert sizes.longest(100) == 0


def test_crossover_compares_layer_by_layer():
    state = 256 * 4 + 32 * 2
    assert account(FULL, RECURRENT).crossover() == state // TOKEN
    # Two attention layers and one recurrent: what counts is one against one.
    assert account(FULL, FULL, RECURRENT).crossover() == state // TOKEN
    assert account(FULL).crossover() == 0
    assert account(RECURRENT).crossover() is None
    assert account(WINDOW, RECURRENT).crossover() is None


def test_a_length_that_is_never_reached_is_none():
    assert first_length(lambda n: n >= 1234567) == 1234567
    assert first_length(lambda n: False) is None
