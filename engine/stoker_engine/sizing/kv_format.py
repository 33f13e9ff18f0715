"""Storage formats of the KV cache, by their names in ``--kv-cache-dtype`` (as in vLLM).

    auto                  the model's dtype
    bfloat16              bfloat16
    fp8, fp8_e4m3         float8 e4m3 with one scale for each layer: the checkpoint's, or 1
    fp8_e5m2              float8 e5m2 without scale: float16's range
    fp8_per_token_head    float8 e4m3 with a scale for each token and head, computed when stored
    int8_per_token_head   int8, scaled as above

A scale for each token and head is float32 and stored in the token's block. Keys and values have separate scales; the
latent vector of multi-head latent attention has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stoker_engine.architectures.cache_spec import CacheSpec
from stoker_engine.sizing.dtype_sizes import element_bytes

_FLOAT32: Final = 4

_STORED: Final = {
    "bfloat16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp8_per_token_head": "float8_e4m3fn",
    "int8_per_token_head": "int8",
}


@dataclass(frozen=True)
class KVFormat:
    """Storage format of the KV cache.

    Attributes:
        dtype: torch's name of the dtype of keys and values.
        element_bytes: bytes of one element of a key or value.
        state_bytes: bytes of one element of the model's dtype, the default for states (`StateTensor.dtype`).
        scale_bytes: bytes of one scale for a token and head; 0 if there are no such scales.
    """

    dtype: str
    element_bytes: int
    state_bytes: int
    scale_bytes: int = 0

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values are stored in 8 bits."""
        return self.element_bytes == 1

    def token_bytes(self, spec: CacheSpec) -> int:
        """Return the bytes of one token in a layer; with scales, padded so that the next layer's float32 scales are
        aligned."""
        size = spec.numbers_per_token * self.element_bytes
        if self.scale_bytes:
            size += self.num_scales(spec) * self.scale_bytes
            size = -(-size // self.scale_bytes) * self.scale_bytes
        return size

    def num_scales(self, spec: CacheSpec) -> int:
        """Return the number of scales of one token in a layer, for formats with scales for each token."""
        return spec.num_kv_heads * (1 if spec.latent else 2)


def kv_format(kv_cache_dtype: str, model_dtype: str) -> KVFormat:
    """Return the format for ``--kv-cache-dtype`` in a model that computes in `model_dtype`.

    Args:
        kv_cache_dtype: one of `contract.names.KV_CACHE_DTYPES`.
        model_dtype: dtype name of config.json or torch (``bfloat16``, ``torch.bfloat16``).
    """
    model_dtype = model_dtype.removeprefix("torch.")
    dtype = _STORED.get(kv_cache_dtype, model_dtype)
    scale_bytes = _FLOAT32 if kv_cache_dtype.endswith("_per_token_head") else 0
    return KVFormat(dtype, element_bytes(dtype), element_bytes(model_dtype), scale_bytes)
