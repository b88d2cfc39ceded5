"""Numbers from users: read exactly, or refused with an error that names the expected and the given value."""

import re
from decimal import Decimal
from fractions import Fraction
from math import ceil, inf, nextafter
from operator import index
from typing import Final, SupportsIndex, TypeAlias

from headgate.errors import refuse

Number: TypeAlias = int | float | Fraction | Decimal

Cost: TypeAlias = SupportsIndex | float | Fraction | Decimal | str
"""The cost of a request: a whole number, or as many decimals as the limit counts."""

LARGEST: Final = 2**53 - 1
"""The largest whole number that every store counts exactly (Redis' scripts have doubles)."""

DIGITS: Final = 22
"""Digits on each side of the point in a limit's text: enough for every rate that can be counted."""

YEAR: Final = 31_536_000
"""The seconds of a year."""

_MICROSECOND: Final = Fraction(1, 1_000_000)
_EXPONENT: Final = 400  # of a Decimal: more than a float has, and few enough digits to compute with
_SHORT: Final = 12  # significant digits: few enough that a quotient such as 1 / 3 hardly ever has so few by chance
_WRITTEN: Final = re.compile(rf"[0-9]{{1,{DIGITS}}}(?:\.[0-9]{{1,{DIGITS}}})?")
_PERIODS: Final = (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1))


def whole(where: str, value: object, most: int = LARGEST, least: int = 1) -> int:
    """An int from `least` to `most`."""
    number = _int(value)
    if number is None or not least <= number <= most:
        refuse(where, f"a whole number from {least} to {most}", value)
    return number


def cost_of(value: object, least: int = 1) -> int:
    """A cost: an int of at least 1, or `least`.

    One beyond `LARGEST` is above every capacity, and comes back as `LARGEST` + 1.
    """
    number = _int(value)
    if number is None or number < least:
        refuse("cost", f"a whole number of at least {least}", value)
    return min(number, LARGEST + 1)


def cost_in(decimals: int, value: object, *, zero: bool = False) -> int:
    """A cost in smallest units, for a limit that counts so many decimals; with `zero`, 0 is one too.

    Without decimals it is what `cost_of` reads, or a whole Decimal, as which holds tell their costs.

    >>> cost_in(6, "0.0312"), cost_in(6, 2), cost_in(0, 2), cost_in(0, Decimal(2))
    (31200, 2000000, 2, 2)
    """
    if not decimals and type(value) is int and 0 < value <= LARGEST:  # as most are
        return value
    if type(value) is Decimal and not decimals:
        is_large = value.is_finite() and value > LARGEST
        if is_large and value == value.to_integral_value():
            return LARGEST + 1  # as for an int
    if decimals or type(value) is Decimal:
        return smallest_units("cost", value, decimals, zero=zero)
    return cost_of(value, least=0 if zero else 1)


def spent_in(decimals: int, value: object) -> int | Fraction:
    """A cost that is spent already, exactly, in smallest units: where there are decimals, it may have more of them.

    >>> spent_in(6, 0.1 + 0.2), spent_in(0, 2)
    (Fraction(7500000000000001, 25000000000), 2)
    """
    if not decimals:
        return cost_in(0, value, zero=True)
    number = _decimal(value)
    if number is None or number < 0:
        refuse("cost", "a number, 0 or more", value)
    scaled: Fraction = number * 10**decimals
    if scaled > LARGEST:
        refuse("cost", f"at most {decimal_text(Fraction(LARGEST, 10**decimals))}", value)
    return scaled.numerator if scaled.denominator == 1 else scaled


def smallest_units(
    where: str, value: object, decimals: int, *, zero: bool = False, hint: str = "", round_up: bool = False
) -> int:
    """A number above 0 (with `zero`, or 0) as a whole number of units of its last decimal.

    It is an int, a float, a Decimal, a Fraction or a text. A float is the decimal that it prints.
    """
    if type(value) is str and _WRITTEN.fullmatch(value):  # as most are: without fractions
        whole_part, _, decimal_part = value.partition(".")
        if len(decimal_part) <= decimals:
            found = int(whole_part + decimal_part.ljust(decimals, "0"))
            if (found or zero) and found <= LARGEST:
                return found
    number = _decimal(value)
    if number is None or number < 0 or (number == 0 and not zero):
        refuse(where, "a number, 0 or more" if zero else f"a number above 0{hint}", value)
    scaled: Fraction = number * 10**decimals
    if round_up:
        scaled = Fraction(ceil(scaled))
    if scaled.denominator != 1:
        most = f"a number with at most {decimals} decimals" if decimals else "a whole number"
        refuse(where, f"{most} (round it, if it was computed)", value)
    if scaled > LARGEST:
        refuse(where, f"at most {decimal_text(Fraction(LARGEST, 10**decimals))}", value)
    return int(scaled.numerator)


