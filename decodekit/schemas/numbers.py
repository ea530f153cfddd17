"""Sets of numbers as terminals over the text that writes them.

A number is written as a plain decimal with any trailing zeros, or in scientific form with one digit before the point and an
exponent within a double's range. Every terminal holds all of these ways to write each of its numbers, so that intersection and
complement of terminals are those of the sets.
"""

from __future__ import annotations

from fractions import Fraction

from decodekit.core.errors import UnsupportedConstraint

MAX_EXPONENT = 307
_PLAIN = r"(0|[1-9][0-9]*)(\.[0-9]+)?"


def _between(low: int, high: int) -> str:
    """The decimal numerals of the non-negative integers between the two, without leading zeros."""
    parts = []
    start = low
    while start <= high:
        end = min(high, 10 ** len(str(start)) - 1)
        parts.append(_same_width(str(start), str(end)))
        start = end + 1
    return f"({'|'.join(parts)})"


def _same_width(low: str, high: str) -> str:
    if not low:
        return ""
    if low[0] == high[0]:
        return low[0] + _same_width(low[1:], high[1:])
    width = len(low) - 1
    parts = [low[0] + _same_width(low[1:], "9" * width), high[0] + _same_width("0" * width, high[1:])]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}][0-9]{{{width}}}")
    return f"({'|'.join(parts)})"


def _exponents(low: int, high: int) -> str:
    """``e`` and an exponent between the two; single digits may be written with a zero before them."""
    low, high = max(low, -MAX_EXPONENT), min(high, MAX_EXPONENT)
    parts = []
    for sign, first, last in ((r"\+?", max(low, 0), high), ("-", max(-high, 1), -low)):
        if first <= last:
            if first <= 9:
                parts.append(f"{sign}0?{_between(first, min(last, 9))}")
            if last > 9:
                parts.append(f"{sign}{_between(max(first, 10), last)}")
    return f"[eE]({'|'.join(parts)})" if parts else ""


_SCIENTIFIC = rf"[1-9](\.[0-9]+)?{_exponents(-MAX_EXPONENT, MAX_EXPONENT)}"
NUMBER = f"/-?({_PLAIN}|{_SCIENTIFIC})/"
INTEGER = (
    rf"/-?((0|[1-9][0-9]*)(\.0+)?|[1-9](\.0+)?{_exponents(0, MAX_EXPONENT)}"
    rf"|[1-9](\.[0-9]{{1,16}})?{_exponents(16, MAX_EXPONENT)})/"
)
PLAIN_INTEGER = r"/-?(0|[1-9][0-9]*)/"


def exactly(value: Fraction) -> str:
    """A terminal for one number.

    Raises:
        UnsupportedConstraint: it has no finite decimal expansion.
    """
    if not value:
        return r"/-?0(\.0+)?/"
    whole, fraction, exponent = _digits(abs(value))
    tail = rf"\.{fraction}0*" if fraction else r"(\.0+)?"
    significant = (whole + fraction).strip("0") if whole != "0" else fraction.strip("0")
    mantissa = rf"{significant[0]}\.{significant[1:]}0*" if significant[1:] else rf"{significant[0]}(\.0+)?"
    power = _exponents(exponent, exponent) if abs(exponent) <= MAX_EXPONENT else ""
    scientific = f"|{mantissa}{power}" if power else ""
    return f"/{'-' if value < 0 else ''}({whole}{tail}{scientific})/"


def _digits(value: Fraction) -> tuple[str, str, int]:
    """A positive number as its whole digits, its decimals without trailing zeros and its decimal exponent."""
    places = 0
    while (value * 10**places).denominator != 1:
        places += 1
        if places > 400:
            raise UnsupportedConstraint(f"{float(value)} has no finite decimal expansion", ["multipleOf"])
    digits = str(int(value * 10**places)).rjust(places + 1, "0")
    whole, fraction = digits[: len(digits) - places], digits[len(digits) - places :]
    significant = (whole + fraction).lstrip("0")
    return whole, fraction, len(significant) - 1 - places


def _decimals(fraction: str, upper: bool, inclusive: bool) -> str:
    """A point and decimals, or nothing, whose value is at least (at most) that of ``fraction``."""
    parts = []
    for place, digit in enumerate(fraction):
        low, high = (0, int(digit) - 1) if upper else (int(digit) + 1, 9)
        if low <= high:
            parts.append(rf"\.{fraction[:place]}[{low}-{high}][0-9]*")
        if upper and place:
            parts.append(rf"\.{fraction[:place]}")
    if upper:
        parts += [""] if fraction or inclusive else []
        if inclusive:
            parts.append(rf"\.{fraction}0*" if fraction else r"\.0+")
    elif inclusive:
        parts += [rf"\.{fraction}[0-9]*"] if fraction else ["", r"\.[0-9]+"]
    else:
        parts.append(rf"\.{fraction}[0-9]*[1-9][0-9]*")
    return f"({'|'.join(parts)})" if parts else r"[^\x{0}-\x{10ffff}]"


