"""Bytes of one element, by the dtype's name in torch or config.json."""

from __future__ import annotations

from typing import Final

_BYTES: Final = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float": 4,
    "half": 2,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element of a dtype (``bfloat16``, ``torch.bfloat16``), or 2 if it is unknown."""
    return _BYTES.get(dtype.removeprefix("torch."), 2)
