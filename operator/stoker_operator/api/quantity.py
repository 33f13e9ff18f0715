"""Kubernetes' amounts (``500m``, ``16Gi``, ``1e3``) as numbers."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from typing import Final

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


def amount(value: int | str) -> Decimal:
    """What a quantity amounts to.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([a-zA-Z]*)", str(value))
    if match is None or match[2] not in _SCALE:
        raise ValueError(f"{value!r} is no quantity")
    return Decimal(match[1]) * _SCALE[match[2]]


def canonical(value: int | str) -> str:
    """A quantity as the API server writes it: the largest suffix of its kind that leaves a whole number.

    Raises:
        ValueError: it is none.
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
    if suffix[:1] in ("e", "E") and len(suffix) > 1:  # 1e3 keeps an exponent; 1E is a suffix
        return f"{whole}e{3 * power}" if power else str(whole)
    return f"{whole}{_DECIMAL[power + 3]}"
