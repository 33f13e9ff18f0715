"""Bytes of one number, by the names of `contract.names`."""

from __future__ import annotations

from typing import Final

_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float": 4, "half": 2, "float64": 8}


def element_bytes(dtype: str) -> int:
    """Bytes of one number of a config.json's dtype (``bfloat16``, ``torch.bfloat16``); 2 where it is none of ours."""
    return _BYTES.get(dtype.removeprefix("torch."), 2)


def kv_element_bytes(kv_cache_dtype: str, model_bytes: int) -> int:
    """Bytes of one number in the KV cache, where those of the model have `model_bytes`."""
    return 1 if kv_cache_dtype.startswith("fp8") else model_bytes
