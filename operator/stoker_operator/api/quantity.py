"""Kubernetes quantities (``500m``, ``16Gi``, ``1e3``) as numbers.

Grammar and limits are those of ``k8s.io/apimachinery/pkg/api/resource``: nine decimals, rounded away from zero, and a
magnitude of at most 2^63 - 1. The exponent is checked before a number is built, so ``1e999999`` takes no longer than
``1``.
"""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, ROUND_UP, Context, Decimal
from typing import Final

#: Maximum magnitude of a quantity.
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
#: Suffixes by powers of 1,024, and by powers of 1,000 from -3.
_BINARY: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL: Final = ("n", "u", "m", "", "k", "M", "G", "T", "P", "E")
_QUANTITY: Final = re.compile(
    r"([+-]?)([0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE]([+-]?[0-9]+)|([KMGTPE]i|[numkMGTPE]|))", re.ASCII
)
#: Maximum number of digits that are read, on each side of the decimal point.
_DIGITS: Final = 256
#: Maximum number of digits of an exponent; an exponent with more digits is out of range.
_EXPONENT_DIGITS: Final = 6
#: Decimal context with enough digits to scale numbers exactly if the result is in range.
_EXACT: Final = Context(prec=2 * _DIGITS)


def amount(value: int | str) -> Decimal:
    """Return the value of a quantity, from -`LARGEST` to `LARGEST`, with at most nine decimals.

    Raises:
        ValueError: `value` is not a quantity.
    """
    if isinstance(value, int):
        return Decimal(max(-LARGEST, min(value, LARGEST)))
    match = _QUANTITY.fullmatch(value)
    if match is None:
        raise ValueError(f"{value[:64]!r} is not a quantity")
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
        order = number.adjusted() + power  # exponent of the first digit
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


def canonical(value: int | str) -> str:
    """Return a quantity as the API server writes it, such as ``1Gi`` for ``1024Mi``.

    Raises:
        ValueError: `value` is not a quantity.
    """
    number = amount(value)
    text = str(value)
    suffix = text.lstrip("+-0123456789.")
    if suffix in _BINARY[1:] and abs(number) >= 1024:
        whole = int(number.to_integral_value(ROUND_CEILING))
        power = 0
        while power < len(_BINARY) - 1 and whole % 1024 == 0:
            whole, power = whole // 1024, power + 1
        return f"{whole}{_BINARY[power]}"
    if number == 0:
        return "0"
    whole, power = int((number * 10**9).to_integral_value(ROUND_CEILING)), -3
    while power < len(_DECIMAL) - 4 and whole % 1000 == 0:
        whole, power = whole // 1000, power + 1
    if suffix[:1] in ("e", "E") and len(suffix) > 1:  # 1e3 has an exponent, 1E a suffix
        return f"{whole}e{3 * power}" if power else str(whole)
    return f"{whole}{_DECIMAL[power + 3]}"
