"""Kubernetes quantities (``500m``, ``16Gi``, ``1e3``) as numbers.

The grammar and the limits are those of ``k8s.io/apimachinery/pkg/api/resource``: nine decimals, rounded up, and no
magnitude beyond 2^63 - 1. What an exponent says is compared before any number is built, so that ``1e999999`` costs no
more than ``1``.
"""

from __future__ import annotations

import re
from decimal import ROUND_UP, Context, Decimal
from typing import Final

#: The largest magnitude of a quantity.
LARGEST: Final = 2**63 - 1

_SMALLEST: Final = Decimal("1e-9")
_SCALE: Final = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}
_QUANTITY: Final = re.compile(
    r"([+-]?)([0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE]([+-]?[0-9]+)|([KMGTPE]i|[numkMGTPE]|))", re.ASCII
)
#: Digits that are read of a number. No type of the API lets one be longer; what is cut from one with more is not seen.
_DIGITS: Final = 256
#: Digits of an exponent that are read; any exponent that has more is beyond all limits.
_EXPONENT_DIGITS: Final = 6
#: So many digits that neither product nor sum of what is read is rounded.
_EXACT: Final = Context(prec=2 * _DIGITS)


def amount(value: int | str) -> Decimal:
    """The number that a quantity stands for, from -`LARGEST` to `LARGEST`, with nine decimals at most.

    Raises:
        ValueError: `value` is no quantity.
    """
    if isinstance(value, int):
        return Decimal(max(-LARGEST, min(value, LARGEST)))
    match = _QUANTITY.fullmatch(value)
    if match is None:
        raise ValueError(f"{value[:64]!r} is no quantity")
    sign, digits, exponent, suffix = match.groups()
    magnitude = _magnitude(digits, exponent, suffix)
    return -magnitude if sign == "-" else magnitude


def _magnitude(digits: str, exponent: str | None, suffix: str | None) -> Decimal:
    whole, _, fraction = digits.partition(".")
    whole = whole.lstrip("0")
    if len(whole) > _DIGITS:
        return Decimal(LARGEST)
    number = _EXACT.create_decimal(f"{whole or 0}.{fraction[:_DIGITS]}")
    if not number:
        return number
    if exponent is None:
        scaled = _EXACT.multiply(number, _SCALE[suffix or ""])
    else:
        power = _power(exponent)
        order = number.adjusted() + power  # the power of ten of its first digit
        if order > 18:
            return Decimal(LARGEST)
        if order < -9:
            return _SMALLEST
        scaled = number.scaleb(power, _EXACT)
    if scaled >= LARGEST:
        return Decimal(LARGEST)
    return scaled.quantize(_SMALLEST, ROUND_UP, _EXACT)


def _power(exponent: str) -> int:
    digits = exponent.lstrip("+-").lstrip("0")
    power = int(digits or "0") if len(digits) <= _EXPONENT_DIGITS else 10**_EXPONENT_DIGITS
    return -power if exponent[0] == "-" else power
