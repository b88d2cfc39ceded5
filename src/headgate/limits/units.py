"""Units of budgets: what an amount counts, and to how many decimals."""

import re
from decimal import Decimal
from typing import Final

from headgate.errors import refuse

BUILT_IN: Final = {"": 0, "usd": 6, "eur": 6, "tokens": 0, "requests": 0}
"""The units that need no decimals in their text, and the decimals that they have. An amount without a unit is whole."""

_UNIT: Final = re.compile(r"(?P<name>[a-z][a-z_]{0,30})(?::(?P<decimals>[0-9]))?", re.ASCII)


def unit_of(unit: object) -> tuple[str, int]:
    """A unit as it is written, and its decimals: "usd" has 6, "credits:2" has 2.

    >>> unit_of("usd"), unit_of("credits:2")
    (('usd', 6), ('credits:2', 2))
    """
    if unit == "":
        return "", 0
    match = _UNIT.fullmatch(unit) if isinstance(unit, str) else None
    if match is None:
        refuse("unit", "a name of a-z and _, up to 31, perhaps with its decimals from 0 to 9: 'usd', 'credits:2'", unit)
    name, built_in = match["name"], BUILT_IN.get(match["name"])
    if match["decimals"] is None:
        if built_in is None:
            known = ", ".join([one for one in BUILT_IN if one])
            refuse("unit", f"{known}, or another name with its decimals, such as '{name}:2'", unit)
        return name, built_in
    decimals = int(match["decimals"])
    if built_in is None:
        return f"{name}:{decimals}", decimals
    if decimals != built_in:
        refuse("unit", f"'{name}', which has {built_in} decimals", unit)
    return name, built_in


def in_units(amount: int, decimals: int) -> Decimal:
    """An amount of smallest units in units.

    >>> in_units(31_200, 6)
    Decimal('0.031200')
    """
    return Decimal(amount).scaleb(-decimals)


def amount_text(amount: Decimal) -> str:
    """An amount in plain digits, which lose nothing in JSON or CSV: never with an exponent.

    >>> amount_text(Decimal("1E-6"))
    '0.000001'
    """
    return format(amount, "f")