def positive(where: str, value: object) -> Fraction:
    """A number above zero, exactly.

    A float is read by its decimal text if that is short, so that 0.1 is 1/10; otherwise as the simplest fraction that
    rounds to it, so that 1 / 3 is a third.
    """
    number = _fraction(value)
    if number is None or number <= 0:
        refuse(where, "a number above 0", value)
    return number


def microseconds(where: str, seconds: object, most: int | None = None) -> int:
    """Seconds, 0 or more, to the nearest microsecond; at most so many microseconds."""
    number = seconds if type(seconds) is int else _fraction(seconds)
    if number is None or number < 0:
        refuse(where, "a number of seconds, 0 or more", seconds)
    found = number * 1_000_000 if isinstance(number, int) else round(number * 1_000_000)
    if most is not None and found > most:
        refuse(where, f"at most {most // 1_000_000} seconds", seconds)
    return found


def permille(where: str, value: object) -> int:
    """A share from 0 to 1, in thousandths."""
    number = _fraction(value)
    if number is None or not 0 <= number <= 1 or (number * 1000).denominator != 1:
        refuse(where, "a number from 0 to 1 with at most three decimals", value)
    return int(number * 1000)


def duration(where: str, value: object, most: int = YEAR) -> float:
    """A number of seconds, from a microsecond to `most`: within what every store, clock and timer can count."""
    number = _fraction(value)
    if number is None or not _MICROSECOND <= number <= most:
        refuse(where, f"a number of seconds from 0.000001 to {most}", value)
    return float(number)


def _int(value: object) -> int | None:
    """Any integer (numpy's too), but no bool: True is a mistake, not a 1."""
    if isinstance(value, bool):
        return None
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _fraction(value: object) -> Fraction | None:
    if isinstance(value, float):
        text = float.__repr__(value)
        return None if text.endswith(("n", "f")) else _of_float(text)  # nan, inf
    if isinstance(value, Decimal):
        return Fraction(value) if value.is_finite() and abs(value.adjusted()) <= _EXPONENT else None
    if isinstance(value, Fraction):
        return value
    number = _int(value)
    return None if number is None else Fraction(number)


def _decimal(value: object) -> Fraction | None:
    """A number as it is written."""
    if isinstance(value, float):
        text = float.__repr__(value)
        return None if text.endswith(("n", "f")) else Fraction(text)  # nan, inf
    if isinstance(value, str):
        return Fraction(value) if _WRITTEN.fullmatch(value) else None
    return _fraction(value)


def _of_float(text: str) -> Fraction:
    """The number that is meant by a float, which is given by its shortest text."""
    value = float(text)
    if sum(map(str.isdigit, text.partition("e")[0].strip("-0."))) <= _SHORT:
        return Fraction(text)
    exact = Fraction(value)
    if exact.denominator == 1:
        return exact
    below, above = Fraction(nextafter(value, -inf)), Fraction(nextafter(value, inf))
    return _simplest((below + exact) / 2, (exact + above) / 2)


def _simplest(low: Fraction, high: Fraction) -> Fraction:
    """The fraction between two others that has the smallest denominator."""
    floor = low.__floor__()
    if floor + 1 < high:
        return Fraction(floor + 1)
    if low == floor:
        return floor + Fraction(1, (1 / (high - floor)).__floor__() + 1)
    return floor + 1 / _simplest(1 / (high - floor), 1 / (low - floor))


def writable(number: Fraction) -> bool:
    """Whether a number can be written as a decimal in a limit's text."""
    return number < 10**DIGITS and (number * 10**DIGITS).denominator == 1


def rate_text(count: Fraction, seconds: Fraction) -> str:
    """A rate in the notation that `parse` reads, "60/minute" or "10 per 5 minutes"."""
    for unit, length in _PERIODS:
        if seconds % length == 0 or unit == "second":
            break
    if seconds == length:
        return f"{decimal_text(count)}/{unit}"
    return f"{decimal_text(count)} per {decimal_text(seconds / length)} {unit}s"


def not_decimal(number: Fraction) -> int:
    """The smallest factor that makes `number` a decimal fraction."""
    rest = number.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest


def decimal_text(number: Fraction) -> str:
    """A decimal fraction as text, exactly: 60, 0.25."""
    if number.denominator == 1:
        return str(number.numerator)
    digits = number.denominator.bit_length()  # more than enough, so that nothing is cut off
    text = str(number.numerator * 10**digits // number.denominator).rjust(digits + 1, "0")
    return f"{text[:-digits]}.{text[-digits:]}".rstrip("0")
