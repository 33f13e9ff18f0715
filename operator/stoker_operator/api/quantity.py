"""Kubernetes' amounts (``500m``, ``16Gi``, ``1e3``) as numbers."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

_SCALE: Final = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}


def amount(value: int | str) -> Decimal:
    """What a quantity amounts to.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([a-zA-Z]*)", str(value))
    if match is None or match[2] not in _SCALE:
        raise ValueError(f"{value!r} is no quantity")
    return Decimal(match[1]) * _SCALE[match[2]]