def _magnitude(bound: Fraction, upper: bool, inclusive: bool) -> str:
    """Positive numerals (zero too, where it is within an upper bound) at least, or at most, a positive bound."""
    whole, fraction, exponent = _digits(bound)
    width = len(whole)
    parts = [f"{whole}{_decimals(fraction, upper, inclusive)}"]
    for place, digit in enumerate(whole):
        low, high = (1 if place == 0 and width > 1 else 0, int(digit) - 1) if upper else (int(digit) + 1, 9)
        if low <= high:
            parts.append(rf"{whole[:place]}[{low}-{high}][0-9]{{{width - place - 1}}}(\.[0-9]+)?")
    if not upper:
        parts.append(rf"[1-9][0-9]{{{width},}}(\.[0-9]+)?")
    elif width > 1:
        parts.append(rf"(0|[1-9][0-9]{{0,{width - 2}}})(\.[0-9]+)?")
    significant = (whole + fraction).lstrip("0").rstrip("0")
    lead, more = significant[0], significant[1:]
    if powers := _exponents(exponent, exponent) if abs(exponent) <= MAX_EXPONENT else "":
        parts.append(f"{lead}{_decimals(more, upper, inclusive)}{powers}")
        low, high = (1, int(lead) - 1) if upper else (int(lead) + 1, 9)
        if low <= high:
            parts.append(rf"[{low}-{high}](\.[0-9]+)?{powers}")
    beyond = _exponents(-MAX_EXPONENT, exponent - 1) if upper else _exponents(exponent + 1, MAX_EXPONENT)
    if beyond:
        parts.append(rf"[1-9](\.[0-9]+)?{beyond}")
    return f"({'|'.join(parts)})"


_POSITIVE = rf"((0|[1-9][0-9]*)\.[0-9]*[1-9][0-9]*|[1-9][0-9]*(\.[0-9]+)?|{_SCIENTIFIC})"


def at_least(bound: Fraction, inclusive: bool) -> str:
    """A terminal for the numbers from a bound on."""
    return _beyond(bound, inclusive, "-", "")


def at_most(bound: Fraction, inclusive: bool) -> str:
    """A terminal for the numbers up to a bound."""
    return _beyond(-bound, inclusive, "", "-")


def _beyond(bound: Fraction, inclusive: bool, below: str, above: str) -> str:
    """Numbers from ``bound`` on, where ``below`` and ``above`` are the signs of those under and over zero."""
    zero = r"-?0(\.0+)?"
    if bound > 0:
        return f"/{above}{_magnitude(bound, False, inclusive)}/"
    if bound == 0:
        return f"/{above}{_POSITIVE}{f'|{zero}' if inclusive else ''}/"
    return f"/{above}{_POSITIVE}|{zero}|{below}{_magnitude(-bound, True, inclusive)}/"


def multiple_of(divisor: Fraction) -> str:
    """A terminal for the multiples of a positive number, not all of their scientific forms.

    Raises:
        UnsupportedConstraint: the divisor has prime factors other than 2 and 5, and one three.
    """
    places = 0
    while (divisor * 10**places).denominator != 1:
        places += 1
        if places > 20:
            raise UnsupportedConstraint(f"multipleOf {float(divisor)} has more than 20 decimals", ["multipleOf"])
    factor = int(divisor * 10**places)
    rest, tens = factor, 0
    while rest % 2 == 0 or rest % 5 == 0:
        rest //= 2 if rest % 2 == 0 else 5
    while 10**tens % (factor // rest):
        tens += 1
    if rest not in (1, 3) or tens > 4:
        raise UnsupportedConstraint(f"multipleOf {float(divisor)} is more than a terminal can count", ["multipleOf"])
    terminal = _last_digits(factor // rest, tens, places)
    if rest == 1:
        large = _exponents(40, MAX_EXPONENT)  # a multiple of 10**23 at least: sixteen decimals are all a double has
        return f"({terminal} | /-?[1-9](\\.[0-9]{{1,16}})?{large}/)"
    return f"({terminal} & {_digit_sum(rest)})"


def _last_digits(factor: int, tens: int, places: int) -> str:
    """Decimals of at most ``places`` that, read as one integer, end in a multiple of a divisor of ``10**tens``."""
    width = max(tens - places, 0)  # whole digits that decide
    alternatives = []
    if places == 0:
        endings = [f"{value:0{tens}d}" for value in range(0, 10**tens, factor)] if tens else []
        small = [str(value) for value in range(0, 10**tens, factor)] if tens else []
        body = f"([1-9][0-9]*({'|'.join(endings)})|{'|'.join(small)})" if tens else "(0|[1-9][0-9]*)"
        return rf"/-?{body}(\.0+)?/"
    kept = min(tens, places)
    for value in range(0, 10 ** max(tens, 0), factor) if tens else [0]:
        digits = f"{value:0{tens}d}" if tens else ""
        whole_end, decimals = digits[: len(digits) - kept], digits[len(digits) - kept :]
        whole = "(0|[1-9][0-9]*)"
        if width:
            whole = f"([1-9][0-9]*{whole_end}|{int(whole_end)})"
        free = f"[0-9]{{{places - kept}}}"
        # Every place may be left out from the right where it is zero.
        forms = [rf"\.{free}{decimals}0*"] if places > kept or decimals else []
        stripped = decimals.rstrip("0")
        if not stripped:
            forms.append(rf"(\.[0-9]{{1,{places - kept}}})?0*" if places > kept else r"(\.0+)?")
        elif len(stripped) < len(decimals):
            forms.append(rf"\.{free}{stripped}0*")
        alternatives.append(f"{whole}({'|'.join(forms)})")
    terminal = "|".join(alternatives)
    return f"(/-?({terminal})/ & {NUMBER})"


def _digit_sum(factor: int) -> str:
    """Numerals whose digits add up to a multiple of 3 or 9; the point counts nothing."""
    if factor == 3:
        zero, one, two = r"[\.\-0369]", "[147]", "[258]"
        # The three states of the sum, the second and third eliminated.
        step = f"{one}{zero}*{two}|({two}|{one}{zero}*{one})({zero}|{two}{zero}*{one})*({one}|{two}{zero}*{two})"
        return f"/({zero}|{step})*/"
    raise UnsupportedConstraint("multipleOf a multiple of 9 is more than a terminal can count", ["multipleOf"])
