import pytest

from decodekit.core.errors import InputError
from decodekit.core.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("12B", 12),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("500MB", 500_000_000),
        (" 2 kB ", 2000),
        ("1TiB", 1 << 40),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read_as_written(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", -1, "-4GiB", "4G", "4 GiB more", "GiB", "1e9", 1.5, True, None])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match="give such as '4GiB'"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1023, "1023 B"),
        (864 << 10, "864 KiB"),
        (6216 << 20, "6.07 GiB"),
        (1020 << 20, "1020 MiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_sizes_are_written_with_the_largest_unit(size, text):
    assert format_bytes(size) == text
