"""Bytes of one number, by the names of `contract.names`."""

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
    """Bytes of one number of a config.json's dtype (``bfloat16``, ``torch.bfloat16``); 2 where it is none of ours."""
    return _BYTES.get(dtype.removeprefix("torch."), 2)
