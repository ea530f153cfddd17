"""Sizes in bytes as people write and read them."""

from __future__ import annotations

import re

from decodekit.core.errors import InputError

_UNITS = {"b": 1} | {
    f"{prefix}{infix}b": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_bytes(size: str | int) -> int:
    """``4GiB``, ``1.5 GB``, ``500MB`` or plain bytes as a number of bytes; iB units count by 1024, B units by 1000.

    Raises:
        InputError: it is none of these.
    """
    if isinstance(size, str) and (match := _SIZE.fullmatch(size.strip())):
        number, unit = match.groups()
        if (scale := _UNITS.get(unit.lower() or "b")) is not None:
            return int(float(number) * scale) if "." in number else int(number) * scale
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    raise InputError(f"size {size!r} is not a number of bytes: give such as '4GiB', '500MB' or plain bytes")


def format_bytes(size: int) -> str:
    """``size`` with the largest binary unit that leaves at least 1: ``864 KiB``, ``1.5 GiB``."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
